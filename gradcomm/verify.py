"""Debugging aids: do all ranks hold the same bits, and did payloads arrive as they were sent?"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from gradcomm.stats import Traffic
from gradcomm.transport import Transport
from gradcomm.transport.hosts import host_of


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def compare_ranks(transport: Transport, tensor: Tensor) -> None:
    """Raises RuntimeError, on every rank, naming the ranks whose bits are not rank 0's. Collective."""
    digests = transport.all_gather_object(digest(tensor))
    differing = [rank for rank, d in enumerate(digests) if d != digests[0]]
    if differing:
        raise RuntimeError(f"gradcomm: ranks {differing} hold other bits than rank 0 after the exchange")


class CheckedTransport:
    """A transport with a checksum of every payload beside it. Raises RuntimeError, on every rank, naming
    sender and receiver of a payload that arrived changed. Sums have none: ``compare_ranks`` is for them.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._inner.traffic = traffic

    def all_reduce(self, tensor: Tensor) -> None:
        self._inner.all_reduce(tensor)

    def all_gather(self, rows: Tensor) -> None:
        mine = digest(rows[self.rank])
        self._inner.all_gather(rows)
        self._check(rows, [mine] * self.size)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        mine = [digest(row) for row in rows]
        self._inner.all_to_all(out, rows)
        self._check(out, mine)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self._inner.all_gather_object(item)

    def split(self, members: list[list[int]]) -> Transport:
        return CheckedTransport(self._inner.split(members))

    def host(self) -> str:
        return host_of(self._inner)

    def close(self) -> None:
        self._inner.close()

    def _check(self, received: Tensor, sent: list[str]) -> None:
        """``received``: a row from each rank; ``sent``: hashes of what went to each."""
        everyone: list[list[str]] = self._inner.all_gather_object(sent)
        here = [r for r, row in enumerate(received) if digest(row) != everyone[r][self.rank]]
        changed: list[list[int]] = self._inner.all_gather_object(here)
        found = [f"rank {s} to rank {r}" for r, senders in enumerate(changed) for s in senders]
        if found:
            raise RuntimeError(f"gradcomm: payloads arrived changed: {', '.join(found)}")
