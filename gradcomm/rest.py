"""Residuals at rest, between two exchanges, in 8 bits (``residual="int8"``).

Xie, Lin, Toh, Zhou: "LoCo: Low-Bit Communication Adaptor for Large-Scale Model Training", 2024, keep the
error in 8 bits too. There it is a moving average; here it is what error feedback defines, rounded at
random: what rounding loses has mean zero, so nothing is held back for good.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradcomm import ops

#: Small blocks: an element is rounded in steps of 1/127 of the largest of so many.
BLOCK = 128
_FORMAT = ops.QuantizeFormat(BLOCK, stochastic=True)
_KEY = 0x2545F4914F6CDD1D  # other random numbers than those of the payload


@functools.lru_cache(maxsize=256)
def _layout(numel: int, origin: int) -> ops.Layout:
    return ops.Layout.of([(0, numel)], BLOCK, [origin])


def pack(flat: Tensor, key: int, origin: int) -> Tensor:
    """A residual, float32 ``[numel]``, as uint8 ``[1.03 numel]``. ``key`` and ``origin``: of the random
    numbers."""
    layout = _layout(flat.numel(), origin)
    packed = torch.empty(
        (1, layout.blocks * _FORMAT.record_bytes), dtype=torch.uint8, device=flat.device
    )
    ops.encode(flat, layout.table, _FORMAT.ints(), None, packed, None, key ^ _KEY)
    return packed


def unpack(packed: Tensor, flat: Tensor) -> None:
    """Writes what ``pack`` packed into ``flat``: the same bits each time."""
    table = _layout(flat.numel(), 0).table
    ops.decode_mean(packed.unsqueeze(0), table, _FORMAT.ints(), 0, flat)
