"""The collectives of backend mpi4py, called as users of torch.distributed call them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .checks import FLOATS, INTEGERS, SIZES, check, exact_sum, rows_of, same_everywhere

OPS = {
    dist.ReduceOp.SUM: lambda r: exact_sum(r),
    dist.ReduceOp.AVG: lambda r: (r.double().sum(0) / len(r)).to(r.dtype),
    dist.ReduceOp.MIN: lambda r: r.min(0).values,
    dist.ReduceOp.MAX: lambda r: r.max(0).values,
    dist.ReduceOp.PRODUCT: lambda r: r.double().prod(0).to(r.dtype),
}


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    loose = {"rtol": 2e-2, "atol": 2e-2} if found.dtype.itemsize == 2 else {}
    torch.testing.assert_close(found, expected, **loose)


@check
def all_reduce_of_every_dtype_and_op(rank: int, ranks: int) -> None:
    for dtype in [*FLOATS, *INTEGERS, torch.bool]:
        for op, expected in OPS.items():
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            for numel in SIZES:
                rows = rows_of(ranks, numel, dtype)
                tensor = rows[rank].clone()
                dist.all_reduce(tensor, op)
                if dtype is torch.bool:
                    either = op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
                    assert torch.equal(tensor, rows.any(0) if either else rows.all(0))
                elif numel:
                    if dtype is torch.int8 and op == dist.ReduceOp.PRODUCT:
                        continue  # overflows
                    _close(tensor, expected(rows))
    for numel in SIZES:
        rows = rows_of(ranks, numel, torch.int32)
        for op, fold in (
            (dist.ReduceOp.BAND, torch.bitwise_and),
            (dist.ReduceOp.BOR, torch.bitwise_or),
            (dist.ReduceOp.BXOR, torch.bitwise_xor),
        ):
            tensor = rows[rank].clone()
            dist.all_reduce(tensor, op)
            expected_bits = rows[0]
            for row in rows[1:]:
                expected_bits = fold(expected_bits, row)
            assert torch.equal(tensor, expected_bits)
    complex_rows = rows_of(ranks, 9, torch.complex64)
    tensor = complex_rows[rank].clone()
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, complex_rows.sum(0))


@check
def strided_views_are_written_in_place(rank: int, ranks: int) -> None:
    base = torch.full((4, 6), float(rank + 1))
    dist.all_reduce(base.t()[::2])
    total = ranks * (ranks + 1) / 2
    assert (base[:, ::2] == total).all() and (base[:, 1::2] == rank + 1).all()
    view = torch.full((8,), rank, dtype=torch.uint8)[3:7]
    dist.broadcast(view, 1)
    assert (view == 1).all()
    parameter = torch.nn.Parameter(torch.full((3, 3), float(rank)))
    dist.broadcast(parameter, 0)
    assert (parameter == 0).all()


@check
def broadcast_reduce_gather_scatter(rank: int, ranks: int) -> None:
    for root in (0, ranks - 1):
        for numel in (1, 5, 1001):
            rows = rows_of(ranks, numel, torch.float32)
            tensor = rows[rank].clone()
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, rows[root])
            tensor = rows[rank].clone()
            dist.reduce(tensor, root)
            _close(tensor, exact_sum(rows) if rank == root else rows[rank])
            parts = [torch.zeros(numel) for _ in range(ranks)] if rank == root else None
            dist.gather(rows[rank], parts, root)
            assert parts is None or torch.equal(torch.stack(parts), rows)
            tensor = torch.zeros(numel)
            dist.scatter(tensor, list(rows) if rank == root else None, root)
            assert torch.equal(tensor, rows[rank])


@check
def gathers_and_scatters_of_all(rank: int, ranks: int) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        for numel in (0, 1, 7, 1000):
            rows = rows_of(ranks, numel, dtype)
            parts = [torch.zeros(numel, dtype=dtype) for _ in range(ranks)]
            dist.all_gather(parts, rows[rank])
            assert torch.equal(torch.stack(parts), rows)
            whole = torch.zeros(ranks * numel, dtype=dtype)
            gather(whole, rows[rank])
            assert torch.equal(whole.view(ranks, -1), rows)
    for numel in (1, 7, 1000):
        every = torch.stack([rows_of(ranks, numel, torch.float32) + r for r in range(ranks)])
        out = torch.zeros(numel)
        scatter(out, every[rank].flatten())
        torch.testing.assert_close(out, every.sum(0)[rank])
        out = torch.zeros(numel)
        dist.reduce_scatter(out, list(every[rank]), dist.ReduceOp.AVG)
        torch.testing.assert_close(out, every.mean(0)[rank])


@check
def all_to_all(rank: int, ranks: int) -> None:
    rows = torch.arange(ranks * 3.0).view(ranks, 3) + 100 * rank
    out = torch.zeros(ranks, 3)
    dist.all_to_all_single(out, rows)
    assert torch.equal(out, torch.stack([torch.arange(3.0) + 3 * rank + 100 * r for r in range(ranks)]))
    # Rank r sends s + 1 rows to rank s.
    sent = torch.full((sum(range(1, ranks + 1)), 2), float(rank))
    got = torch.zeros(ranks * (rank + 1), 2)
    dist.all_to_all_single(got, sent, [rank + 1] * ranks, list(range(1, ranks + 1)))
    assert torch.equal(got[:, 0], torch.arange(float(ranks)).repeat_interleave(rank + 1))
    outs = [torch.zeros(2) for _ in range(ranks)]
    dist.all_to_all(outs, [torch.full((2,), float(10 * rank + s)) for s in range(ranks)])
    assert [o[0] for o in outs] == [10 * r + rank for r in range(ranks)]


@check
def objects(rank: int, ranks: int) -> None:
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, {"rank": rank, "long": "x" * (100 * rank)})
    assert [f["rank"] for f in found] == list(range(ranks))
    told = [("a", rank), None]
    dist.broadcast_object_list(told, 1)
    assert told == [("a", 1), None]
    into: list[Any] = [None] * ranks
    dist.gather_object(rank, into if rank == 0 else None, 0)
    assert rank or into == list(range(ranks))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(ranks)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]


@check
def pairs(rank: int, ranks: int) -> None:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    got = torch.zeros(5)
    operations = [  # everyone receives first
        dist.P2POp(dist.irecv, got, before),
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), after),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (got == before).all()
    if rank == 0:
        sources = {dist.recv(got, tag=4) for _ in range(ranks - 1)}
        assert sources == set(range(1, ranks))
        for r in range(1, ranks):
            dist.send(got, r, tag=5)
    else:
        dist.send(torch.full((5,), float(rank)), 0, tag=4)
        dist.recv(got, 0, tag=5)
    work = dist.irecv(got, before)
    future = work.get_future()
    dist.send(torch.full((5,), 7.0), after)
    future.wait()
    assert work.is_completed() and (got == 7).all()


@check
def groups(rank: int, ranks: int) -> None:
    """All ranks make each group; only its members make it; in another order than the world's."""
    for ranks_of in ([0, 1], [ranks - 1], list(range(ranks))):
        group = dist.new_group(ranks_of)
        if rank in ranks_of:
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(ranks_of)).all()
            dist.destroy_process_group(group)
    half = [r for r in range(ranks) if r % 2 == rank % 2]
    group = dist.new_group(half, use_local_synchronization=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert int(tensor) == len(half)
    assert dist.get_backend(group) == "mpi4py" and dist.get_process_group_ranks(group) == half
    dist.destroy_process_group(group)


@check
def asynchronous_calls_run_in_order(rank: int, ranks: int) -> None:
    tensor = torch.ones(4)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    works[-1].wait()
    assert all(w.is_completed() and w.is_success() for w in works)
    assert (tensor == ranks**5).all()
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    assert (future.wait()[0] == ranks).all()
    bad = dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, async_op=True)
    for wait in (bad.wait, bad.get_future().wait):
        try:
            wait()
        except RuntimeError as error:
            assert "int" in str(error).lower(), str(error)
        else:
            raise AssertionError("an integer mean was taken")
    same_everywhere(tensor, ranks)
