"""csrc/device/quantize.cuh in PyTorch (QSGD, Alistarh et al. 2017; Dettmers 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import Format, QuantizeFormat
from . import bits

_TINY = 1e-30
_ROUND = 1.5 * 2**23  # added and taken away: to nearest, ties to even, and -0 becomes +0


def encode(
    p: Tensor, kept: Tensor, counts: Tensor, format: Format, key: int, counters: Tensor
) -> tuple[Tensor, Tensor]:
    assert isinstance(format, QuantizeFormat)
    magnitude = (bits.bits(p) & 0x7FFFFFFF).amax(1)
    used = torch.arange(p.size(1), device=p.device) < counts.unsqueeze(1)
    if format.asymmetric:
        low = torch.where(used, p, torch.inf).amin(1) + 0.0
        high = torch.where(used, p, -torch.inf).amax(1) + 0.0
    else:
        low, high = torch.zeros_like(p[:, 0]), bits.floats(magnitude)
    most = torch.full_like(low, 2**format.bits - 1 if format.asymmetric else 2 ** (format.bits - 1) - 1)
    least = torch.zeros_like(most) if format.asymmetric else -most

    spread = high - low
    finite = (magnitude < bits.INFINITY) & torch.isfinite(spread)
    sends = finite & ~(spread < torch.tensor(_TINY, dtype=torch.float32, device=p.device))
    step = spread / most
    step = torch.where(torch.isfinite(step * most + low), step, bits.floats(bits.bits(step) - 1))
    inverse = torch.where(sends, 1 / step, 0.0)
    step = torch.where(sends, step, torch.where(finite, 0.0, torch.nan))
    low = torch.where(finite, low, 0.0)

    low, step, inverse, most, least = (t.unsqueeze(1) for t in (low, step, inverse, most, least))
    x = (p - low) * inverse
    if format.stochastic:
        u = (bits.random_bits(key, counters, p.size(1)) >> 8).float() * 2.0**-24
        x = torch.minimum(torch.maximum(x + u, least), most).floor()
    q = (x + _ROUND) - _ROUND
    field = torch.where(finite.unsqueeze(1) & used, q, 0.0).long() & (2**format.bits - 1)
    header = [bits.header(low[:, 0])] if format.asymmetric else []
    records = torch.cat([*header, bits.header(step[:, 0]), bits.pack(field, format.bits)], dim=1)
    decoded = q * step + low if format.asymmetric else q * step
    return records, torch.where(finite.unsqueeze(1), p - decoded, kept)


def mean(records: Tensor, format: Format) -> Tensor:
    assert isinstance(format, QuantizeFormat)
    start = 8 if format.asymmetric else 4
    step = bits.read_header(records[..., start - 4 : start]).unsqueeze(-1)
    field = bits.unpack(records[..., start:], format.bits)
    if format.asymmetric:
        return bits.mean_of(field.float() * step + bits.read_header(records[..., :4]).unsqueeze(-1))
    signed = field - ((field >> (format.bits - 1)) << format.bits)
    return bits.mean_of(signed.float() * step)
