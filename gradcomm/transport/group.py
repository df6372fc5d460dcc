"""A torch process group as transport."""

from __future__ import annotations

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
        self._device = device
        self._by_members = self.size < dist.get_world_size()
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
            for w in work:
                if w is not None:
                    w.wait()
        elif self._several:
            _all_gather_single(rows.view(-1), mine.reshape(-1), group=self.group)
        moved = others * mine.numel() * mine.element_size()
        self.traffic.add(moved, moved)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        if self._several:
            dist.all_to_all_single(out.view(-1), rows.view(-1), group=self.group)
        else:
            out.view(-1).copy_(rows.view(-1))
        moved = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self.traffic.add(moved, moved)

    def all_gather_object(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def split(self, members: list[list[int]]) -> GroupTransport:
        ranks = dist.get_process_group_ranks(self.group)
        mine = next(m for m in members if self.rank in m)
        made = own_group(self.group, self._device, [ranks[r] for r in mine])
        return GroupTransport(made, self._device)

    def close(self) -> None:
        # torch names a group that only its members made by their ranks and the number of groups there
        # are. Destroyed, its name would be given again, and the ranks would meet by addresses that are
        # no longer: such a group stays until all are destroyed.
        if not self._by_members:
            dist.destroy_process_group(self.group)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that a group uses for this device: ``gloo``, ``nccl``, …"""
    return str(group._get_backend(device).name())


def own_group(
    group: dist.ProcessGroup, device: torch.device, members: list[int] | None = None
) -> dist.ProcessGroup:
    """A new group of the same backend and timeout, of ``members`` (global ranks) or the same ranks.
    Collective over those.

    A lane needs one: its collectives run in its own order, beside those that DDP and the user issue.
    """
    backend = group._get_backend(device)
    ranks = dist.get_process_group_ranks(group) if members is None else members
    options = getattr(backend, "options", None)
    made = dist.new_group(
        ranks,
        timeout=getattr(options, "_timeout", None),
        backend=str(backend.name()),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="gradcomm",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
