"""The hierarchy exchange: hosts of several ranks, all of them really on one machine over Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.codec import RecordCodec, parse
from gradcomm.transport.group import GroupTransport
from gradcomm.transport.hosts import check_hosts, find_hosts
from gradcomm.verify import digest

from .models import small_model, train_registered
from .ranks import RankError, Ranks
from .test_bytes import SHAPES

CODECS = [
    "fp16",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "onebit:refresh=2,normalize=True",
    "topk:density=0.1",
    "topk:density=0.02,select=exact",
]
HOSTS = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]]


def _train(rank: int, ranks: int, codec: str) -> list[tuple[str, float]]:
    options = [{"exchange": "hierarchy", "hosts": hosts} for hosts in HOSTS]
    return [
        train_registered(rank, ranks, codec, {"warmup_steps": 2, **o})[:2]
        for o in (*options, {"exchange": "shard"})
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_end_with_the_same_bits(ranks: Ranks, codec: str) -> None:
    results = ranks.run(_train, 4, codec)
    for run, by_rank in enumerate(zip(*results, strict=True)):
        assert len({digest for digest, _ in by_rank}) == 1, (HOSTS[run : run + 1], by_rank)
    *hierarchy, shard = results[0]
    assert [loss for _, loss in hierarchy] == pytest.approx([shard[1]] * len(HOSTS), rel=0.2)


def _error_feedback(rank: int, ranks: int, codec: str, hosts: list[list[int]]) -> float:
    """Mean gradients applied so far, plus what is remembered, equals the true means: how far off."""
    model = nn.Linear(96, 64, bias=False)
    ddp = DDP(model)
    state = gradcomm.register(
        ddp, codec, warmup_steps=0, clip_norm=None, exchange="hierarchy", hosts=hosts
    )
    generator = torch.Generator().manual_seed(rank)
    applied, true = torch.zeros(64 * 96), torch.zeros(64 * 96)
    for _ in range(5):
        x = torch.randn(8, 96, generator=generator)
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        assert model.weight.grad is not None
        applied += model.weight.grad.flatten()
        alone = torch.autograd.grad(model(x).square().mean(), model.weight)[0].flatten().clone()
        dist.all_reduce(alone)
        true += alone / ranks
    # What each rank's pieces are worth of the mean: a residual of a mean of s ranks is s of P.
    held = torch.zeros(64 * 96)
    body = state.state_dict()[f"rank {rank}"]
    for slot in ("owner", "host"):
        for residual in body["memory"][slot].values():
            held += residual * body["shares"][slot] / ranks
    assert not body["memory"].get("residual")  # nothing by rank
    dist.all_reduce(held)
    state.close()
    return float((applied + held - true).norm() / true.norm())


@pytest.mark.parametrize("codec", ["onebit", "int4", "topk:density=0.05,ramp_steps=0"])
@pytest.mark.parametrize("hosts", HOSTS[:2], ids=str)
def test_what_was_not_sent_is_remembered(ranks: Ranks, codec: str, hosts: list[list[int]]) -> None:
    for off in ranks.run(_error_feedback, 4, codec, hosts):
        assert off < 1e-5


def _bytes(rank: int, ranks: int, codec: str, hosts: list[list[int]]) -> tuple[dict[str, Any], int]:
    torch.manual_seed(0)
    model = nn.Module()
    for i, shape in enumerate(SHAPES):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
    model.forward = lambda x: sum((p * x).sum() for p in model.parameters())  # type: ignore[method-assign]
    ddp = DDP(model)
    state = gradcomm.register(
        ddp, codec, warmup_steps=0, min_numel=0, clip_norm=None, exchange="hierarchy", hosts=hosts
    )
    for _ in range(3):
        ddp(torch.ones(())).backward()
    stats = state.stats()
    between = sum(r.transport.cross.traffic.sent for r in state._runners)  # type: ignore[attr-defined]
    state.close()
    return stats, between


@pytest.mark.parametrize("hosts", HOSTS[:3], ids=str)
@pytest.mark.parametrize("codec", ["int8", "onebit"])
def test_bytes_between_hosts(ranks: Ranks, codec: str, hosts: list[list[int]]) -> None:
    made = parse(codec)
    assert isinstance(made, RecordCodec)
    blocks = sum(-(-torch.Size(s).numel() // made.block) for s in SHAPES)
    chunk = made.chunk_bytes(-(-blocks // 4), 10**6)
    h, g = len(hosts), len(hosts[0])
    results = ranks.run(_bytes, 4, codec, hosts)
    for stats, between in results:
        assert between == 3 * 2 * chunk * (h - 1)
        # Encoded means inside the host; the plain part is what is left.
        plain = stats["bytes_sent"] - between - 3 * (g - 1) * h * chunk
        numel = sum(torch.Size(s).numel() for s in SHAPES)
        assert 3 * 4 * numel * (g - 1) / g <= plain <= 3 * 4 * (numel / g + made.block) * (g - 1)


def _nonfinite(rank: int, ranks: int, codec: str) -> bool:
    ddp = DDP(small_model())
    options: dict[str, Any] = {"exchange": "hierarchy", "hosts": [[0, 1], [2, 3]]}
    state = gradcomm.register(ddp, codec, warmup_steps=0, min_numel=100, **options)
    generator = torch.Generator().manual_seed(rank)
    finite = []
    for step in range(4):
        x = torch.randn(16, 40, generator=generator)
        if step == 1 and rank == 2:
            x[0, 0] = float("inf")
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        grads = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
        finite.append(bool(torch.isfinite(grads).all()))
    memory = state.state_dict()[f"rank {rank}"]["memory"]
    held = [residual for slot in ("owner", "host") for residual in memory.get(slot, {}).values()]
    state.close()
    return finite == [True, False, True, True] and all(bool(torch.isfinite(h).all()) for h in held)


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk:density=0.1"])
def test_nonfinite_costs_one_step(ranks: Ranks, codec: str) -> None:
    assert all(ranks.run(_nonfinite, 4, codec))


def _finds(rank: int, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    group = dist.group.WORLD
    assert group is not None
    found = find_hosts(GroupTransport(group, torch.device("cpu")))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "rank"))
    return found, check_hosts(mesh, ranks)


def test_hosts_are_found_or_given_as_a_mesh(ranks: Ranks) -> None:
    for found, mesh in ranks.run(_finds, 4):
        assert found == [[0, 1, 2, 3]]
        assert mesh == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("hosts", "error"),
    [
        ([[0, 1], [2]], "every rank from 0 to 3 once"),
        ([[0, 1, 2], [3]], "between 1 and 3 ranks a host"),
        ([0, 1, 2, 3], "a list of ranks for each host"),
    ],
)
def test_bad_hosts(ranks: Ranks, hosts: Any, error: str) -> None:
    with pytest.raises(RankError) as raised:
        ranks.run(train_registered, 4, "onebit", {"exchange": "hierarchy", "hosts": hosts})
    assert all(error in message for _, message in raised.value.errors.values())


def _warm(rank: int, ranks: int) -> str:
    """From shard to hierarchy by a saved state: what ranks remembered by themselves is spent."""
    torch.manual_seed(0)
    ends = {}
    for exchange in ("shard", "hierarchy"):
        ddp = DDP(small_model())
        options = {"hosts": [[0, 1], [2, 3]]} if exchange == "hierarchy" else {}
        state = gradcomm.register(
            ddp, "onebit", warmup_steps=0, min_numel=100, exchange=exchange, **options
        )
        if exchange == "hierarchy":
            state.load_state_dict(ends["shard"])
        ddp(torch.randn(16, 40)).square().mean().backward()
        ends[exchange] = state.state_dict()
        state.close()
    assert ends["shard"][f"rank {rank}"]["memory"]["residual"]
    assert not ends["hierarchy"][f"rank {rank}"]["memory"].get("residual")
    grads = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    return digest(grads)


def test_takes_over_what_ranks_remember(ranks: Ranks) -> None:
    assert len(set(ranks.run(_warm, 4))) == 1


def _again(rank: int, ranks: int) -> set[str]:
    digests = set()
    for _ in range(3):
        digests.add(
            train_registered(rank, ranks, "onebit", {"exchange": "hierarchy", "hosts": HOSTS[0]})[0]
        )
    return digests


def test_may_be_closed_and_registered_again(ranks: Ranks) -> None:
    digests = ranks.run(_again, 4)
    assert len(digests[0]) == 1 and all(d == digests[0] for d in digests)
