"""16-bit floats: a cast there and a cast back."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gradcomm import ops

from .base import RecordCodec, Turn
from .check import require

if TYPE_CHECKING:
    from gradcomm.part import Part

_WIRE = {"float16": (ops.FLOAT16, torch.float16), "bfloat16": (ops.BFLOAT16, torch.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Cast(RecordCodec):
    """``dtype="float16"`` or ``"bfloat16"``: two bytes an element.

    By gather or shard the ranks' values are summed in float32. By reduce (the default where the
    backend sums 16-bit types at full speed: NCCL) they are divided by the number of ranks before the
    cast, so that a sum cannot overflow where the mean does not. Values beyond float16's range are sent
    as ±65504. Safe under every optimizer; use bfloat16 where gradients span many magnitudes.
    """

    name = "cast"
    exchanges: ClassVar[tuple[str, ...]] = ("gather", "shard", "hierarchy", "reduce")
    dtype: str = "float16"

    def __post_init__(self) -> None:
        require(self.dtype in _WIRE, f"cast: dtype={self.dtype!r}; use 'float16' or 'bfloat16'")

    @property
    def block(self) -> int:
        return 64

    def format(self, chunk_blocks: int, step: int) -> ops.Format:
        return ops.CastFormat(self.block, _WIRE[self.dtype][0])

    def rounds(self, part: Part, bucket: Tensor, turn: Turn) -> Generator[Tensor, None, None]:
        size = self.chunk_bytes(part.chunk_blocks(1), turn.step)
        payload = turn.scratch.get("gathered", (1, size), torch.uint8, bucket.device)
        share = torch.full((1,), 1.0 / turn.ranks, device=bucket.device)
        if turn.gain is not None:
            share *= turn.gain
        self.encode(part, bucket, payload, dataclasses.replace(turn, gain=share))
        yield payload.view(_WIRE[self.dtype][1])
        self.decode_mean(part, payload.unsqueeze(0), bucket, turn)
