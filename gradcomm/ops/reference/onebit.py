"""csrc/device/onebit.cuh in PyTorch (Seide et al. 2014; Karimireddy et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import Format
from . import bits

_SUMS = 32


def mean_magnitude(p: Tensor, counts: Tensor) -> Tensor:
    """Of the elements in use of each block: float32 ``[blocks]``."""
    rows = p.abs().view(p.size(0), -1, _SUMS)
    sums = torch.zeros_like(rows[:, 0])
    for i in range(rows.size(1)):
        sums = sums + rows[:, i]
    width = _SUMS // 2
    while width:
        sums = sums[:, :width] + sums[:, width : 2 * width]
        width //= 2
    return sums[:, 0] / counts.clamp(min=1)


def encode(
    p: Tensor, kept: Tensor, counts: Tensor, format: Format, key: int, counters: Tensor
) -> tuple[Tensor, Tensor]:
    scale = mean_magnitude(p, counts)
    finite = torch.isfinite(scale)
    scale = torch.where(finite, scale, float("nan"))
    sign = torch.where(finite.unsqueeze(1), bits.bits(p) >> 31, 0)
    records = torch.cat([bits.header(scale), bits.pack(sign, 1)], dim=1)
    left = p - torch.where(sign == 1, -scale.unsqueeze(1), scale.unsqueeze(1))
    return records, torch.where(finite.unsqueeze(1), left, kept)


def mean(records: Tensor, format: Format) -> Tensor:
    scale = bits.read_header(records[..., :4]).unsqueeze(-1)
    sign = bits.unpack(records[..., 4:], 1)
    return bits.mean_of(bits.floats(bits.bits(scale) ^ (sign << 31)))
