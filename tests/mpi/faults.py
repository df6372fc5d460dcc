"""Jobs that must end, and say why."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from tests.models import small_model, train


def train_and_fail(backend: str, over_mpi: bool, fault: str) -> None:
    """Rank 1 raises, or is killed, in its third step; all others would wait for it for ten minutes."""
    world = gradcomm.launch.init(backend, timeout=timedelta(minutes=10))
    transport = None
    if over_mpi:
        from mpi4py import MPI

        transport = MPI.COMM_WORLD
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    gradcomm.register(ddp, "onebit", warmup_steps=1, min_numel=100, transport=transport)
    for step in range(100):
        if step == 2 and world.rank == 1:
            if fault == "raise":
                raise ArithmeticError("a fault put in by the test")
            os.kill(os.getpid(), signal.SIGKILL)
        train(ddp, world.rank, steps=1)


def late_rank() -> list[str]:
    """Rank 0's transport times out; what it says, then and at the next call."""
    from mpi4py import MPI

    from gradcomm.transport.mpi import MpiTransport

    transport = MpiTransport(MPI.COMM_WORLD, timedelta(seconds=0.5))
    said = []
    if transport.rank == 0:
        for call in (transport.all_reduce, transport.all_gather):
            try:
                call(torch.ones(10))
            except (TimeoutError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    MPI.COMM_WORLD.Barrier()
    if transport.rank == 1:
        transport.all_reduce(torch.ones(10))  # what rank 0 began ends, so that MPI can
    return said


def no_torch_variables() -> tuple[int, int, float]:
    """torch's own call under mpirun, without MASTER_ADDR and the like."""
    dist.init_process_group("mpi4py")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    found = dist.get_rank(), dist.get_world_size(), float(tensor)
    dist.destroy_process_group()
    return found


def start() -> None:
    gradcomm.launch.init()


def misfits() -> list[str]:
    """What is said when torch's world is not MPI's."""
    from mpi4py import MPI

    rank, said = MPI.COMM_WORLD.rank, []
    for mine, size in ((rank, 3), (0, 1)):  # more ranks than MPI's; each rank a world of its own
        try:
            dist.init_process_group("mpi4py", store=dist.HashStore(), rank=mine, world_size=size)
        except RuntimeError as error:
            said.append(str(error))
    try:
        gradcomm.launch.init("mpi4py" if rank else "gloo")
    except gradcomm.launch.LaunchError as error:
        said.append(str(error))
    return said
