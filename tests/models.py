"""A small model, and how tests train it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

#: One of each family.
CODECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int2",
    "onebit",
    "topk:density=0.1",
    "powersgd:rank=2",
]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 8)
    )


def train(
    ddp: nn.Module, rank: int, steps: int = 6, inputs: int = 40, lr: float = 0.05
) -> tuple[str, float]:
    """Hash of the parameters after some steps on this rank's own data, and the last loss."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.5)
    generator = torch.Generator().manual_seed(100 + rank)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, inputs, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
    return digest(torch.cat([p.detach().flatten() for p in ddp.parameters()])), float(loss.detach())


def train_registered(
    rank: int, ranks: int, codec: str, options: dict[str, Any]
) -> tuple[str, float, Any]:
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(ddp, codec, min_numel=100, **options)
    result = train(ddp, rank)
    stats = state.stats()
    state.close()
    return *result, stats


class Direct(nn.Module):
    """Parameters whose gradients are what ``forward`` is given: ``{name: gradient}``; a parameter that
    is not named is not used. ``make``: of shape, the parameter's first value."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], make: Any = torch.zeros) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(make(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        products = [(p * gradients[n]).sum() for n, p in self.named_parameters() if n in gradients]
        return torch.stack(products).sum()
