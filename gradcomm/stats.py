"""What is measured: time by phase, bytes by what the transport was given."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gradcomm.streams import Event, Streams

#: ``with clock("wire"): …`` adds the time to a phase.
Clock = Callable[[str], AbstractContextManager[None]]

PHASES = ("encode", "wire", "decode")

#: So many pairs of events are kept at most before those that have come are read.
_EVENTS_KEPT = 256


@dataclasses.dataclass
class Traffic:
    """Bytes and calls of one transport, counted by what it was given."""

    sent: int = 0
    received: int = 0
    calls: int = 0
    into: Traffic | None = None  # what this is a part of

    def add(self, sent: int, received: int) -> None:
        if self.into is not None:
            self.into.add(sent, received)
        self.sent += sent
        self.received += received
        self.calls += 1

    @staticmethod
    def of(parts: Iterable[Traffic]) -> Traffic:
        """The sum."""
        total = Traffic()
        for part in parts:
            total.sent += part.sent
            total.received += part.received
            total.calls += part.calls
        return total


class Meter:
    """Sums of one training run, by codec.

    On a GPU times are those of the stream that a phase runs on, between events that are read when
    ``report`` asks for them: measuring makes nothing wait.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((*PHASES, "wait"), 0.0)
        self.plain_bytes = 0.0  # what an all-reduce of the same buckets would have sent
        self.sent: dict[str, int] = {}  # by codec
        self.elements: dict[str, int] = {}  # by codec
        self._error_count: Tensor | int = 0  # samples of the relative compression error
        self._error_sum: Tensor | float = 0.0
        self._streams = None if streams is None or streams.on_cpu else streams
        self._events: collections.deque[tuple[str, Event, Event]] = collections.deque()
        self._reading = threading.Lock()

    def clock(self, phase: str) -> AbstractContextManager[None]:
        """A phase of an exchange, on the lane's stream."""
        return self._measure(phase)

    def wait(self) -> AbstractContextManager[None]:
        """Backward's stream, or its thread, waits for exchanges that are still under way."""
        return self._measure("wait")

    @contextlib.contextmanager
    def _measure(self, phase: str) -> Iterator[None]:
        if self._streams is None:
            start = time.perf_counter()
            yield
            self.seconds[phase] += time.perf_counter() - start
        else:
            begin = self._streams.record(timing=True)
            yield
            self._events.append((phase, begin, self._streams.record(timing=True)))
            if len(self._events) > _EVENTS_KEPT:
                self._read(wait=False)

    def _read(self, wait: bool) -> None:
        """Adds up the events that have come, or (``wait``) all."""
        with self._reading:
            while self._events:
                phase, begin, end = self._events[0]
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                self.seconds[phase] += begin.elapsed_time(end) / 1e3
                self._events.popleft()

    def count(self, codec: str, numel: int, element_size: int, ranks: int, sent: int) -> None:
        """One part was exchanged: its bytes, and those that an all-reduce of it would have sent."""
        self.plain_bytes += 2 * numel * element_size * (ranks - 1) / ranks
        self.sent[codec] = self.sent.get(codec, 0) + sent
        self.elements[codec] = self.elements.get(codec, 0) + numel

    def sample(self, error: Tensor) -> None:
        """A relative compression error, 0-d, on any device. That of a step that was not finite says
        nothing."""
        finite = torch.isfinite(error)
        self._error_sum = torch.where(finite, error, 0.0) + self._error_sum
        self._error_count = finite + self._error_count

    def report(self, steps: int, traffic: Traffic) -> dict[str, Any]:
        """Waits for what is still under way."""
        self._read(wait=True)
        samples = int(self._error_count)
        per_step = 1e3 / max(1, steps)
        report: dict[str, Any] = {
            "steps": steps,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "bytes_plain": round(self.plain_bytes),
            "ratio": self.plain_bytes / traffic.sent if traffic.sent else 1.0,
            "calls": traffic.calls,
            "sent_by_codec": dict(self.sent),
            "elements_by_codec": dict(self.elements),
            "compression_error": float(self._error_sum) / samples if samples else None,
        }
        report.update({f"{phase}_ms": s * per_step for phase, s in self.seconds.items()})
        return report
