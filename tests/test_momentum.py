"""Momentum correction: with a codec that loses nothing it is SGD's own momentum; with top-k it is Deep
Gradient Compression as the paper has it."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .models import small_model
from .ranks import RankError, Ranks

MU, LR = 0.9, 0.02


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(16, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return _flat(ddp)


def _far(
    rank: int, ranks: int, codec: str, nesterov: bool, decay: float, exchange: str | None
) -> tuple[float, str]:
    """How far training with momentum correction ends from the optimizer's own momentum."""
    own = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(own, "none")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        own.parameters(), LR, MU, nesterov=nesterov, weight_decay=decay
    )
    wanted = _steps(own, optimizer, rank)
    state.close()
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(
        ddp, codec, momentum=MU, nesterov=nesterov, warmup_steps=3, min_numel=100, exchange=exchange
    )
    optimizer = gradcomm.optim.SGD(ddp.parameters(), state, LR, weight_decay=decay)
    reached = _steps(ddp, optimizer, rank)
    state.close()
    way = (wanted - _flat(small_model())).norm()
    return float((reached - wanted).norm() / way), digest(reached)


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy-ball", "nesterov"])
@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["", "decay"])
@pytest.mark.parametrize(
    ("codec", "far", "exchange"),
    [
        ("none", 1e-5, None),
        ("fp16", 1e-3, "shard"),
        ("int8", 0.01, None),
        ("topk:density=0.5", 0.4, None),
        ("powersgd", 0.3, None),
    ],
)
def test_agrees_with_sgd(
    ranks: Ranks, codec: str, far: float, exchange: str | None, nesterov: bool, decay: float
) -> None:
    results = ranks.run(_far, 2, codec, nesterov, decay, exchange)
    assert results[0][1] == results[1][1]
    for distance, _ in results:
        assert distance < far


SIDE, DENSITY, CLIP = 64, 0.05, 0.5


def _gradient(weight: Tensor, rank: int, step: int) -> Tensor:
    """Of a quadratic of each rank's own, with noise: needs no model, so the reference has it too."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return weight * (1 + rank) + torch.randn(SIDE, SIDE, generator=generator)


def _paper(ranks: int, steps: int, nesterov: bool, clip: float) -> Tensor:
    """Lin et al. 2018, algorithm 4 and appendix B, by a single process: local clipping, momentum
    correction, momentum factor masking, and SGD without momentum."""
    weight = torch.ones(SIDE, SIDE)
    u = [torch.zeros(SIDE, SIDE) for _ in range(ranks)]
    v = [torch.zeros(SIDE, SIDE) for _ in range(ranks)]
    keep = round(DENSITY * SIDE * SIDE)
    for step in range(steps):
        total = torch.zeros(SIDE, SIDE)
        for rank in range(ranks):
            g = _gradient(weight, rank, step)
            g = g * min(1.0, clip / float(g.norm()))
            if nesterov:
                u[rank] = MU * (u[rank] + g)
                v[rank] = v[rank] + u[rank] + g
            else:
                u[rank] = MU * u[rank] + g
                v[rank] = v[rank] + u[rank]
            mask = torch.zeros(SIDE * SIDE, dtype=torch.bool)
            mask[v[rank].abs().flatten().topk(keep).indices] = True
            mask = mask.view(SIDE, SIDE)
            total += torch.where(mask, v[rank], 0.0)
            v[rank][mask], u[rank][mask] = 0.0, 0.0
        weight = weight - LR * total / ranks
    return weight


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIDE, SIDE))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def _deep(rank: int, ranks: int, steps: int, nesterov: bool, clip: float) -> Tensor:
    ddp = DDP(_Weight())
    codec = gradcomm.TopK(density=DENSITY, select="exact", ramp_steps=0)
    state = gradcomm.register(
        ddp, codec, momentum=MU, nesterov=nesterov, warmup_steps=0, clip_norm=clip, exchange="gather"
    )
    optimizer = gradcomm.optim.SGD(ddp.parameters(), state, LR)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(_gradient(ddp.module.weight.detach(), rank, step)).backward()
        optimizer.step()
    state.close()
    return ddp.module.weight.detach()


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy-ball", "nesterov"])
@pytest.mark.parametrize("clip", [CLIP, 1e9], ids=["clipped", "not-clipped"])
def test_top_k_is_deep_gradient_compression(ranks: Ranks, nesterov: bool, clip: float) -> None:
    steps = 12
    wanted = _paper(2, steps, nesterov, clip)
    way = (wanted - 1.0).norm()
    for reached in ranks.run(_deep, 2, steps, nesterov, clip):
        assert (reached - wanted).norm() / way < 1e-4


def _lone(rank: int, ranks: int, nesterov: Any, momentum: float) -> None:
    gradcomm.register(DDP(_Weight()), "none", momentum=momentum, nesterov=nesterov)


@pytest.mark.parametrize(("nesterov", "momentum"), [(True, 0.0), (1, 0.9)])
def test_bad_nesterov(ranks: Ranks, nesterov: Any, momentum: float) -> None:
    with pytest.raises(RankError, match="nesterov"):
        ranks.run(_lone, 1, nesterov, momentum)


def _optimizers(rank: int, ranks: int) -> None:
    ddp = DDP(_Weight())
    state = gradcomm.register(ddp, "none", momentum=MU)
    optimizer = gradcomm.optim.SGD(ddp.parameters(), state, torch.tensor(LR), weight_decay=0.1)
    before = ddp.module.weight.detach().clone()
    ddp(torch.ones(SIDE, SIDE)).backward()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.allclose(ddp.module.weight, before - LR * (1 + 0.1 * before))
    assert torch.equal(ddp.module.weight.grad, torch.ones(SIDE, SIDE))  # as the hook left it

    # What it keeps, by save and load, and by pickle.
    saved = copy.deepcopy(optimizer.state_dict())
    other = gradcomm.optim.SGD(ddp.parameters(), state, LR)
    other.load_state_dict(saved)
    (kept,) = other.state.values()
    assert torch.equal(kept["momentum_buffer"], 0.1 * before)
    assert pickle.loads(pickle.dumps(optimizer)).step() is None

    # Under a scheduler that moves momentum.
    try:
        torch.optim.lr_scheduler.OneCycleLR(other, max_lr=0.1, total_steps=10)
        other.step()
    except ValueError as error:
        assert "cycle_momentum=False" in str(error)
    else:
        raise AssertionError("a momentum that moved was not noticed")

    # No gradient: left alone. Upwards: the gradient is followed, weights still decay.
    free, up = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    up.grad = torch.full((3,), 2.0)
    climbing = gradcomm.optim.SGD([free, up], state, 0.5, weight_decay=0.5, maximize=True)
    climbing.step()
    assert free.tolist() == [1.0] * 3 and up.tolist() == [1.0 + 0.5 * 2.0 - 0.5 * 0.5] * 3
    assert math.isclose(state.momentum, MU)
    state.close()


def test_the_optimizer(ranks: Ranks) -> None:
    ranks.run(_optimizers, 1)
