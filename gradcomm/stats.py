"""What is measured: time by phase, bytes by what the transport was given."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

#: ``with clock("wire"): …`` adds the time to a phase.
Clock = Callable[[str], AbstractContextManager[None]]

PHASES = ("encode", "wire", "decode")


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


class Meter:
    """Sums of one training run, by codec."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.waited = 0.0  # by backward, for exchanges still under way
        self.plain_bytes = 0.0  # what an all-reduce of the same buckets would have sent
        self.sent: dict[str, int] = {}  # by codec
        self.elements: dict[str, int] = {}  # by codec
        self.errors: list[float] = []  # sampled relative compression errors
        self.phase = "idle"

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        self.phase = phase
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def count(self, codec: str, numel: int, element_size: int, ranks: int, sent: int) -> None:
        """One part was exchanged: its bytes, and those that an all-reduce of it would have sent."""
        self.plain_bytes += 2 * numel * element_size * (ranks - 1) / ranks
        self.sent[codec] = self.sent.get(codec, 0) + sent
        self.elements[codec] = self.elements.get(codec, 0) + numel

    def sample(self, error: Tensor) -> None:
        """A relative compression error, 0-d. That of a step that was not finite says nothing."""
        if bool(torch.isfinite(error)):
            self.errors.append(float(error))

    def report(self, steps: int, traffic: Traffic) -> dict[str, Any]:
        per_step = 1e3 / max(1, steps)
        report: dict[str, Any] = {
            "steps": steps,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.received,
            "bytes_plain": round(self.plain_bytes),
            "ratio": self.plain_bytes / traffic.sent if traffic.sent else 1.0,
            "calls": traffic.calls,
            "wait_ms": self.waited * per_step,
            "sent_by_codec": dict(self.sent),
            "elements_by_codec": dict(self.elements),
            "compression_error": sum(self.errors) / len(self.errors) if self.errors else None,
        }
        report.update({f"{phase}_ms": s * per_step for phase, s in self.seconds.items()})
        return report
