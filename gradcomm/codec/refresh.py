"""Codecs that send everything in 8 bits now and then, and between that in units of what they learnt.

A coarse codec owes: what a step does not send waits in the residual, and comes late. An exchange in 8
bits, residual included, every 16th step say, ends that, and shows every element by itself, which is what
the units of ``gradcomm.codec.rms`` are learnt from.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradcomm import ops

from . import rms
from .base import RecordCodec, Turn
from .check import require

if TYPE_CHECKING:
    from gradcomm.part import Part


@dataclasses.dataclass(frozen=True)
class RefreshedCodec(RecordCodec):
    """``refresh``: the first so many compressed steps, and every so many-th after them, are sent in 8
    bits, residual included: 16 costs 1/16 byte an element and step. 0: never. ``normalize``: between
    refreshes, gradients are encoded in units of the running root mean square of the refreshed ones,
    element by element (``gradcomm.codec.rms``): for Adam and its kin, at one more float32 an element in
    memory. Needs ``refresh``."""

    refresh: int = dataclasses.field(default=0, kw_only=True)
    normalize: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require(
            type(self.refresh) is int and self.refresh >= 0 and self.refresh != 1,
            f"{self.name}: refresh={self.refresh!r}; use 2 or more, or 0 for never (each step: int8)",
        )
        require(
            self.normalize in (True, False) and (self.refresh > 0 or not self.normalize),
            f"{self.name}: normalize={self.normalize!r} with refresh={self.refresh!r}; units are learnt "
            "in refreshes: give refresh=16, say",
        )

    @abc.abstractmethod
    def between(self, chunk_blocks: int, step: int) -> ops.Format:
        """The wire format of a step that is not a refresh: see ``format``."""

    def own_slots(self, shape: torch.Size) -> dict[str, int]:
        return {rms.SLOT: shape.numel()} if self.normalize else {}

    def refreshes(self, step: int) -> bool:
        """Whether this step, counted from the first compressed one, is sent in 8 bits."""
        return self.refresh > 0 and (step < self.refresh or step % self.refresh == 0)

    def format(self, chunk_blocks: int, step: int) -> ops.Format:
        if self.refreshes(step):
            return ops.QuantizeFormat(self.block)
        return self.between(chunk_blocks, step)

    def unit(self, part: Part, turn: Turn) -> Tensor | None:
        if not self.normalize or self.refreshes(turn.step):
            return None
        return turn.memory.shared(rms.SLOT, part, empty=1.0)

    def decode_mean(self, part: Part, payloads: Tensor, bucket: Tensor, turn: Turn) -> None:
        super().decode_mean(part, payloads, bucket, turn)
        if self.normalize and self.refreshes(turn.step):
            first, later = min(turn.step, self.refresh), max(0, turn.step // self.refresh - 1)
            rms.update(part, bucket, turn.memory, first + later)
