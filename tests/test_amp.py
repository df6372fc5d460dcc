"""Mixed precision: the loss scale moves, steps are skipped; error feedback notices neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .models import CODECS
from .ranks import Ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48))


def parameters(ddp: DDP) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(1000 * rank + step))


BAD = 25


class Moving:
    """A scaler, as far as gradcomm looks at it, whose scale moves by powers of two: exact in float."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get_scale(self) -> float:
        return self.scale

    def update(self, step: int) -> None:
        self.scale = 2.0 ** ((step * 7) % 13 - 6)


def _moved(rank: int, ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> dict[str, tuple[str, ...]]:
    """By case: the end's bits with the loss scaled by a moving scale, and unscaled."""
    ends: dict[str, tuple[str, ...]] = {}
    for codec, options in cases:
        both = []
        for scaled in (True, False):
            ddp = DDP(model(), bucket_cap_mb=0.02)
            state = gradcomm.register(ddp, codec, warmup_steps=2, min_numel=100, **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            scaler = Moving()
            if scaled:
                state.attach_scaler(scaler)
            for step in range(9):
                optimizer.zero_grad()
                x = batch(rank, step)
                ((ddp(x) - x).square().mean() * scaler.scale).backward()
                for p in ddp.parameters():
                    p.grad.div_(scaler.scale)  # type: ignore[union-attr]
                optimizer.step()
                if scaled:
                    scaler.update(step)
                if step == 4:  # a state remembers in which scale it is
                    state.load_state_dict(state.state_dict())
                if step == 6:
                    state.flush()
            state.close()
            both.append(digest(parameters(ddp)))
        ends[f"{codec} {options}"] = tuple(both)
    return ends


def test_a_moving_scale_changes_no_bit(ranks: Ranks) -> None:
    feedback = {"error_feedback": True}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("int4:rounding=stochastic", feedback | {"clip_norm": 0.05}),
        ("onebit", feedback | {"exchange": "shard", "clip_norm": "auto"}),
        ("onebit", {"momentum": 0.9, "exchange": "gather"}),
        ("topk:density=0.1", {"momentum": 0.9, "exchange": "shard"}),
        ("powersgd:rank=2", {"clip_norm": 0.05}),
        ({0: "onebit", 3: "topk:density=0.1", 5: "powersgd:rank=2", 7: "int8"}, {}),  # type: ignore[list-item]
    ]
    for ends in ranks.run(_moved, 2, cases):
        assert all(scaled == unscaled for scaled, unscaled in ends.values()), ends


def _trained(
    rank: int, ranks: int, codecs: list[str], dtype: torch.dtype, hurt: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Fifty steps under autocast with a GradScaler. Step 25 is left out, or (``hurt``) rank 1's loss is
    infinite in it. By codec: the end's bits, the loss on other data, skipped steps, number of scales."""
    results = {}
    for codec in codecs:
        ddp = DDP(model(), bucket_cap_mb=0.02)
        state = gradcomm.register(ddp, codec, warmup_steps=10, min_numel=100, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=12)
        state.attach_scaler(scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
        skipped, scales = [], set()
        for step in range(50):
            if step == BAD and not hurt:
                continue
            before = parameters(ddp)
            optimizer.zero_grad()
            x = batch(rank, step)
            with torch.autocast("cpu", dtype=dtype):
                loss = (ddp(x).float() - x.roll(1, 1)).square().mean()
            if step == BAD and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            finite = all(bool(torch.isfinite(p.grad).all()) for p in ddp.parameters())  # type: ignore[arg-type]
            scaler.step(optimizer)
            scaler.update()
            scales.add(scaler.get_scale())
            if torch.equal(before, parameters(ddp)):
                skipped.append(step)
            assert finite == (step not in skipped)
            if step in (BAD, BAD + 1, 49):
                slots = state.state_dict()[f"rank {rank}"]["memory"]
                assert all(torch.isfinite(t).all() for held in slots.values() for t in held.values())
        state.close()
        held_out = batch(7, 999)
        with torch.no_grad():
            loss = (ddp.module(held_out) - held_out.roll(1, 1)).square().mean()
        results[codec] = digest(parameters(ddp)), float(loss), skipped, len(scales)
    return results


@pytest.mark.parametrize(
    ("dtype", "codecs", "options"),
    [
        (torch.float16, CODECS, {}),
        (torch.bfloat16, ["none", "powersgd:rank=2", "topk:density=0.1"], {"momentum": 0.5}),
        (torch.float16, ["int4", "onebit", "topk:density=0.1"], {"exchange": "shard", "momentum": 0.5}),
    ],
    ids=["fp16", "bf16-momentum", "fp16-shard"],
)
def test_a_skipped_step_costs_that_step_and_no_more(
    ranks: Ranks, dtype: torch.dtype, codecs: list[str], options: dict[str, Any]
) -> None:
    without = ranks.run(_trained, 2, codecs, dtype, False, options)
    hurt = ranks.run(_trained, 2, codecs, dtype, True, options)
    assert without[0] == without[1] and hurt[0] == hurt[1]
    for codec in codecs:
        _, expected, none, _ = without[0][codec]
        _, loss, skipped, scales = hurt[0][codec]
        assert none == [] and skipped == [BAD] and scales >= 3
        assert loss == pytest.approx(expected, rel=0.01), codec


def test_what_is_no_scaler_is_refused() -> None:
    with pytest.raises(TypeError, match="no get_scale"):
        gradcomm.CommState("onebit").attach_scaler(3)
