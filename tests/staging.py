"""A device that is not one: the host's memory, with copies that run as late as a stream may run them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class LateCopies:
    """``gradcomm.transport.staging.Copies`` that copy nothing before somebody waits for it, and then no
    more than what was waited for. ``log``: "copy" as each begins, "wait" for each wait."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._begun: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def needed(self, tensor: Tensor) -> bool:
        return True

    def buffer(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def begin(self, to: Tensor, source: Tensor) -> None:
        assert to.shape == source.shape
        self._begun.append((to, source))
        self.log.append("copy")

    def mark(self) -> Callable[[], None]:
        end = len(self._begun)

        def wait() -> None:
            self.log.append("wait")
            self._run(end)

        return wait

    def flush(self) -> None:
        """As whatever reads results in the stream's order would find them."""
        self._run(len(self._begun))

    def _run(self, end: int) -> None:
        for to, source in self._begun[self._done : end]:
            to.copy_(source)
        self._done = max(self._done, end)
