"""Who carries the bytes."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from gradcomm.stats import Traffic

from .group import GroupTransport as GroupTransport
from .hosts import hosts as hosts
from .staging import Staged as Staged


class Transport(Protocol):
    """Blocking collectives over a fixed set of ranks. All ranks call the same in the same order."""

    rank: int
    size: int
    traffic: Traffic

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums ``tensor`` over ranks, in place; every rank ends with the same bits."""

    def all_gather(self, rows: Tensor) -> None:
        """``rows``: ``[size, …]``, contiguous, this rank's row filled in. Fills in all others."""

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        """Sends row r of ``rows`` to rank r; row r of ``out`` is what rank r sent here."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Small Python objects, for set-up."""

    def close(self) -> None:
        """Frees what the transport made. Nothing can be sent after it."""
