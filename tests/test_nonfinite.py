"""A gradient that is not finite reaches every rank, costs that step, and leaves nothing behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .models import Direct, small_model
from .ranks import Ranks

CARRIED = [
    ("none", "reduce"),
    *itertools.product(("fp16", "bf16"), ("gather", "shard", "reduce")),
    *itertools.product(
        (
            "int8",
            "int4",
            "int8:rounding=stochastic",
            "int4:scheme=minmax",
            "int2",
            "onebit",
            "onebit:refresh=3,normalize=True",  # the bad step is refreshed, or, with 2, the next
            "onebit:refresh=2,normalize=True",
            "twobit:refresh=0,normalize=False",
            "twobit:refresh=3",
            "topk:density=0.05,ramp_steps=0",
            "topk:density=0.25,ramp_steps=0,refresh=3,normalize=True",
            "topk:density=0.05,ramp_steps=0,values=int8",
            "topk:density=0.05,ramp_steps=0,select=exact,values=float16",
            "topk:density=0.05,ramp_steps=0,select=threshold",
        ),
        ("gather", "shard"),
    ),
    ("powersgd:rank=2", "reduce"),
]
SHAPES = {"a": (40, 60), "b": (30, 50), "c": (64, 96), "bias": (60,)}


def _held(state: gradcomm.CommState) -> list[Tensor]:
    """All that the memory holds."""
    memory = state.state_dict()[f"rank {dist.get_rank()}"]["memory"]
    return [tensor for by_name in memory.values() for tensor in by_name.values()]


def _poisoned(
    rank: int, ranks: int, codec: str, exchange: str, value: float, momentum: float, warmup: int
) -> list[str]:
    """One bad element on the last rank in step 2 of 5: what is not as it must be."""
    model = Direct(SHAPES)
    ddp = DDP(model, bucket_cap_mb=0.02)
    state = gradcomm.register(
        ddp,
        codec,
        exchange=exchange,
        warmup_steps=warmup,
        momentum=momentum,
        clip_norm="auto",
        error_feedback=codec != "none",
        min_numel=100,
        measure_every=1,
    )
    generator = torch.Generator().manual_seed(rank)
    wrong = []
    for step in range(5):
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        bad = ("a", (3, 7)) if step % 2 == 0 else ("bias", (5,))
        if step == 2 and rank == ranks - 1:
            gradients[bad[0]][bad[1]] = value
        ddp.zero_grad()
        ddp(gradients).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        finite = {name: bool(grad.isfinite().all()) for name, grad in grads.items()}
        if step == 2 and finite["a"]:
            wrong.append("the bad element did not arrive")
        if step == 2 and not (finite["c"] and finite["bias"]) and "select=" not in codec:
            wrong.append("it spread to other parameters")
        if step != 2 and not all(finite.values()):
            wrong.append(f"step {step} is not finite: {finite}")
        if not all(bool(h.isfinite().all()) for h in _held(state)):
            wrong.append(f"the memory is not finite after step {step}")
        flat = torch.cat([g.flatten() for g in grads.values()])
        digests: list[Any] = [None] * ranks
        dist.all_gather_object(digests, digest(flat))
        if len(set(digests)) != 1:
            wrong.append(f"ranks differ in step {step}")
    error = state.stats()["compression_error"]
    if not error < 10:
        wrong.append(f"compression error {error}")
    state.close()
    return wrong


def _poison_all(rank: int, ranks: int, codec: str, exchange: str) -> list[str]:
    found = []
    nan, inf = float("nan"), float("inf")
    for case in ((nan, 0.0, 0), (-inf, 0.0, 0), (inf, 0.9, 0), (-inf, 0.9, 4)):
        found += [f"{case}: {text}" for text in _poisoned(rank, ranks, codec, exchange, *case)]
    return found


@pytest.mark.parametrize(("codec", "exchange"), CARRIED)
def test_a_bad_element_arrives_and_leaves_nothing_behind(
    ranks: Ranks, codec: str, exchange: str
) -> None:
    assert ranks.run(_poison_all, 2, codec, exchange) == [[], []]


@pytest.mark.parametrize("codec", ["int4", "onebit", "topk:density=0.05,ramp_steps=0"])
def test_a_bad_element_among_three_ranks(ranks: Ranks, codec: str) -> None:
    assert ranks.run(_poison_all, 3, codec, "shard") == [[], [], []]


def _two_runs(rank: int, ranks: int, codec: str, momentum: float) -> tuple[float, float]:
    """The loss after 200 steps, without and with a step whose gradient is Inf on rank 0."""
    losses = []
    for bad in (None, 60):
        ddp = DDP(small_model())
        state = gradcomm.register(ddp, codec, warmup_steps=20, min_numel=100, momentum=momentum)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05 if momentum else 0.2)
        generator = torch.Generator().manual_seed(rank)
        torch.manual_seed(5)
        teacher = nn.Linear(40, 8).requires_grad_(False)
        skipped = 0
        for step in range(200):
            x = torch.randn(16, 40, generator=generator)
            optimizer.zero_grad()
            noise = 0.3 * torch.randn(16, 8, generator=generator)
            loss = (ddp(x) - teacher(x) - noise).square().mean()
            (loss * (float("inf") if step == bad and rank == 0 else 1.0)).backward()
            if all(bool(p.grad.isfinite().all()) for p in ddp.parameters()):
                optimizer.step()
            else:
                skipped += 1
        assert skipped == (bad is not None)
        held_out = torch.Generator().manual_seed(99)
        x = torch.randn(512, 40, generator=held_out)
        noise = 0.3 * torch.randn(512, 8, generator=held_out)
        with torch.no_grad():
            losses.append(float((ddp.module(x) - teacher(x) - noise).square().mean()))
        state.close()
    return losses[0], losses[1]


@pytest.mark.parametrize(
    ("codec", "momentum"),
    [
        ("none", 0.9),
        ("fp16", 0.0),
        ("int8", 0.0),
        ("int4", 0.9),
        ("onebit", 0.0),
        ("onebit", 0.9),
        ("topk:ramp_steps=50", 0.9),
        ("powersgd:rank=2", 0.0),
        ("powersgd:rank=2", 0.9),
    ],
)
def test_one_inf_step_costs_one_step(ranks: Ranks, codec: str, momentum: float) -> None:
    for without, with_inf in ranks.run(_two_runs, 2, codec, momentum):
        assert with_inf == pytest.approx(without, rel=0.01)
