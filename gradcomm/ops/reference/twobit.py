"""csrc/device/twobit.cuh in PyTorch (Lloyd 1982, Max 1960)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import Format
from . import bits
from .onebit import mean_magnitude

_LOW, _HIGH, _THRESHOLD = torch.tensor([0.5675, 1.893, 1.23025])


def encode(
    p: Tensor, kept: Tensor, counts: Tensor, format: Format, key: int, counters: Tensor
) -> tuple[Tensor, Tensor]:
    scale = mean_magnitude(p, counts)
    finite = torch.isfinite(scale * _HIGH.item())
    scale = torch.where(finite, scale, float("nan"))
    over = bits.bits(p.abs()) > bits.bits(scale * _THRESHOLD.item()).unsqueeze(1)
    fields = torch.where(finite.unsqueeze(1), (bits.bits(p) >> 31) + 2 * over.long(), 0)
    records = torch.cat([bits.header(scale), bits.pack(fields, 2)], dim=1)
    return records, torch.where(finite.unsqueeze(1), p - _value(fields, scale.unsqueeze(1)), kept)


def _value(fields: Tensor, scale: Tensor) -> Tensor:
    level = torch.where(fields >= 2, scale * _HIGH.item(), scale * _LOW.item())
    return bits.floats(bits.bits(level) ^ ((fields & 1) << 31))


def mean(records: Tensor, format: Format) -> Tensor:
    scale = bits.read_header(records[..., :4]).unsqueeze(-1)
    return bits.mean_of(_value(bits.unpack(records[..., 4:], 2), scale))
