"""The transport of a state: a process group of its own, or what the user named."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from . import Transport
from .group import HOST_BACKENDS, GroupTransport, backend_name, own_group
from .staging import Staged


def choose_transport(wanted: Any, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """``wanted``: None for a new group like ``group``, an ``mpi4py`` communicator, or a Transport.

    Collective over ``group``. Raises on every rank when on any of them ``wanted`` does not have the
    ranks of ``group`` in the same order.
    """
    own: Exception | None = None
    try:
        _compare(wanted, group)
    except Exception as problem:
        own = problem
    # Over the group: the transport of ranks that disagree about it could hang.
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (_kind(wanted), None if own is None else str(own)), group=group)
    if own is not None:
        raise own
    for rank, (kind, problem_there) in enumerate(everyone):
        if problem_there is not None:
            raise ValueError(f"gradcomm: rank {rank} cannot register: {problem_there}")
        if kind != everyone[0][0]:
            raise ValueError(
                f"gradcomm: rank {rank} and rank 0 disagree on transport: {kind} against "
                f"{everyone[0][0]}; every rank must register with the same"
            )
    if wanted is None:
        own_one = own_group(group, device)
        if device.type == "cpu" or backend_name(group, device) not in HOST_BACKENDS:
            return GroupTransport(own_one, device)
        return Staged(GroupTransport(own_one, torch.device("cpu")), device)
    if _is_transport(wanted):
        return cast(Transport, wanted)
    from .mpi import MpiTransport

    backend = group._get_backend(device)
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    carrier = MpiTransport(wanted) if timeout is None else MpiTransport(wanted, timeout)
    return carrier if device.type == "cpu" or carrier.cuda_aware else Staged(carrier, device)


def _kind(wanted: Any) -> str:
    return "none" if wanted is None else type(wanted).__name__


def _compare(wanted: Any, group: dist.ProcessGroup) -> None:
    if wanted is None:
        return
    if _is_transport(wanted):
        rank, size = wanted.rank, wanted.size
    else:
        from .mpi import check_comm

        check_comm(wanted)
        rank, size = wanted.Get_rank(), wanted.Get_size()
    mine, ranks = dist.get_rank(group), dist.get_world_size(group)
    if size != ranks:
        raise ValueError(
            f"gradcomm: transport has {size} ranks, DDP's process group {ranks}; give a communicator "
            "of the same processes"
        )
    if rank != mine:
        raise ValueError(
            f"gradcomm: rank {mine} of DDP's process group is rank {rank} of transport; order the "
            "communicator as the group: comm.Split(0, key=dist.get_rank())"
        )


def _is_transport(value: Any) -> bool:
    # Not by isinstance of the protocol: that asks for ``size``, which MPI.COMM_NULL refuses to tell.
    return all(callable(getattr(value, name, None)) for name in ("all_reduce", "all_to_all"))
