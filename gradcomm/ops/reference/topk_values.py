"""csrc/device/topk_values.cuh in PyTorch: how the values of the top-k formats travel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import FLOAT16, FLOAT32
from . import bits

_TINY = 1e-30
_LARGEST_SCALE = 0x7C010203
_F16_MAX = 65504.0


def canonical(x: Tensor) -> Tensor:
    """float32 with every NaN made the one that a payload may hold."""
    return torch.where(torch.isnan(x), bits.floats(torch.full_like(x, bits.NAN, dtype=torch.int64)), x)


def order_key(x: Tensor) -> Tensor:
    """int64 that orders as |x| does, every NaN being the same and largest."""
    return (bits.bits(x) & 0x7FFFFFFF).clamp(max=bits.NAN)


def write(value: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float32 ``[n, m]``, a row sharing a scale, to ``(values, scales, left, stays)``: the bytes
    ``[n, m * size]`` and ``[n, 4]``, v minus what they decode to, and where the residual stays instead.
    """
    finite, nan = torch.isfinite(v), torch.isnan(v)
    scales = torch.zeros(v.size(0), device=v.device)
    if value == FLOAT32:
        wire = canonical(v)
        decoded = wire
    elif value == FLOAT16:
        half = torch.where(finite, v.clamp(-_F16_MAX, _F16_MAX), v).to(torch.float16)
        wire = torch.where(nan, torch.full_like(v, 0x7E00, dtype=torch.int16).view(torch.float16), half)
        decoded = wire.float()
    else:
        largest = bits.floats(order_key(v).amax(1))
        most = bits.floats(torch.tensor([_LARGEST_SCALE], device=v.device))
        scales = torch.where(largest < _TINY, 0.0, torch.minimum(largest / 127.0, most))
        broken = ~torch.isfinite(largest)
        scales = canonical(torch.where(broken, float("nan"), scales))
        inverse = torch.where(scales > 0, 1.0 / scales, 0.0).unsqueeze(1)
        finite = (~broken).unsqueeze(1).expand_as(v)
        wire = torch.where(finite, (v * inverse).round().clamp(-127, 127), 0.0).to(torch.int8)
        decoded = wire.float() * scales.unsqueeze(1)
    return (
        wire.contiguous().view(torch.uint8).view(v.size(0), -1),
        bits.header(scales),
        v - decoded,
        ~finite,
    )


def read(value: int, values: Tensor, scales: Tensor) -> Tensor:
    """The inverse of ``write``: bytes ``[..., m * size]`` and ``[..., 4]`` to float32 ``[..., m]``."""
    if value == FLOAT32:
        return values.contiguous().view(torch.float32)
    if value == FLOAT16:
        return values.contiguous().view(torch.float16).float()
    return values.contiguous().view(torch.int8).float() * bits.read_header(scales).unsqueeze(-1)
