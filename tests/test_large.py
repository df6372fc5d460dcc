"""A model of 30 M parameters in many buckets: no hang, and the same bits on every rank.

Six steps by default; ``pytest tests/test_large.py --long`` trains for fifty.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .ranks import Ranks

CODECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int2:rounding=stochastic",
    "onebit",
    "topk",
    "topk:select=exact",
    "topk:select=threshold,values=int8",
    "powersgd",
]


def _train(rank: int, ranks: int, codec: str, steps: int) -> tuple[str, int, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1225, 1225) for _ in range(20)])
    assert sum(p.numel() for p in model.parameters()) > 30e6
    ddp = DDP(model)  # the default: 25 MB buckets, the first one smaller
    buckets: set[int] = set()
    state = gradcomm.register(ddp, codec, warmup_steps=1)
    inner = state.exchange

    def exchange(bucket):  # type: ignore[no-untyped-def]
        buckets.add(bucket.index())
        return inner(bucket)

    state.exchange = exchange  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(2, 1225, generator=generator)).square().mean().backward()
        optimizer.step()
    ratio = state.stats()["ratio"]
    state.close()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    assert torch.isfinite(flat).all()
    return digest(flat), len(buckets), ratio


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_many_buckets(ranks: Ranks, codec: str, world: int, request: pytest.FixtureRequest) -> None:
    steps = 50 if request.config.getoption("--long") else 6
    results = ranks.run(_train, world, codec, steps, timeout=40 + 4 * steps)
    assert len({r[0] for r in results}) == 1
    assert results[0][1] >= 5
    if codec != "none":
        assert results[0][2] > 1.3  # the first step is plain
