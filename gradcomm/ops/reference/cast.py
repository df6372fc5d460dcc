"""csrc/device/cast.cuh in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import CastFormat, Format
from . import bits

#: In the order of ``WireType``: the type, and its NaN as the integer that a payload may hold.
_WIRE = (
    (torch.float32, torch.int32, 0x7FC00000),
    (torch.float16, torch.int16, 0x7E00),
    (torch.bfloat16, torch.int16, 0x7FC0),
)


def encode(
    p: Tensor, kept: Tensor, counts: Tensor, format: Format, key: int, counters: Tensor
) -> tuple[Tensor, Tensor]:
    assert isinstance(format, CastFormat)
    wire, integer, nan = _WIRE[format.wire]
    largest = torch.finfo(wire).max
    near = torch.where(torch.isfinite(p), p.clamp(-largest, largest), p).to(wire)
    records = torch.where(torch.isnan(p), torch.full_like(near, nan, dtype=integer), near.view(integer))
    return records.view(torch.uint8), torch.where(torch.isfinite(p), p - near.float(), kept)


def mean(records: Tensor, format: Format) -> Tensor:
    assert isinstance(format, CastFormat)
    return bits.mean_of(records.contiguous().view(_WIRE[format.wire][0]).float())
