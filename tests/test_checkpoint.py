"""A saved state goes on as if training had never stopped, or says why it cannot."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .ranks import Ranks

#: Codec, exchange (None: the default for the number of ranks).
EVERY = [
    ("none", None),
    ("fp16", "gather"),
    ("bf16", "reduce"),
    ("int8", "shard"),
    ("int4:rounding=stochastic", "gather"),
    ("int4:rounding=stochastic", "shard"),
    ("int2:scheme=minmax", "shard"),
    ("onebit", "gather"),
    ("onebit", "shard"),
    ("topk:density=0.05,ramp_steps=4", "gather"),
    ("topk:density=0.05,ramp_steps=4", "shard"),
    ("topk:density=0.05,select=exact,ramp_steps=2", "shard"),
    ("topk:density=0.05,select=threshold,values=float16", "gather"),
    ("powersgd:rank=2", None),
    ("powersgd:rank=2,warm_start=False", None),
    ({0: "none", 2: "int4", 4: "topk:density=0.1,ramp_steps=0", 6: "powersgd:rank=2"}, None),
]
OPTIONS = {"min_numel": 16, "warmup_steps": 2, "error_feedback": True, "clip_norm": "auto"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(48, 48) for _ in range(5)])


def wrapped(weights: dict[str, Any] | None = None) -> DDP:
    # Small buckets: the first step of a new model has another layout than the others.
    ddp = DDP(model(), bucket_cap_mb=0.02)
    if weights is not None:
        ddp.load_state_dict(weights)
    return ddp


def steps(ddp: DDP, rank: int, first: int, last: int, lr: float = 0.1) -> float:
    """Trains on data that goes by rank and step; returns the last loss."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    loss = torch.zeros(())
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        optimizer.zero_grad()
        x = torch.randn(8, 48, generator=generator)
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def bits(ddp: DDP) -> str:
    return digest(torch.cat([p.detach().flatten() for p in ddp.parameters()]))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def _resume(rank: int, ranks: int, momentum: float, stops: list[int]) -> dict[str, Any]:
    """By case: the hash when trained through, and resumed at each of ``stops``."""
    results: dict[str, Any] = {}
    for codec, exchange in EVERY:
        options = {**OPTIONS, "exchange": exchange, "momentum": momentum}
        ddp = wrapped()
        state = gradcomm.register(ddp, codec, **options)
        saved, at = [], 0
        for stop in stops:
            steps(ddp, rank, at, stop)
            saved.append((through_a_file(state.state_dict()), {k: v.clone() for k, v in ddp.state_dict().items()}))
            at = stop
        steps(ddp, rank, at, 8)
        state.close()
        through = bits(ddp)
        resumed = []
        for stop, (memory, weights) in zip(stops, saved, strict=True):
            ddp = wrapped(weights)
            state = gradcomm.register(ddp, codec, **options)
            assert state.load_state_dict(memory) == []
            assert state.step == stop
            steps(ddp, rank, stop, 8)
            assert state.step == 8
            state.close()
            resumed.append(bits(ddp))
        results[f"{codec} by {exchange}"] = through, resumed
    return results


@pytest.mark.parametrize(("world", "momentum", "stops"), [(2, 0.9, [2, 5]), (3, 0.0, [3, 4, 6])])
def test_resumed_is_not_interrupted(ranks: Ranks, world: int, momentum: float, stops: list[int]) -> None:
    for results in ranks.run(_resume, world, momentum, stops):
        different = {case: r for case, r in results.items() if any(h != r[0] for h in r[1])}
        assert not different
        assert len({through for through, _ in results.values()}) > 10
