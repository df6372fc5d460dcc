"""Parameters of every kind, few and many: they simply work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .models import CODECS
from .ranks import Ranks


def _many(rank: int, ranks: int, codec: str, count: int, shape: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    model = nn.Module()
    for i in range(count):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
    model.forward = lambda x: sum((p * p).sum() for p in model.parameters()) * x  # type: ignore[method-assign]
    ddp = DDP(model)
    state = gradcomm.register(ddp, codec, warmup_steps=1, min_numel=0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.tensor(float(rank + 1))).backward()
        optimizer.step()
    state.close()
    return digest(torch.cat([p.detach().flatten() for p in ddp.parameters()]))


@pytest.mark.parametrize(
    ("count", "shape"),
    [(1, (1, 1)), (1, (40, 40)), (1000, (3, 5))],
    ids=["one", "one-matrix", "thousand"],
)
@pytest.mark.parametrize("codec", CODECS)
def test_few_and_many_parameters(ranks: Ranks, codec: str, count: int, shape: tuple[int, ...]) -> None:
    assert len(set(ranks.run(_many, 3, codec, count, shape))) == 1  # 1 element among 3 ranks, too


class Odd(nn.Module):
    """Empty, 0-d, frozen, shared, channels_last, 1x1 and sparse parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.conv = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(8, 16, 1).to(memory_format=torch.channels_last)
        self.one = nn.Linear(16, 48)
        self.two = nn.Linear(48, 48)
        self.two.weight = self.shared = nn.Parameter(torch.randn(48, 48) / 7)
        self.wide = nn.Parameter(torch.ones(300, 2, dtype=torch.float64))
        self.bf16 = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.point(self.conv(x)).mean((2, 3))
        x = self.two(self.one(x).tanh()) @ self.shared
        x = x * self.scale * self.frozen.sum() + self.empty.sum() + self.wide.sum().float()
        return x + (self.bf16 * self.bf16).sum().float() / 1e3


def _odd(rank: int, ranks: int, codec: str, **ddp_options: Any) -> tuple[str, Any]:
    torch.manual_seed(0)
    ddp = DDP(Odd(), bucket_cap_mb=0.01, **ddp_options)
    state = gradcomm.register(ddp, codec, warmup_steps=1, min_numel=16, verify=True)
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        ddp(torch.randn(2, 4, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().double().flatten() for p in ddp.parameters()])
    assert torch.isfinite(flat).all()
    stats = state.stats()
    state.close()
    return digest(flat), stats


@pytest.mark.parametrize(
    "ddp_options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=lambda o: next(iter(o), "default"),
)
@pytest.mark.parametrize("codec", CODECS)
def test_odd_parameters_simply_work(ranks: Ranks, codec: str, ddp_options: dict[str, Any]) -> None:
    results = ranks.run(_odd, 2, codec, **ddp_options)
    assert results[0][0] == results[1][0]
    assert results[0][1]["steps"] == 4


def _exact_mean(rank: int, ranks: int, codec: str, exchange: str | None, channels_last: bool) -> float:
    """Largest relative difference from the exact mean, for a gradient that the codec can hold."""
    torch.manual_seed(0)
    layer: nn.Module = nn.Conv2d(8, 16, 3, bias=False)
    if channels_last:
        layer = layer.to(memory_format=torch.channels_last)
    ddp = DDP(layer)
    state = gradcomm.register(
        ddp, codec, warmup_steps=0, min_numel=16, clip_norm=None, exchange=exchange
    )
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 8, 5, 5, generator=generator)
    ddp(x).square().sum().backward()
    weight = next(ddp.parameters())
    assert weight.grad is not None
    exact = nn.Conv2d(8, 16, 3, bias=False)
    exact.load_state_dict(layer.state_dict())
    exact(x).square().sum().backward()
    assert exact.weight.grad is not None
    mean = exact.weight.grad / ranks
    dist.all_reduce(mean)
    state.close()
    return float((weight.grad - mean).norm() / mean.norm())


@pytest.mark.parametrize("channels_last", [False, True])
def test_powersgd_of_full_rank_is_exact_in_any_memory_format(ranks: Ranks, channels_last: bool) -> None:
    codec = "powersgd:rank=16,min_compression_rate=0.1"
    for error in ranks.run(_exact_mean, 2, codec, None, channels_last):
        assert error < 1e-4


def _sparse(rank: int, ranks: int, codec: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Linear(32, 64))
    ddp = DDP(model)
    state = gradcomm.register(ddp, codec, warmup_steps=1, min_numel=16)
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randint(0, 64, (5,), generator=generator)).square().mean().backward()
        optimizer.step()
    state.close()
    return digest(torch.cat([p.detach().flatten() for p in ddp.parameters()]))


@pytest.mark.parametrize("codec", CODECS)
def test_sparse_gradients_pass_through(ranks: Ranks, codec: str) -> None:
    a, b = ranks.run(_sparse, 2, codec)
    assert a == b
