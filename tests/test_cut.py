"""Large buckets are cut, so that encoding a part overlaps the wire of another: nothing else changes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm import buckets
from gradcomm.buckets import Buckets
from gradcomm.codec import Dense, parse
from gradcomm.memory import Memory
from gradcomm.plan import Plan

from .models import small_model, train
from .ranks import Ranks


@contextlib.contextmanager
def _cut_at(size: int) -> Iterator[None]:
    before, buckets.CUT_BYTES = buckets.CUT_BYTES, size
    try:
        yield
    finally:
        buckets.CUT_BYTES = before


def _made(numels: list[int]) -> tuple[Buckets, tuple[int, ...], Tensor]:
    made = Buckets(Plan(Dense(), "reduce", None, 0), Memory(2))
    keys = tuple(made.add(nn.Parameter(torch.empty(n))).key for n in numels)
    return made, keys, torch.arange(float(sum(numels)))


@pytest.mark.parametrize(
    ("numels", "sizes"),
    [
        ([100, 40], [140]),  # not half as much again
        ([100, 60], [100, 60]),
        ([100, 100, 40], [100, 140]),  # no small rest
        ([60, 60, 60, 60], [120, 120]),
        ([10, 500, 10, 90], [510, 100]),  # never inside a parameter
        ([500], [500]),
        ([1] * 350, [100, 100, 100, 50]),  # a rest of half is one
    ],
)
def test_where_a_bucket_is_cut(numels: list[int], sizes: list[int]) -> None:
    made, keys, buffer = _made(numels)
    with _cut_at(4 * 100):
        pieces = made.cut(keys, buffer)
        assert [view.numel() for _, view in pieces] == sizes
        assert list(itertools.chain(*(cut for cut, _ in pieces))) == list(keys)
        assert torch.equal(torch.cat([view for _, view in pieces]), buffer)
        assert all(view.data_ptr() >= buffer.data_ptr() for _, view in pieces)  # views, no copies
        for cut, view in pieces:
            assert [k for k, _ in made.cut(cut, view)] == [cut]
    sparse = buffer.to_sparse()
    assert made.cut(keys, sparse) == [(keys, sparse)]


def _train(
    rank: int, ranks: int, codec: Any, options: dict[str, Any], sizes: list[int]
) -> list[tuple[str, float, dict[str, Any], int]]:
    """Hash of the parameters, loss, statistics, and how many buckets a step was in the end."""
    ends = []
    for size in sizes:
        with _cut_at(size):
            ddp = DDP(small_model())
            state = gradcomm.register(ddp, codec, min_numel=100, **options)
            ends.append((*train(ddp, rank, steps=8), state.stats(), len(state._buckets.layout)))
            state.close()
    return ends


@pytest.mark.parametrize(
    ("ranks_", "exchange"), [(2, "gather"), (3, "shard"), (4, "hierarchy")], ids=str
)
@pytest.mark.parametrize(
    "codec",
    [
        *("int8", "int4", "onebit", "twobit", "topk:density=0.1"),
        {0: "none", 4: "onebit", 6: "int4"},
        {0: "int4", 4: "powersgd:rank=2,start_step=0", 6: "onebit"},  # in pieces, whole, in pieces
    ],
)
def test_a_cut_bucket_gives_the_same_bits(ranks: Ranks, codec: Any, ranks_: int, exchange: str) -> None:
    if isinstance(codec, dict) and exchange == "hierarchy":
        exchange = "shard"  # "none" has no hierarchy
    options: dict[str, Any] = {"clip_norm": None, "warmup_steps": 2, "exchange": exchange}
    if exchange == "hierarchy":
        options["hosts"] = [[0, 1], [2, 3]]
    if isinstance(codec, dict):
        del options["exchange"]
    results = ranks.run(_train, ranks_, codec, options, [1 << 30, 16_000])
    for (whole, _, uncut, one), (cut, _, stats, several) in results:
        # Sums of the plain parts of three ranks and more may go round in another order.
        assert whole == cut or ranks_ > 2
        assert one == 1 and several > 2
        assert stats["elements_by_codec"] == uncut["elements_by_codec"]
    assert len({cut for _, (cut, _, _, _) in results}) == 1


@pytest.mark.parametrize("codec", ["none", "powersgd:rank=2"])
def test_what_gains_nothing_by_it_is_not_cut(ranks: Ranks, codec: str) -> None:
    for ((_, _, _, several),) in ranks.run(_train, 2, codec, {}, [16_000]):
        assert several == 1


@pytest.mark.parametrize("clip", ["auto", 0.05])
def test_a_cut_bucket_trains_alike(ranks: Ranks, clip: Any) -> None:
    """Where the norm is a running one, bits may differ."""
    results = ranks.run(_train, 2, "onebit", {"clip_norm": clip, "momentum": 0.5}, [1 << 30, 16_000])
    for (_, whole, _, _), (_, cut, _, several) in results:
        assert several > 2 and cut == pytest.approx(whole, rel=0.1)
    assert len({digest for _, (digest, *_) in results}) == 1


def _resume(rank: int, ranks: int, codec: str) -> tuple[str, str]:
    """Through, and stopped in the middle and gone on with by another DDP and state: the same bits."""
    ends = []
    with _cut_at(16_000):
        for stop in (False, True):
            ddp = DDP(small_model())
            options: dict[str, Any] = {"min_numel": 100, "warmup_steps": 2, "clip_norm": "auto"}
            state = gradcomm.register(ddp, codec, **options)
            train(ddp, rank, steps=5)
            if stop:
                saved, module = state.state_dict(), ddp.module
                state.close()
                del ddp
                ddp = DDP(module)
                state = gradcomm.register(ddp, codec, **options)
                state.load_state_dict(saved)
            ends.append(train(ddp, rank, steps=5)[0])
            state.close()
    return ends[0], ends[1]


@pytest.mark.parametrize("codec", ["onebit", "topk:density=0.1,ramp_steps=2", "powersgd:rank=2"])
def test_resumed_bit_for_bit(ranks: Ranks, codec: str) -> None:
    for world in (2, 3):
        for through, resumed in ranks.run(_resume, world, codec):
            assert through == resumed


def _flushed(rank: int, ranks: int) -> float:
    with _cut_at(16_000):
        ddp = DDP(small_model())
        state = gradcomm.register(ddp, "onebit", warmup_steps=0)
        train(ddp, rank, steps=3)
        before = state.stats()["residual_norm"]
        state.flush()
        train(ddp, rank, steps=1)
        left = float(state.stats()["residual_norm"])
        state.close()
    assert before > 0
    return left


def test_flush_leaves_nothing(ranks: Ranks) -> None:
    assert ranks.run(_flushed, 3) == [0.0] * 3


def _fails(rank: int, ranks: int) -> str:
    with _cut_at(16_000):
        ddp = DDP(small_model())
        state = gradcomm.register(ddp, parse("int8"), min_numel=100)
        train(ddp, rank, steps=1)
        for runner in state._runners:
            runner.transport.all_gather = None  # type: ignore[method-assign,assignment]
        try:
            train(ddp, rank, steps=1)
        except gradcomm.LaneError as error:
            return str(error)
        finally:
            state.close()
    return ""


def test_a_failure_in_a_cut_bucket_is_heard(ranks: Ranks) -> None:
    assert all("bucket 0" in said for said in ranks.run(_fails, 2))
