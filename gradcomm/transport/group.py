"""A torch process group as transport."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomm.stats import Traffic

#: Torch 2.13 renamed it, and warns of the old name.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


#: Backends whose calls make the host wait and want CPU tensors; those of all others enqueue.
HOST_BACKENDS = ("gloo", "mpi", "mpi4py")


class GroupTransport:
    """Collectives over a process group of tensors on ``device``.

    With a backend that enqueues (NCCL) they are in order on the current stream, and the host does not
    wait; with others the call blocks. On Gloo an all-gather is sends and receives straight between
    every two ranks: two to three times as fast as Gloo's own, which passes everything around a ring.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()
        #: Entered around every call that makes its caller wait.
        self.aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._device = device
        backend = backend_name(group, device)
        self._direct = backend == "gloo"
        # NCCL is called for one rank too, which costs little: so that one GPU shows what many do.
        self.enqueues = device.type != "cpu" and backend not in HOST_BACKENDS
        self._several = self.size > 1 or self.enqueues

    def all_reduce(self, tensor: Tensor) -> None:
        data = tensor._values() if tensor.is_sparse else tensor
        if tensor.is_sparse and self.enqueues:
            data = tensor.to_dense()  # NCCL has no sparse tensors
            dist.all_reduce(data, group=self.group)
            tensor.copy_(data.to_sparse(tensor.sparse_dim()))
        elif self._several:
            with self.aside():
                dist.all_reduce(tensor, group=self.group)
        # A ring (and a halving-doubling tree) sends (P - 1) / P of the tensor twice.
        moved = 2 * data.numel() * data.element_size() * (self.size - 1) // self.size
        self.traffic.add(moved, moved)

    def all_gather(self, rows: Tensor) -> None:
        others = self.size - 1
        mine = rows[self.rank]
        if self._several and self._direct:
            peers = [(self.rank + d) % self.size for d in range(1, self.size)]
            work = [dist.irecv(rows[p], group=self.group, group_src=p) for p in reversed(peers)]
            work += [dist.isend(mine, group=self.group, group_dst=p) for p in peers]
            with self.aside():
                for w in work:
                    if w is not None:
                        w.wait()
        elif self._several:
            with self.aside():
                _all_gather_single(rows.view(-1), mine.reshape(-1), group=self.group)
        moved = others * mine.numel() * mine.element_size()
        self.traffic.add(moved, moved)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        if self._several:
            with self.aside():
                dist.all_to_all_single(out.view(-1), rows.view(-1), group=self.group)
        else:
            out.view(-1).copy_(rows.view(-1))
        moved = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self.traffic.add(moved, moved)

    def all_gather_object(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        with self.aside():
            dist.all_gather_object(items, item, group=self.group)
        return items

    def split(self, members: list[list[int]]) -> GroupTransport:
        ranks = dist.get_process_group_ranks(self.group)
        # By all of torch's ranks where possible: a group that its members make by themselves gets a name
        # of its ranks and of how many groups there are, so one made after another was destroyed may get
        # that one's name, find the addresses that it left, and hang.
        by_members = self.size < dist.get_world_size()
        lists = [m for m in members if self.rank in m] if by_members else members
        groups = [_new_group(self.group, self._device, [ranks[r] for r in m], by_members) for m in lists]
        mine = next(g for g, m in zip(groups, lists, strict=True) if self.rank in m)
        assert isinstance(mine, dist.ProcessGroup)
        made = GroupTransport(mine, self._device)
        made.aside = self.aside
        return made

    def second(self) -> GroupTransport | None:
        """Another one of the same ranks, to be used in another thread at the same time; None where that
        would not help (NCCL enqueues) or is not safe (MPI). Collective."""
        if not self._direct:
            return None
        return GroupTransport(own_group(self.group, self._device), self._device)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that a group uses for this device: ``gloo``, ``nccl``, …"""
    return str(group._get_backend(device).name())


def own_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new group of the same ranks, backend and timeout. Collective over ``group``.

    A lane needs one: its collectives run in its own order, beside those that DDP and the user issue.
    """
    ranks = dist.get_process_group_ranks(group)
    made = _new_group(group, device, ranks, by_members=len(ranks) < dist.get_world_size())
    assert isinstance(made, dist.ProcessGroup)
    return made


def _new_group(
    like: dist.ProcessGroup, device: torch.device, ranks: list[int], by_members: bool
) -> object:
    """``by_members``: collective over ``ranks``, else over all of torch's, others getting a marker."""
    backend = like._get_backend(device)
    return dist.new_group(
        ranks,
        timeout=getattr(getattr(backend, "options", None), "_timeout", None),
        backend=str(backend.name()),
        use_local_synchronization=by_members,
        group_desc="gradcomm",
    )
