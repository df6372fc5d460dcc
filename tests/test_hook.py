"""The hook over real Gloo ranks: every rank ends with the same bits, whatever the codec."""

from __future__ import annotations

import time
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .ranks import RankError, Ranks

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


def _train_registered(
    rank: int, ranks: int, codec: str, options: dict[str, Any]
) -> tuple[str, float, Any]:
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(ddp, codec, min_numel=100, **options)
    result = train(ddp, rank)
    stats = state.stats()
    state.close()
    return *result, stats


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_ranks_end_with_the_same_bits(ranks: Ranks, codec: str, world: int) -> None:
    results = ranks.run(_train_registered, world, codec, {"warmup_steps": 2})
    assert len({r[0] for r in results}) == 1
    assert all(r[2]["steps"] == 6 for r in results)


def _plain_against_ddp(rank: int, ranks: int) -> bool:
    plain = train(DDP(small_model()), rank)
    ddp = DDP(small_model())
    state = gradcomm.register(ddp, "none")
    hooked = train(ddp, rank)
    state.close()
    return plain == hooked


@pytest.mark.parametrize("world", [2, 3])
def test_none_is_what_ddp_does_bit_for_bit(ranks: Ranks, world: int) -> None:
    assert all(ranks.run(_plain_against_ddp, world))


def _lane_error(rank: int, ranks: int) -> tuple[str, str]:
    ddp = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(ddp, "onebit", warmup_steps=0)

    def broken(*args: Any) -> None:
        raise ArithmeticError("a fault put in by the test")

    state._memory.flat = broken  # type: ignore[method-assign]
    try:
        train(ddp, rank, steps=1)
    except gradcomm.LaneError as error:
        return str(error), "".join(traceback.format_exception(error))
    finally:
        state.close()
    return "", ""


def test_error_in_the_lane_reaches_backward_with_its_traceback(ranks: Ranks) -> None:
    for message, trace in ranks.run(_lane_error, 2):
        assert "step 0, bucket 0" in message and "a fault put in by the test" in message
        assert "in broken" in trace and "ArithmeticError" in trace


def _disagree(rank: int, ranks: int, which: str) -> str:
    ddp = DDP(small_model())
    options: dict[str, Any] = {"codec": "onebit", "warmup_steps": 3}
    if rank == 1:
        options[which] = {"codec": "none", "warmup_steps": 4}[which]
    try:
        gradcomm.register(ddp, options.pop("codec"), **options)
    except gradcomm.DisagreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("which", ["codec", "warmup_steps"])
def test_disagreement_is_told_on_every_rank(ranks: Ranks, which: str) -> None:
    for message in ranks.run(_disagree, 2, which):
        assert "rank 1 and rank 0 disagree on " + which in message


def _torch_way(rank: int, ranks: int) -> tuple[str, float]:
    ddp = DDP(small_model())
    state = gradcomm.CommState(gradcomm.PowerSGD(rank=2), warmup_steps=1, min_numel=100)
    ddp.register_comm_hook(state, gradcomm.comm_hook)
    result = train(ddp, rank)
    assert state.stats()["sent_by_codec"]["powersgd"] > 0
    state.close()
    return result


def test_registered_as_torch_does(ranks: Ranks) -> None:
    results = ranks.run(_torch_way, 2)
    assert results[0][0] == results[1][0]
    same = ranks.run(_train_registered, 2, "powersgd:rank=2", {"warmup_steps": 1})
    assert same[0][0] == results[0][0]


def _momentum(rank: int, ranks: int, codec: str) -> tuple[float, str]:
    """How far training with momentum correction is from the optimizer's own momentum."""
    ends = []
    for corrected in (False, True):
        ddp = DDP(small_model(), bucket_cap_mb=0.03)
        state = gradcomm.register(
            ddp,
            codec if corrected else "none",
            momentum=0.9 if corrected else 0.0,
            warmup_steps=3,
            min_numel=100,
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.0 if corrected else 0.9)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8):
            optimizer.zero_grad()
            ddp(torch.randn(16, 40, generator=generator)).square().mean().backward()
            optimizer.step()
        state.close()
        ends.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    start = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    return float((ends[1] - ends[0]).norm() / (ends[0] - start).norm()), digest(ends[1])


@pytest.mark.parametrize(
    ("codec", "far"), [("none", 1e-5), ("int8", 0.01), ("topk:density=0.5", 0.4), ("powersgd", 0.3)]
)
def test_momentum_correction_is_the_optimizers_momentum(ranks: Ranks, codec: str, far: float) -> None:
    results = ranks.run(_momentum, 2, codec)
    assert results[0][1] == results[1][1]
    for distance, _ in results:
        assert distance < far


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


def _bad(rank: int, ranks: int, case: str) -> tuple[str, str]:
    model: Any = DDP(small_model())
    arguments: dict[str, Any] = {"codec": "onebit"}
    if case == "twice":
        gradcomm.register(model, "none")
    elif case == "not ddp":
        model = small_model()
    elif case == "group":
        group = dist.new_group([0])
        if rank == 0:
            return "ValueError", "not in process_group"
        arguments["process_group"] = group
    elif case == "plain":
        arguments["plain"] = ["no.such.weight"]
    else:
        key, value = eval(case)
        arguments[key] = value
    try:
        gradcomm.register(model, arguments.pop("codec"), **arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("twice", "ValueError", "has a communication hook already"),
        ("not ddp", "TypeError", "Sequential is not a DistributedDataParallel model"),
        ("group", "ValueError", "not in process_group"),
        ("plain", "ValueError", "no.such.weight"),
        ("('codec', 'twobit')", "ValueError", "unknown codec 'twobit'; use one of none"),
        ("('codec', 'onebit:blok=3')", "ValueError", "unknown option 'blok=3'; onebit takes block=…"),
        ("('codec', 'onebit:block=100')", "ValueError", "block=100; use a multiple of 128"),
        ("('codec', 3)", "TypeError", "codec=3; give a codec"),
        ("('warmup_steps', -1)", "ValueError", "warmup_steps=-1"),
        ("('momentum', 1.0)", "ValueError", "momentum=1.0"),
        ("('clip_norm', 0)", "ValueError", "clip_norm=0"),
        ("('exchange', 'ring')", "ValueError", "exchange='ring' is unknown"),
        ("('exchange', 'reduce')", "ValueError", "exchange='reduce' cannot carry onebit"),
    ],
)
def test_bad_input_is_told_clearly(ranks: Ranks, case: str, kind: str, says: str) -> None:
    for found_kind, message in ranks.run(_bad, 2, case):
        assert found_kind == kind and says in message


def test_a_hang_is_a_failure_with_stacks(ranks: Ranks) -> None:
    with pytest.raises(TimeoutError, match="_hangs"):
        ranks.run(_hangs, 2, timeout=3)
    with pytest.raises(RankError, match="on purpose"):
        ranks.run(_raises, 2)


def _hangs(rank: int, ranks: int) -> None:
    time.sleep(60)


def _raises(rank: int, ranks: int) -> None:
    raise ValueError("on purpose")


def _auto(rank: int, ranks: int) -> tuple[str, str]:
    ddp = DDP(small_model())
    state = gradcomm.register(ddp, "auto", min_numel=100)
    digest_, _ = train(ddp, rank)
    assert state.stats()["steps"] == 6
    state.close()
    return state.codec.spec(), digest_


@pytest.mark.parametrize("world", [1, 2, 3])
def test_auto_chooses_alike_on_every_rank(ranks: Ranks, world: int) -> None:
    results = ranks.run(_auto, world)
    assert len(set(results)) == 1
    assert results[0][0] in {c.spec() for c in gradcomm.auto.CANDIDATES}
