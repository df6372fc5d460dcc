"""Staging: the bytes of the transport beneath, and copies beside its wire. No device is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradcomm.stats import Traffic
from gradcomm.transport import GroupTransport
from gradcomm.transport.staging import Staged

from .ranks import Ranks
from .staging import LateCopies

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool]


class Alone:
    """A transport of one rank out of ``size`` that all send the same; logs each call."""

    rank = 1

    def __init__(self, size: int, log: list[str]) -> None:
        self.size, self.traffic, self._log = size, Traffic(), log

    def all_reduce(self, tensor: Tensor) -> None:
        self._log.append("wire")
        tensor.mul_(self.size)

    def all_gather(self, rows: Tensor) -> None:
        self._log.append("wire")
        rows.copy_(rows[self.rank].clone().expand_as(rows))

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        self._log.append("wire")
        out.copy_(rows[self.rank].expand_as(out))

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item] * self.size

    def close(self) -> None:
        self._log.append("close")


def test_the_next_piece_is_copied_while_one_is_on_the_wire() -> None:
    copies = LateCopies()
    transport = Staged(Alone(4, copies.log), CPU, 64, copies)
    tensor = torch.arange(4 * 16 - 3.0)
    transport.all_reduce(tensor)
    first, second, store = ["copy", "copy", "wait", "wire"], ["copy", "copy", "wait", "wire"], ["copy"]
    # fetch 0, fetch 1 | wire 0 | store 0, fetch 2 | wire 1 | … | store 2 | wire 3 | store 3
    assert copies.log == [*first, *second, *second, *store, "wait", "wire", *store]
    copies.flush()
    assert torch.equal(tensor, 4 * torch.arange(4 * 16 - 3.0))


def test_a_call_waits_for_the_last_ones_copies() -> None:
    """It may have been made in another stream, in which a buffer is still read."""
    copies = LateCopies()
    transport = Staged(Alone(2, copies.log), CPU, copies=copies)
    first = torch.ones(8)
    transport.all_reduce(first)
    assert torch.equal(first, torch.ones(8))  # the copy back has only begun
    transport.all_reduce(torch.ones(8))
    assert torch.equal(first, torch.full((8,), 2.0))


def test_it_counts_and_closes_what_is_beneath() -> None:
    copies = LateCopies()
    inner = Alone(2, copies.log)
    transport = Staged(inner, CPU, copies=copies)
    traffic = transport.traffic = Traffic()
    assert inner.traffic is traffic and transport.all_gather_object(3) == [3, 3]
    transport.all_reduce(torch.ones(0))
    assert copies.log == []  # nothing to carry
    transport.close()
    assert copies.log == ["close"]


def _collectives(rank: int, ranks: int, piece: int) -> int:
    group = dist.group.WORLD
    assert group is not None
    plain = GroupTransport(group, CPU)
    copies = LateCopies()
    staged = Staged(GroupTransport(group, CPU), CPU, piece, copies)
    generator = torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        for numel in (1, 17, 500):
            before = plain.traffic.sent, staged.traffic.sent
            mine = torch.randint(0, 2, (ranks, 1, numel), generator=generator).to(dtype)
            for name in ("all_reduce", "all_gather", "all_to_all"):
                if name == "all_reduce" and dtype is torch.bool:
                    continue  # Gloo itself has no sum of these
                found = []
                for transport in (plain, staged):
                    rows, out = mine.clone(), torch.zeros_like(mine)
                    getattr(transport, name)(*((out, rows) if name == "all_to_all" else (rows,)))
                    copies.flush()
                    found.append(out if name == "all_to_all" else rows)
                if name == "all_gather":
                    found = [rows.view(ranks, -1) for rows in found]
                assert torch.equal(*found), (name, dtype, numel)
            if piece > 1 << 20:  # an all-reduce in pieces is counted with each piece's rounding
                assert plain.traffic.sent - before[0] == staged.traffic.sent - before[1]
    strided = torch.randint(0, 9, (6, 4), generator=generator).float().t()
    expected = strided.clone()
    plain.all_reduce(expected)
    staged.all_reduce(strided)
    copies.flush()
    assert torch.equal(strided, expected)
    sparse = torch.eye(4).to_sparse() * (rank + 1)
    staged.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.eye(4) * (ranks * (ranks + 1) / 2))
    return copies.log.count("wait")


@pytest.mark.parametrize("ranks_used", [2, 4])
def test_the_bytes_are_those_of_the_transport_beneath(ranks: Ranks, ranks_used: int) -> None:
    few = ranks.run(_collectives, ranks_used, 1 << 22)
    many = ranks.run(_collectives, ranks_used, 256)
    assert min(many) > max(few)
