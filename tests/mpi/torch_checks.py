"""What torch builds on a process group, over backend mpi4py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from gradcomm.transport import GroupTransport, Staged, mpi_calls
from gradcomm.transport.hosts import find_hosts
from gradcomm.transport.mpi import MpiTransport
from gradcomm.verify import digest
from tests.models import small_model, train
from tests.staging import LateCopies

from . import backend_checks
from .checks import check, exact_sum, rows_of, same_everywhere


@check
def messages_in_pieces(rank: int, ranks: int) -> None:
    """Counts past what MPI 3 can tell, with a smaller limit."""
    whole, mpi_calls.PIECE = mpi_calls.PIECE, 100
    try:
        for function in (
            backend_checks.broadcast_reduce_gather_scatter,
            backend_checks.gathers_and_scatters_of_all,
            backend_checks.all_to_all,
            backend_checks.objects,
        ):
            function(rank, ranks)
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        sent, got = torch.arange(1001) + rank, torch.zeros(1001, dtype=torch.int64)
        work = dist.isend(sent, after)
        dist.recv(got, before)
        assert work is not None and work.wait()
        assert torch.equal(got, torch.arange(1001) + before)
    finally:
        mpi_calls.PIECE = whole


@check
def blocking_calls_as_of_a_gpu(rank: int, ranks: int) -> None:
    """What a CUDA-aware MPI is called with, here over the host's memory."""
    from mpi4py import MPI

    calls = mpi_calls.Calls(MPI.COMM_WORLD.Dup(), timedelta(seconds=30), blocking=True)
    whole = mpi_calls.PIECE
    for mpi_calls.PIECE in (whole, 256):  # by collectives, and in pairs
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            for numel in (1, 17, 1000):
                rows = rows_of(ranks, numel, dtype)
                tensor = rows[rank].clone()
                calls.all_reduce(tensor)
                torch.testing.assert_close(tensor, exact_sum(rows), rtol=2e-2, atol=2e-2)
                same_everywhere(tensor, ranks)
                gathered = torch.zeros_like(rows)
                gathered[rank] = rows[rank]
                calls.all_gather(gathered)
                assert torch.equal(gathered, rows)
                out = torch.zeros_like(rows)
                calls.all_to_all(out, torch.stack([rows[rank] + s for s in range(ranks)]))
                assert torch.equal(out, rows + rank)
    mpi_calls.PIECE = whole
    calls.free()


@check
def staged_over_mpi(rank: int, ranks: int) -> None:
    from mpi4py import MPI

    copies = LateCopies()
    plain = MpiTransport(MPI.COMM_WORLD)
    staged = Staged(plain, torch.device("cpu"), 512, copies)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (1, 500):
            for name in ("all_reduce", "all_gather", "all_to_all"):
                mine = rows_of(ranks, numel, dtype) * (rank + 1)
                found = []
                for transport in (plain, staged):
                    rows, out = mine.clone(), torch.zeros_like(mine)
                    getattr(transport, name)(*((out, rows) if name == "all_to_all" else (rows,)))
                    copies.flush()
                    found.append(out if name == "all_to_all" else rows)
                assert torch.equal(*found), (name, dtype, numel)
    staged.close()


@check
def ranks_know_their_hosts(rank: int, ranks: int) -> None:
    from mpi4py import MPI

    group = dist.group.WORLD
    assert group is not None
    over_group = GroupTransport(group, torch.device("cpu"))
    over_mpi = MpiTransport(MPI.COMM_WORLD)
    staged = Staged(over_mpi, torch.device("cpu"), copies=LateCopies())
    everyone, even = list(range(ranks)), list(range(0, ranks, 2))
    odd = list(range(1, ranks, 2))
    for transport in (over_group, over_mpi, staged):
        assert find_hosts(transport) == [everyone]
        assert find_hosts(transport, f"host {rank % 2}") == [even, odd]
        assert find_hosts(transport, f"host {-rank}") == [[r] for r in everyone]
    over_mpi.close()


@check
def a_monitored_barrier_names_who_is_missing(rank: int, ranks: int) -> None:
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    for wait_all, missing in ((False, [1]), (True, list(range(1, ranks)))):
        dist.barrier()
        if rank:  # late
            dist.barrier()
        try:
            group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=wait_all)
        except RuntimeError as error:
            assert f"ranks {missing} of {ranks} did not reach" in str(error), str(error)
        else:
            raise AssertionError("nobody was missing")
        if rank == 0:
            dist.barrier()


@check
def coalesced_and_functional_calls(rank: int, ranks: int) -> None:
    total = ranks * (ranks + 1) / 2
    tensors = [torch.full((n,), float(rank + 1)) for n in (3, 1, 7)]
    dist.all_reduce_coalesced(tensors)
    assert all((t == total).all() for t in tensors)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((t == total * ranks).all() for t in tensors)
    gathered = [torch.zeros(2 * ranks) for _ in range(2)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for i, out in enumerate(gathered):
            gather(out, torch.full((2,), float(rank + i)))
    manager.wait()
    everyone = torch.arange(float(ranks)).repeat_interleave(2)
    assert torch.equal(gathered[0], everyone) and torch.equal(gathered[1], everyone + 1)
    world = dist.group.WORLD
    mine = torch.full((ranks, 2), float(rank + 1))
    assert (functional.all_reduce(mine, "sum", world) == total).all()
    rows = functional.all_gather_tensor(mine[:1], 0, world)
    assert torch.equal(rows[:, 0], torch.arange(1.0, ranks + 1))
    assert (functional.reduce_scatter_tensor(mine, "sum", 0, world) == total).all()
    swapped = functional.all_to_all_single(mine, None, None, world)
    assert torch.equal(swapped[:, 0], torch.arange(1.0, ranks + 1))
    assert (functional.broadcast(mine, 1, world) == 2).all()
    assert all((t == total).all() for t in functional.all_reduce_coalesced([mine, mine], "sum", world))


@check
def every_dtype_travels(rank: int, ranks: int) -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.uint16, torch.bool):
        mine = torch.arange(5).remainder(2).add(rank % 2).to(torch.float32).to(dtype)
        parts = [torch.zeros(5, dtype=torch.float32).to(dtype) for _ in range(ranks)]
        dist.all_gather(parts, mine)
        told = mine.clone()
        dist.broadcast(told, ranks - 1)
        raw = [p.view(torch.uint8) for p in (*parts, told)]
        assert torch.equal(raw[rank], mine.view(torch.uint8)) and torch.equal(raw[-1], raw[ranks - 1])


@check
def fully_sharded(rank: int, ranks: int) -> None:
    """FSDP2 and plain DDP, the same data: the same parameters within rounding."""
    mesh = init_device_mesh("cpu", (ranks,))
    sharded: Any = small_model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    plain = DDP(small_model())
    for model in (sharded, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 40, generator=generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach(), rtol=1e-4, atol=1e-6)


@check
def ddp_with_buffers_unused_parameters_and_uneven_inputs(rank: int, ranks: int) -> None:
    torch.manual_seed(rank)  # DDP makes them alike
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.add_module("unused", nn.Identity())
    model.register_parameter("never", nn.Parameter(torch.ones(3)))
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            ddp(torch.randn(5, 8)).square().mean().backward()
            optimizer.step()
    same_everywhere(torch.cat([p.detach().flatten() for p in model.parameters()]), ranks)
    static = DDP(small_model(), static_graph=True, gradient_as_bucket_view=True)
    hashed, _ = train(static, rank)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, hashed)
    assert len(set(found)) == 1 and digest(next(static.parameters()).detach())
