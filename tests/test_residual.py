"""Residuals that rest in 8 bits between exchanges: what they cost, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.codec import OneBit
from gradcomm.codec.base import Scratch
from gradcomm.memory import Memory
from gradcomm.part import Part, Slice

from .ranks import Ranks
from .test_checkpoint import bits, steps, through_a_file, wrapped

OPTIONS: dict[str, Any] = {
    "min_numel": 16,
    "warmup_steps": 0,
    "error_feedback": True,
    "residual": "int8",
}


def _part(keys: list[int], numel: int = 1000) -> Part:
    slices = [Slice(k, i * numel, numel, torch.Size([numel]), (1,), True) for i, k in enumerate(keys)]
    return Part(OneBit(block=128), "gather", slices, True)


def _filled(memory: Memory, part: Part) -> torch.Tensor:
    """The residual of a part that is now at rest, before it was rounded."""
    values = torch.randn(part.layout.blocks * part.layout.block)
    with memory.residual(part, Scratch(), key=3) as flat:
        flat.zero_()
        for mine, value in zip(part.by_segment(flat), part.by_segment(values), strict=True):
            mine.copy_(value)
        return flat.clone()


def test_a_residual_at_rest_takes_a_byte_an_element() -> None:
    memory, part = Memory(2, residual="int8"), _part([0, 1])
    _filled(memory, part)
    numel = part.layout.blocks * part.layout.block
    assert memory.bytes() == numel + 4 * numel // 128


def test_it_comes_back_within_a_step_of_rounding_and_the_same_each_time() -> None:
    memory, part = Memory(2, residual="int8"), _part([0, 1])
    before = _filled(memory, part)
    states = [memory.state()[0]["residual"] for _ in range(2)]
    norm = memory.norm()
    with memory.residual(part, Scratch(), key=4) as flat:
        held = flat.clone()
    for block, was in zip(held.view(-1, 128), before.view(-1, 128), strict=True):
        assert float((block - was).abs().max()) <= 1.001 * float(was.abs().max()) / 127
    assert not torch.equal(held, before)
    for state in states:
        for key, mine in zip(part.keys, part.by_segment(held), strict=True):
            assert torch.equal(state[key], mine)
    assert norm == pytest.approx(float(held.double().norm()), rel=1e-12)


def test_rounding_has_mean_zero() -> None:
    part = _part([0])
    memory = Memory(2, residual="int8")
    total = torch.zeros(part.numel)
    values = torch.linspace(-1, 1, part.layout.blocks * part.layout.block)
    for key in range(400):
        with memory.residual(part, Scratch(), key) as flat:
            flat.copy_(values)
        total += memory.state()[0]["residual"][0]
    off = total / 400 - values[:1000]
    assert float(off.abs().max()) < 1 / 127 / 4  # eight standard deviations or so of the mean of 400


def test_it_follows_its_parameters_to_other_buckets_and_is_scaled_with_them() -> None:
    memory, before = Memory(2, residual="int8"), _part([0, 1, 2])
    _filled(memory, before)
    rested = memory.state()[0]["residual"]
    memory.scale(0.5)
    memory.drop(before)
    after = _part([2, 0])
    with memory.residual(after, Scratch(), key=5) as flat:
        for key, mine in zip(after.keys, after.by_segment(flat), strict=True):
            assert torch.equal(mine, rested[key] / 2)
    assert torch.equal(memory.state()[0]["residual"][1], rested[1] / 2)
    assert set(memory.take("residual", after)) == {0, 2}
    assert set(memory.state()[0]["residual"]) == {1}


def _resume(rank: int, ranks: int, codec: str, exchange: str) -> tuple[str, str, bool]:
    ddp = wrapped()
    state = gradcomm.register(ddp, codec, exchange=exchange, **OPTIONS)
    steps(ddp, rank, 0, 4)
    saved = through_a_file(state.state_dict())
    weights = {k: v.clone() for k, v in ddp.state_dict().items()}
    steps(ddp, rank, 4, 8)
    through = bits(ddp)
    compressed = [p for p in state._buckets.parameters if not p.plain]
    numel = sum(p.tensor.numel() for p in compressed)
    other = 4 * numel / ranks if exchange == "shard" else 0  # the owners' residuals
    other += 4 * numel if codec.startswith("twobit") else 0  # the sizes it divides by
    small = state.stats()["memory_bytes"] < 1.5 * numel + 1.2 * other
    assert "8 bits" in state.describe()
    state.close()
    again = wrapped(weights)
    state = gradcomm.register(again, codec, exchange=exchange, **OPTIONS)
    assert state.load_state_dict(saved) == []
    steps(again, rank, 4, 8)
    state.close()
    return through, bits(again), small


@pytest.mark.parametrize("exchange", ["gather", "shard"])
@pytest.mark.parametrize("codec", ["onebit", "int4", "topk:density=0.1", "twobit:refresh=2"])
def test_resumes_bit_for_bit(ranks: Ranks, codec: str, exchange: str) -> None:
    for through, resumed, small in ranks.run(_resume, 2, codec, exchange):
        assert through == resumed
        assert small


def _error_of_the_sum(rank: int, ranks: int, options: dict[str, Any]) -> tuple[float, float]:
    """Of 40 equal steps: how far the sum of what came is from the sum of means, and after a flush."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(64, 64, bias=False))
    state = gradcomm.register(ddp, "onebit", min_numel=16, warmup_steps=0, clip_norm=None, **options)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    total, exact = torch.zeros(64, 64), torch.zeros(64, 64)
    offs = []
    for step in range(41):
        if step == 40:
            state.flush()
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        (weight,) = ddp.parameters()
        assert weight.grad is not None
        total += weight.grad
        mine = 2 * (x @ weight.detach().T).T @ x / (8 * 64)
        torch.distributed.all_reduce(mine)
        exact += mine / ranks
        if step >= 39:
            offs.append(float((total - exact).norm() / exact.norm()))
    state.close()
    return offs[0], offs[1]


def test_nothing_is_held_back_for_good(ranks: Ranks) -> None:
    def off(**options: Any) -> tuple[float, float]:
        return ranks.run(_error_of_the_sum, 2, options)[0]

    float32, int8 = off(error_feedback=True), off(error_feedback=True, residual="int8")
    none = off(error_feedback=False)
    assert float32[1] < 1e-5
    assert int8[0] < 1.5 * float32[0] and float32[0] < 0.5 * none[0]
    assert int8[1] < 0.1 * none[1]


@pytest.mark.parametrize(
    ("codec", "options", "says"),
    [
        ("onebit", {"residual": "int4"}, "residual='int4'; use 'float32' or 'int8'"),
        ("powersgd:rank=2", {"residual": "int8"}, "residual='int8' with powersgd:rank=2"),
        ({0: "onebit", 5: "powersgd"}, {"residual": "int8"}, "residual='int8' with powersgd"),
        ("onebit", {"residual": "int8", "exchange": "hierarchy"}, "exchange='hierarchy'"),
    ],
)
def test_what_cannot_rest_is_told(codec: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        gradcomm.CommState(codec, **options)


def test_another_codec_must_be_able_to_rest_too() -> None:
    state = gradcomm.CommState("onebit", residual="int8")
    with pytest.raises(ValueError, match="residual='int8' with powersgd"):
        state.set_codec("powersgd")
