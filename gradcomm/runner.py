"""In the lane: the exchanges of one bucket, and what is measured of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from gradcomm.buckets import BucketKey
from gradcomm.clip import Clip
from gradcomm.codec import Dense
from gradcomm.codec.base import Codec, Scratch, Turn
from gradcomm.exchange import EXCHANGES
from gradcomm.memory import Memory
from gradcomm.part import Part, Slice
from gradcomm.random import key_of
from gradcomm.stats import Meter, Traffic
from gradcomm.transport import Transport
from gradcomm.verify import compare_ranks


class ExchangeError(RuntimeError):
    """An exchange failed: in which phase, of what; ``__cause__`` is the error itself."""


@dataclasses.dataclass
class Runner:
    """Everything that an exchange needs besides the bucket. Options are those of ``CommState``;
    ``find_unused``: whether there may be parameters without a gradient in a step."""

    transport: Transport
    memory: Memory
    clip: Clip | None
    since: int  # the first step that is compressed
    error_feedback: bool | Literal["worker"]
    momentum: float
    nesterov: bool
    seed: int
    measure_every: int
    verify: bool
    find_unused: bool
    meter: Meter
    scratch: Scratch = dataclasses.field(default_factory=Scratch)
    _phase: str = "idle"

    def beside(self, transport: Transport) -> Runner:
        """Another one for the same buckets, over another transport."""
        return dataclasses.replace(self, transport=transport, scratch=Scratch())

    def run(
        self,
        parts: list[Part],
        key: BucketKey,
        buffer: Tensor,
        step: int,
        spend: Codec | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Replaces a bucket by its mean over ranks. ``spend``: the parts are plain, and the residuals
        that this codec left are added and so used up. ``begun`` is called when no later bucket's result
        depends any more on who is first. Raises ExchangeError, which names the phase."""
        what, self._phase = "the bucket", "encode"
        try:
            plain = buffer.is_sparse or not buffer.is_floating_point()
            exact = None
            if self.measure_every and step % self.measure_every == 0 and not buffer.is_sparse:
                exact = self._exact_mean(buffer)
            gain = None
            if self.clip is not None and not plain:
                with self._clock("encode"):
                    gain = self.clip.gain(key, buffer, step)
            begun()
            for part in parts:
                what = f"{part.codec.name} by {part.exchange}"
                self._exchange(part, buffer, step, gain, plain, None if plain else spend)
            if exact is not None:
                norm = torch.linalg.vector_norm
                self.meter.sample(norm(buffer - exact) / norm(exact).clamp(min=1e-30))
            if self.verify:
                what, self._phase = "all parts", "verify"
                compare_ranks(self.transport, buffer)
        except Exception as cause:
            where = f"{self._phase} of {what}"
            raise ExchangeError(f"{where}: {type(cause).__name__}: {cause}") from cause

    def _exchange(
        self,
        part: Part,
        buffer: Tensor,
        step: int,
        gain: Tensor | None,
        plain: bool,
        spend: Codec | None,
    ) -> None:
        turn = Turn(
            step=max(0, step - self.since),
            key=key_of(self.seed, step, self.transport.rank),
            gain=gain,
            ranks=self.transport.size,
            rank=self.transport.rank,
            memory=self.memory,
            error_feedback=self.error_feedback,
            scratch=self.scratch,
        )
        remembers = self.momentum or (self.error_feedback and not isinstance(part.codec, Dense))
        if self.find_unused and remembers and not plain:
            with self._clock("encode"):
                turn.unused = _unused(part, buffer)
        if self.momentum and not plain:
            with self._clock("encode"):
                turn.momentum = self._accelerate(part, buffer, gain, turn.unused)
            turn.gain = None
        if spend is not None:
            with self._clock("encode"):
                self._add_residuals(part, buffer, turn.gain, spend.by_index)
            turn.gain = None
        before = self.transport.traffic.sent
        EXCHANGES[part.exchange](part, buffer, turn, self.transport, self._clock)
        self.meter.count(
            part.codec.name,
            part.numel,
            buffer.element_size(),
            self.transport.size,
            self.transport.traffic.sent - before,
        )
        if spend is not None:
            self._forget_residuals(part, buffer, spend.by_index)

    def _clock(self, phase: str) -> AbstractContextManager[None]:
        self._phase = phase
        return self.meter.clock(phase)

    def _exact_mean(self, buffer: Tensor) -> Tensor:
        exact = buffer / self.transport.size
        uncounted, self.transport.traffic = self.transport.traffic, Traffic()
        self.transport.all_reduce(exact)
        self.transport.traffic = uncounted
        return exact

    def _accelerate(
        self, part: Part, buffer: Tensor, gain: Tensor | None, unused: tuple[int, ...]
    ) -> Tensor:
        """Momentum correction: u <- momentum u + gain g, for the part; u, or by Nesterov momentum u +
        gain g, replaces g in the bucket. Where that is not finite the others hear of it, and u stays
        what it was."""
        u = self.memory.flat("momentum", part)
        for i, (s, (first, numel)) in enumerate(zip(part.slices, part.layout.places(), strict=True)):
            if i in unused:
                continue
            mine, g = u[first : first + numel], buffer[s.offset : s.offset + numel]
            own = g if gain is None else g * gain
            moved = own + self.momentum * mine
            torch.where(torch.isfinite(moved), moved, mine, out=mine)
            g.copy_(own + self.momentum * moved if self.nesterov else moved)
        return u

    def _add_residuals(self, part: Part, buffer: Tensor, gain: Tensor | None, by_index: bool) -> None:
        """g <- gain g + e, in the bucket."""
        for s in part.slices:
            g, held = _laid(s, buffer, by_index), self.memory.held("residual", s.key)
            if gain is not None:
                g.mul_(gain.to(g.dtype))
            if held is not None:
                g.add_(held.view_as(g))

    def _forget_residuals(self, part: Part, buffer: Tensor, by_index: bool) -> None:
        """e <- 0 where the mean is finite. Where it is not, that step costs nothing but itself."""
        for s in part.slices:
            mean, held = _laid(s, buffer, by_index), self.memory.held("residual", s.key)
            if held is not None:
                held.view_as(mean).masked_fill_(torch.isfinite(mean), 0.0)


def _laid(s: Slice, buffer: Tensor, by_index: bool) -> Tensor:
    """A parameter's gradient in the bucket, as its residual lies in the memory."""
    return s.view(buffer) if by_index else buffer[s.offset : s.offset + s.numel]


def _unused(part: Part, buffer: Tensor) -> tuple[int, ...]:
    """The parameters of a part whose gradient is zero throughout, as DDP fills it in where a rank has
    none. Few elements tell that of nearly all others. On a GPU the host waits for these."""
    found = []
    for i, s in enumerate(part.slices):
        g = buffer[s.offset : s.offset + s.numel]
        if not bool(g[:64].any()) and not bool(g.any()):
            found.append(i)
    return tuple(found)
