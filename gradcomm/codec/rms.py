"""Gradients in units of their own running root mean square.

A codec with one scale for a block sends a quiet element as large as its loud neighbours. SGD does not
mind; Adam, which divides every element by its own second moment, amplifies the quiet ones. So each
element is divided by r before encoding and multiplied by it after decoding, where r is Adam's second
moment (Kingma & Ba, "Adam", ICLR 2015) as far as all ranks know it, from exchanges that carry every
element by itself, plus a floor for elements that are hardly ever moved:

    v <- v + w (mean² - v),   w = max(1/20, 1/n) in the n-th such exchange
    r  = sqrt(v) + mean(sqrt(v)) / 10,   the mean over the parameter

The memory holds r, the same on every rank, in the slot ``rms``; v is found from it again. It is 1 where
nothing is known yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradcomm.memory import Memory
    from gradcomm.part import Part

SLOT = "rms"
FLOOR = 0.1
LEAST_WEIGHT = 0.05


def update(part: Part, bucket: Tensor, memory: Memory, exchanges: int) -> None:
    """Takes the mean that ``bucket`` holds into r, in place; ``exchanges``: such ones before."""
    weight = max(LEAST_WEIGHT, 1.0 / (exchanges + 1))
    rms = memory.shared(SLOT, part, empty=1.0)
    for mean, r in zip(part.elements(bucket), part.by_segment(rms), strict=True):
        r.copy_(moved(r, mean, weight))


def moved(r: Tensor, mean: Tensor, weight: float) -> Tensor:
    """The next r of a parameter, float32. Where the mean is not finite, or zero in all of the parameter,
    which nobody used then, v stays."""
    root = (r - r.mean() * (FLOOR / (1.0 + FLOOR))).clamp_(min=0.0)
    weights = torch.full_like(r[:1], weight).masked_fill_((r == 1.0).all(), 1.0)  # nothing was known
    other = torch.lerp(root.square(), mean.float().square(), weights).sqrt_()
    other = torch.where(other.isfinite(), other, root)
    other.add_(other.mean(), alpha=FLOOR).masked_fill_(other == 0.0, 1.0)
    return torch.where(mean.any(), other, r)
