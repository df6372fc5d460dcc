"""1-bit signs with a scale for each block.

Seide, Fu, Droppo, Li, Yu: "1-Bit Stochastic Gradient Descent", Interspeech 2014; EF-SignSGD:
Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD", ICML 2019, algorithm 2:

    p = g + e;   s = mean |p| over the block;   send sign(p), s;   e <- p - s sign(p)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradcomm import ops

from . import rms
from .base import Recipe, RecordCodec, Turn
from .check import require

if TYPE_CHECKING:
    from gradcomm.part import Part


@dataclasses.dataclass(frozen=True)
class OneBit(RecordCodec):
    """One bit an element and a float32 scale for each block.

    ``block``: elements that share a scale, 128 to 4096, a multiple of 128. At 512, 0.133 byte an
    element: 30 times less than float32. Error feedback is on, on the worker's and on the owner's side.

    ``refresh``: the first so many steps, and every so many-th after them, are sent in 8 bits, residual
    included, which ends the drift of what is owed: 16 brings the mean from 0.133 to 0.189 byte an
    element. 0: never. ``normalize``: between refreshes, gradients are encoded in units of the running
    root mean square of the refreshed ones, element by element (``gradcomm.codec.rms``): for Adam and its
    kin, at one more float32 an element. Needs ``refresh``.

    A biased codec: it learns by its residual, which costs one float32 an element. Safe under SGD with
    momentum and under Adam when the first steps are plain and gradients are clipped before the
    residual (the recipe); it pays something in runs of a few hundred steps.
    """

    name = "onebit"
    block: int = 512
    refresh: int = 0
    normalize: bool = False

    def __post_init__(self) -> None:
        require(
            self.block % 128 == 0 and 128 <= self.block <= 4096,
            f"onebit: block={self.block!r}; use a multiple of 128 from 128 to 4096",
        )
        require(
            type(self.refresh) is int and self.refresh >= 0 and self.refresh != 1,
            f"onebit: refresh={self.refresh!r}; use 2 or more, or 0 for never (for each step: int8)",
        )
        require(
            self.normalize in (True, False) and (self.refresh > 0 or not self.normalize),
            f"onebit: normalize={self.normalize!r} with refresh={self.refresh!r}; units are learnt in "
            "refreshes: give refresh=16, say",
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(warmup_steps=100, clip_norm="auto", error_feedback=True)

    def own_slots(self, shape: torch.Size) -> dict[str, int]:
        return {rms.SLOT: shape.numel()} if self.normalize else {}

    def refreshes(self, step: int) -> bool:
        """Whether this step, counted from the first compressed one, is sent in 8 bits."""
        return self.refresh > 0 and (step < self.refresh or step % self.refresh == 0)

    def format(self, chunk_blocks: int, step: int) -> ops.Format:
        if self.refreshes(step):
            return ops.QuantizeFormat(self.block)
        return ops.OneBitFormat(self.block)

    def unit(self, part: Part, turn: Turn) -> Tensor | None:
        if not self.normalize or self.refreshes(turn.step):
            return None
        return turn.memory.shared(rms.SLOT, part, empty=1.0)

    def decode_mean(self, part: Part, payloads: Tensor, bucket: Tensor, turn: Turn) -> None:
        super().decode_mean(part, payloads, bucket, turn)
        if self.normalize and self.refreshes(turn.step):
            first, later = min(turn.step, self.refresh), max(0, turn.step // self.refresh - 1)
            rms.update(part, bucket, turn.memory, first + later)
