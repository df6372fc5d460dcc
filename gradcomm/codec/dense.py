"""No compression: the sum of the gradients themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Codec, Turn

if TYPE_CHECKING:
    from gradcomm.part import Part


@dataclasses.dataclass(frozen=True)
class Dense(Codec):
    """Plain gradients in their own dtype, any dtype: what DDP sends without a hook, bit for bit."""

    name = "none"
    exchanges = ("reduce",)
    in_pieces = False  # there is nothing to encode, and whole it is DDP's own bit for bit

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        return True

    def rounds(self, part: Part, bucket: Tensor, turn: Turn) -> Generator[Tensor, None, None]:
        if turn.gain is not None and not bucket.is_sparse:
            for view in part.views(bucket):
                view.mul_(turn.gain.to(bucket.dtype))
        if part.whole:
            # Before the sum, and as a product, as DDP does it: the same bits, and no overflow.
            yield bucket.mul_(1.0 / turn.ranks)
            return
        packed = turn.scratch.get("plain", (part.numel,), bucket.dtype, bucket.device)
        views = part.views(bucket)
        torch.cat([v.flatten() for v in views], out=packed)
        yield packed.mul_(1.0 / turn.ranks)
        for view, mean in zip(views, packed.split([v.numel() for v in views]), strict=True):
            view.copy_(mean.view_as(view))
