"""What must be true over MPI, as functions that every rank runs; all of them in one start of mpirun."""

from __future__ import annotations

import faulthandler
import importlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.codec import parse
from gradcomm.transport import mpi_calls
from gradcomm.verify import digest
from tests.models import CODECS, small_model, train
from tests.test_parameters import Odd

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SIZES = [0, 1, 17, 4099]

CHECKS: dict[str, Callable[[int, int], None]] = {}


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CHECKS[function.__name__] = function
    return function


#: Besides this one.
MODULES = ("backend_checks", "torch_checks", "overlap_checks")


def run_all(library: str, thread_level: str = "multiple", only: Sequence[str] = ()) -> list[str]:
    """The names of the checks done, over the MPI of this name, which grants this thread level. The first
    that fails on any rank ends the job, with its error."""
    import mpi4py

    mpi4py.rc.thread_level = thread_level
    torch.set_num_threads(1)
    world = gradcomm.launch.init("mpi4py", timeout=timedelta(seconds=60))
    from mpi4py import MPI

    assert library in ("any", MPI.Get_library_version()[: len(library)]), MPI.Get_library_version()
    assert MPI.Query_thread() == getattr(MPI, f"THREAD_{thread_level.upper()}")
    faulthandler.enable()  # MPI has put its own handler there, which knows no Python
    names = only or list(all_checks())
    for name in names:
        print(f"rank {world.rank}: {name}", flush=True)
        start = time.monotonic()
        all_checks()[name](world.rank, world.world_size)
        dist.barrier()
        print(f"rank {world.rank}: {name} done in {time.monotonic() - start:.1f} s", flush=True)
    dist.destroy_process_group()
    return list(names)


def all_checks() -> dict[str, Callable[[int, int], None]]:
    for module in MODULES:
        importlib.import_module(f"tests.mpi.{module}")  # adds its own
    return CHECKS


def rows_of(ranks: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What each rank contributes, known to all: ``[ranks, numel]``."""
    generator = torch.Generator().manual_seed(numel)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(ranks, numel, generator=generator).to(dtype)
    end = 2 if dtype is torch.bool else 9
    return torch.randint(0, end, (ranks, numel), generator=generator).to(dtype)


def exact_sum(rows: torch.Tensor) -> torch.Tensor:
    """numpy's, in float64 or in the integers themselves."""
    if rows.dtype.is_floating_point:
        return torch.from_numpy(rows.double().numpy().sum(0)).to(rows.dtype)
    return torch.from_numpy(rows.numpy().sum(0, dtype=rows.numpy().dtype))


def same_everywhere(tensor: torch.Tensor, ranks: int) -> None:
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, digest(tensor))
    assert len(set(found)) == 1


def _transport(pieces: int | None = None) -> Any:
    from gradcomm.transport.mpi import MpiTransport

    if pieces is not None:
        mpi_calls.PIECE = pieces
    from mpi4py import MPI

    return MpiTransport(MPI.COMM_WORLD, timedelta(seconds=30))


def _transport_collectives(rank: int, ranks: int, pieces: int | None) -> None:
    whole = mpi_calls.PIECE
    transport = _transport(pieces)
    try:
        for dtype in FLOATS + INTEGERS:
            for numel in SIZES:
                rows = rows_of(ranks, numel, dtype)
                tensor = rows[rank].clone()
                transport.all_reduce(tensor)
                tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}
                torch.testing.assert_close(tensor, exact_sum(rows), **tolerance)
                if dtype in (torch.float16, torch.bfloat16):  # summed in float32, rounded once
                    assert torch.equal(tensor, rows.float().sum(0).to(dtype)) or ranks > 2
                same_everywhere(tensor, ranks)
                gathered = torch.zeros_like(rows)
                gathered[rank] = rows[rank]
                transport.all_gather(gathered)
                assert torch.equal(gathered, rows)
                # What rank r sends to rank s: its row, plus s.
                out = torch.zeros_like(rows)
                mine = torch.stack([rows[rank] + s for s in range(ranks)])
                before = transport.traffic.sent
                transport.all_to_all(out, mine)
                assert torch.equal(out, rows + rank)
                assert transport.traffic.sent - before == numel * (ranks - 1) * dtype.itemsize
        strided = rows_of(ranks, 12, torch.float32)[rank].view(3, 4).t()
        transport.all_reduce(strided)
        expected = exact_sum(rows_of(ranks, 12, torch.float32)).view(3, 4).t()
        torch.testing.assert_close(strided, expected)
        assert transport.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(ranks)]
    finally:
        mpi_calls.PIECE = whole
        transport.close()


@check
def transport_equals_numpy(rank: int, ranks: int) -> None:
    _transport_collectives(rank, ranks, None)


@check
def transport_in_pieces_equals_numpy(rank: int, ranks: int) -> None:
    _transport_collectives(rank, ranks, 1000)


@check
def bad_transports_are_told(rank: int, ranks: int) -> None:
    from mpi4py import MPI

    ddp = DDP(small_model())
    first = MPI.COMM_WORLD.Split(0 if rank < ranks - 1 else MPI.UNDEFINED, rank)
    backwards = MPI.COMM_WORLD.Split(0, -rank)
    small = f"transport has {ranks - 1} ranks, DDP's process group {ranks}"
    null = f"MPI.COMM_NULL: MPI rank {ranks - 1} of {ranks} is not in the communicator"
    turned = f"rank {rank} of DDP's process group is rank {ranks - 1 - rank} of transport"
    for transport, kind, says in (
        (first, ValueError, small if rank < ranks - 1 else null),
        (backwards, ValueError, turned),
        ("mpi", TypeError, "transport='mpi'; give an mpi4py communicator"),
        (3, TypeError, "transport=3; give"),
    ):
        try:
            gradcomm.register(ddp, "onebit", transport=transport)
        except kind as error:
            assert says in str(error), (says, str(error))
        else:
            raise AssertionError(f"{transport} was taken")
    # One rank's mistake is told on all.
    differ = "rank 1 and rank 0 disagree on transport: Intracomm against none"
    for first, says in (("mpi", "transport='mpi'"), (None, differ)):
        mine = MPI.COMM_WORLD if rank else first
        try:
            gradcomm.register(ddp, "onebit", transport=mine)
        except (TypeError, ValueError) as error:
            assert says in str(error), str(error)
        else:
            raise AssertionError("ranks that disagree registered")


def _codecs_and_exchanges() -> list[tuple[str, str]]:
    return [(c, e) for c in CODECS for e in parse(c).exchanges]


@check
def carriers_agree(rank: int, ranks: int) -> None:
    """Every codec by every exchange over {Gloo, backend mpi4py, Gloo + MPI transport}."""
    from mpi4py import MPI

    gloo = dist.new_group(backend="gloo")
    for codec, exchange in _codecs_and_exchanges():
        found = {}
        for carrier, group, transport in (
            ("gloo", gloo, None),
            ("backend", dist.group.WORLD, None),
            ("transport", gloo, MPI.COMM_WORLD),
        ):
            ddp = DDP(small_model(), bucket_cap_mb=0.03, process_group=group)
            state = gradcomm.register(
                ddp, codec, min_numel=100, warmup_steps=1, exchange=exchange, transport=transport
            )
            hashed, loss = train(ddp, rank, steps=3)
            stats = state.stats()
            state.close()
            hashes: list[Any] = [None] * ranks
            dist.all_gather_object(hashes, hashed)
            assert len(set(hashes)) == 1, (codec, exchange, carrier)
            found[carrier] = (stats["bytes_sent"], stats["bytes_received"]), loss
        assert len({sent for sent, _ in found.values()}) == 1, (codec, exchange, found)
        losses = [loss for _, loss in found.values()]
        assert max(losses) - min(losses) < 1e-3, (codec, exchange, found)
    dist.destroy_process_group(gloo)


@check
def ddp_equals_gloo_within_rounding(rank: int, ranks: int) -> None:
    gloo = dist.new_group(backend="gloo")
    models = [small_model() for _ in range(2)]
    for model, group in zip(models, (gloo, dist.group.WORLD), strict=True):
        train(DDP(model, bucket_cap_mb=0.03, process_group=group), rank)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    same_everywhere(torch.cat([p.detach().flatten() for p in models[1].parameters()]), ranks)
    dist.destroy_process_group(gloo)


@check
def odd_and_sparse_parameters(rank: int, ranks: int) -> None:
    from mpi4py import MPI

    for transport in (None, MPI.COMM_WORLD):
        torch.manual_seed(0)
        odd: Any = Odd()
        embedding = torch.nn.Embedding(64, 32, sparse=True)
        sparse: Any = torch.nn.Sequential(embedding, torch.nn.Linear(32, 64))
        for model, inputs in (
            (odd, torch.randn(2, 4, 6, 6)),
            (sparse, torch.randint(0, 64, (5,), generator=torch.Generator().manual_seed(rank))),
        ):
            ddp = DDP(model)
            state = gradcomm.register(ddp, "int8", warmup_steps=1, min_numel=16, transport=transport)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
            for _ in range(3):
                optimizer.zero_grad()
                ddp(inputs).square().mean().backward()
                optimizer.step()
            state.close()
            flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
            assert torch.isfinite(flat).all()
            same_everywhere(flat, ranks)
