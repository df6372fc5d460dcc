"""Error feedback remembers what was not sent, by parameter, whatever DDP does with its buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm import ops
from gradcomm.codec import OneBit
from gradcomm.memory import Memory
from gradcomm.part import Part, Slice

from .ranks import Ranks

FEEDBACK = [
    "fp16",
    "int8",
    "int4",
    "int4:rounding=stochastic",
    "int2:scheme=minmax",
    "onebit",
    "topk:density=0.05,ramp_steps=2",
    "topk:density=0.05,select=exact",
    "topk:density=0.05,select=threshold,values=float16",
    "topk:density=0.1,values=int8",
    "powersgd:rank=2",
    "twobit:refresh=2",
    "twobit:refresh=0,normalize=False",
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def _conserved(rank: int, ranks: int, codec: str, exchange: str | None) -> tuple[float, int]:
    """Of the largest parameter: |sum of sent + left over - sum of exact means| / |sum of exact|, and
    how often DDP changed the buckets."""
    ddp = DDP(model(), bucket_cap_mb=0.04)  # the first step has another layout than the others
    plain = model()
    state = gradcomm.register(
        ddp, codec, warmup_steps=0, min_numel=16, clip_norm=None, error_feedback=True, exchange=exchange
    )
    layouts: set[Any] = set()
    sent: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x = torch.randn(8, 64, generator=generator)
        ddp.zero_grad()
        plain.zero_grad()
        ddp(x).square().mean().backward()
        plain(x).square().mean().backward()
        layouts.add(tuple(state._buckets._parts))
        for (name, p), q in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            sent[name] = sent.get(name, 0) + p.grad
            exact[name] = exact.get(name, 0) + q.grad
    held = state.state_dict()[f"rank {rank}"]["memory"]
    worst = 0.0
    for name, total in exact.items():
        left = held["residual"].get(name, torch.zeros(total.numel()))
        if name in held.get("owner", {}):
            left += ranks * held["owner"][name]  # of the mean: it counts for every rank
        left = left.view_as(total)
        dist.all_reduce(left)
        dist.all_reduce(total)
        gap = sent[name] + left / ranks - total / ranks
        worst = max(worst, float(gap.norm() / total.norm()))
    state.close()
    return worst, len(layouts)


@pytest.mark.parametrize(("world", "exchange"), [(2, None), (3, "shard")])
@pytest.mark.parametrize("codec", FEEDBACK)
def test_nothing_is_lost_through_the_rebuild(
    ranks: Ranks, codec: str, world: int, exchange: str | None
) -> None:
    if codec.startswith("powersgd"):
        exchange = None
    for worst, layouts in ranks.run(_conserved, world, codec, exchange):
        assert worst < 2e-5
        assert layouts == 2


def _one_sided(rank: int, ranks: int, feedback: Any) -> tuple[bool, bool]:
    """Whether a rank remembers anything as a worker, and as an owner."""
    ddp = DDP(model())
    state = gradcomm.register(
        ddp, "onebit", warmup_steps=0, min_numel=16, error_feedback=feedback, exchange="shard"
    )
    for _ in range(2):
        ddp(torch.randn(8, 64)).square().mean().backward()
    held = state.state_dict()[f"rank {rank}"]["memory"]
    state.close()
    worker, owner = (any(bool(t.any()) for t in held.get(s, {}).values()) for s in ("residual", "owner"))
    return worker, owner


@pytest.mark.parametrize(
    ("feedback", "remembers"), [(True, (True, True)), ("worker", (True, False)), (False, (False, False))]
)
def test_error_feedback_on_both_sides_or_one_or_none(
    ranks: Ranks, feedback: Any, remembers: tuple[bool, bool]
) -> None:
    assert ranks.run(_one_sided, 2, feedback) == [remembers] * 2


def _part(keys: list[int], numel: int = 200) -> Part:
    slices = [Slice(k, i * numel, numel, torch.Size([numel]), (1,), True) for i, k in enumerate(keys)]
    return Part(OneBit(block=128), "shard", slices, True)


def test_residuals_follow_their_parameters() -> None:
    memory = Memory(ranks=2)
    before = _part([0, 1, 2])
    flat = memory.flat("residual", before)
    assert flat.numel() == 3 * 256 and not flat.any()
    for key, (first, numel) in zip(before.keys, before.layout.places(), strict=True):
        flat[first : first + numel] = key + 1.0
    memory.drop(before)
    after = _part([2, 0])
    moved = memory.flat("residual", after)
    assert moved[:200].eq(3).all() and moved[256:456].eq(1).all()
    assert not moved[200:256].any()


def test_the_owners_residual_moves_to_its_own() -> None:
    memory = Memory(ranks=2)
    part = _part([0, 1, 2])  # six blocks of 128: this rank owns blocks 1 to 3
    memory.flat("residual", part)
    owned = memory.owner(part, 1, 3)
    owned[:] = 1.0
    memory.drop(part)
    again = memory.flat("residual", _part([0, 1, 2]))
    expected = torch.zeros(768)
    expected[128:200] = 2.0  # rest of parameter 0: the mean's residual, times two ranks
    expected[256:456] = 2.0  # parameter 1, its two blocks
    assert torch.equal(again, expected)


def _allocated(
    rank: int, ranks: int, codec: str, exchange: str | None
) -> tuple[int, dict[str, Any], int]:
    """Largest allocation in the lane's operators in a late step; stats; bytes of the gradients."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]))
    state = gradcomm.register(ddp, codec, warmup_steps=0, clip_norm=None, exchange=exchange)
    numel = sum(p.numel() for p in ddp.parameters())
    kept: list[int] = []
    for step in range(6):
        ddp(torch.randn(2, 256)).square().mean().backward()
        flats = [f.data_ptr() for f in state._memory._flat.values()]
        flats += [b.data_ptr() for r in state._runners for b in r.scratch._buffers.values()]
        if step >= 3:
            kept.append(hash(tuple(flats)))
    stats = state.stats()
    state.close()
    return len(set(kept)), stats, numel


@pytest.mark.parametrize(
    ("codec", "exchange", "residual", "payload"),
    [
        # float32 residuals, and payload bytes, for each element, at 3 ranks
        ("int8", "gather", 0, 3 * 1.01),
        ("onebit", "gather", 4, 3 * 0.134),
        ("onebit", "shard", 4 + 4 / 3, 3 * 0.134),
        ("int4", "shard", 4 + 4 / 3, 3 * 0.51),
        ("topk:ramp_steps=0", "shard", 4 + 4 / 3, 3 * 0.051),
        ("powersgd:rank=1,start_step=0", None, 4.04, 0.04),
    ],
)
def test_memory_is_what_the_readme_says_and_stays(
    ranks: Ranks, codec: str, exchange: str | None, residual: float, payload: float
) -> None:
    for different, stats, numel in ranks.run(_allocated, 3, codec, exchange):
        assert different == 1  # the same buffers in every step
        assert stats["memory_bytes"] <= residual * numel * 1.02
        assert stats["scratch_bytes"] <= payload * numel * 1.05  # there is one bucket


def test_layout_places_are_whole_blocks() -> None:
    layout = ops.Layout.of([(5, 130), (200, 1)], 128)
    assert layout.blocks == 3 and layout.places() == [(0, 130), (256, 1)]
    assert layout.padded(2) == 4
    with pytest.raises(ValueError, match="0 elements"):
        ops.Layout.of([(0, 0)], 128)
