"""Changing course in mid-training: another codec, flush, schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest

from .ranks import Ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 16, 3, padding=1).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 32))


def grads(ddp: DDP, rank: int, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By parameter: the hook's mean, and the exact one, after a step on this rank's data."""
    x = torch.randn(4, 8, 2, 2, generator=torch.Generator().manual_seed(100 * rank + step))
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    plain = model()
    plain.load_state_dict(ddp.module.state_dict())
    plain(x).square().mean().backward()
    sent, exact = {}, {}
    for (name, p), q in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        sent[name], exact[name] = p.grad.clone(), q.grad / dist.get_world_size()
        dist.all_reduce(exact[name])
    return sent, exact


def _courses(rank: int, ranks: int, courses: list[list[str]], exchange: str) -> dict[str, Any]:
    """By course: what is lost of any parameter when a codec follows another every two steps and a flush
    ends it; the residuals' norm after each codec; a hash of all that was sent."""
    results = {}
    for course in courses:
        ddp = DDP(model(), bucket_cap_mb=0.01)

        def by(codec: str) -> str | None:
            return None if codec.split(":")[0] in ("none", "powersgd") else exchange

        state = gradcomm.register(
            ddp, course[0], warmup_steps=0, min_numel=16, clip_norm=None, exchange=by(course[0])
        )
        sums: dict[str, list[Tensor]] = {}
        step, norms = 0, []
        for index, codec in enumerate([*course, "flush"]):
            if codec == "flush":
                state.flush()
            elif index:
                state.set_codec(codec, exchange=by(codec))
            for _ in range(1 if codec == "flush" else 2):
                sent, exact = grads(ddp, rank, step)
                for name in sent:
                    both = sums.setdefault(name, [torch.zeros(()), torch.zeros(())])
                    both[0], both[1] = both[0] + sent[name], both[1] + exact[name]
                step += 1
            norms.append(state.stats()["residual_norm"])
        assert state.step == step
        body = state.state_dict()[f"rank {rank}"]["memory"]
        assert not any(t.any() for slot in ("residual", "owner") for t in body.get(slot, {}).values())
        state.close()
        lost = max(float((s - e).norm() / e.norm()) for s, e in sums.values())
        results[" ".join(course)] = (
            lost,
            norms,
            digest(torch.cat([s.flatten() for s, _ in sums.values()])),
        )
    return results


COURSES = [
    ["onebit", "topk:density=0.1"],
    ["onebit", "powersgd:rank=2,start_step=0,min_compression_rate=1.2", "int4"],
    ["topk:density=0.1", "int8"],  # no error feedback: flushed
    ["powersgd:rank=2,start_step=0,min_compression_rate=1.2", "none", "onebit"],
    ["int4", "powersgd:rank=2,start_step=0"],  # which takes fewer parameters
    ["topk:density=0.1,select=exact", "topk:density=0.02"],
]


@pytest.mark.parametrize(("world", "exchange"), [(2, "gather"), (3, "shard")])
def test_nothing_is_lost_by_a_change_and_nothing_is_left_after_a_flush(
    ranks: Ranks, world: int, exchange: str
) -> None:
    results = ranks.run(_courses, world, COURSES, exchange)
    for course, (lost, norms, _) in results[0].items():
        # int8 forgets its own rounding error; all else that is sent late is sent
        assert lost < (5e-3 if "int8" in course else 2e-5), course
        assert norms[0] > 0 and norms[-1] == 0
    assert len({str({c: r[2] for c, r in result.items()}) for result in results}) == 1


SCHEDULE = {0: "none", 2: "topk:density=0.2,ramp_steps=2", 4: "powersgd:rank=2"}


def _scheduled(rank: int, ranks: int) -> list[tuple[str, list[str]]]:
    """The same course by schedule and by hand."""
    ends = []
    for by_hand in (False, True):
        ddp = DDP(model())
        state = gradcomm.register(ddp, SCHEDULE[0] if by_hand else SCHEDULE, min_numel=16)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        used = []
        for step in range(6):
            if by_hand and step in SCHEDULE and step:
                state.set_codec(SCHEDULE[step])
            x = torch.randn(4, 8, 2, 2, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            used.append(state.codec.name)
        state.close()
        ends.append((digest(torch.cat([p.detach().flatten() for p in ddp.parameters()])), used))
    return ends


def test_a_schedule_is_the_codecs_set_at_its_steps(ranks: Ranks) -> None:
    results = ranks.run(_scheduled, 2)
    assert results[0] == results[1]
    scheduled, by_hand = results[0]
    assert scheduled == by_hand
    assert scheduled[1] == ["none"] * 2 + ["topk"] * 2 + ["powersgd"] * 2


def _wrong(rank: int, ranks: int) -> list[tuple[str, str]]:
    ddp = DDP(model())
    state = gradcomm.register(ddp, "onebit", min_numel=16)
    grads(ddp, rank, 0)
    other = "topk" if rank == 1 else "int4"
    half = "onebit:block=3" if rank == 1 else "int4"

    def late() -> None:
        state._step += rank  # rank 1 believes that it is a step further
        try:
            state.flush()
        finally:
            state._step -= rank

    errors = []
    for call in (
        lambda: state.set_codec(other),
        lambda: state.set_codec(half),
        lambda: state.set_codec("threebit"),
        late,
        lambda: gradcomm.CommState({1: "none"}),
        lambda: gradcomm.CommState({0: "auto", 5: "none"}),
        lambda: gradcomm.CommState({0: "none", -1: "none"}),
        lambda: gradcomm.CommState("none").flush(),
        lambda: gradcomm.CommState({0: "int8", 5: "powersgd"}, exchange="gather"),
    ):
        try:
            call()
            errors.append(("", ""))
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    assert state.codec.name == "onebit"
    grads(ddp, rank, 1)  # and training goes on
    state.close()
    return errors


def test_a_bad_change_is_told_on_every_rank_and_changes_nothing(ranks: Ranks) -> None:
    first, second = ranks.run(_wrong, 2)
    disagreed = ("DisagreementError", "rank 1 and rank 0 disagree on codec: 'topk:")
    for errors in (first, second):
        assert errors[0][0] == disagreed[0] and disagreed[1] in errors[0][1]
        assert errors[2][0] == "ValueError" and "unknown codec 'threebit'" in errors[2][1]
        assert errors[3][0] == "DisagreementError" and "on step: 2 against 1" in errors[3][1]
        assert "add 0: 'none'" in errors[4][1] and "auto cannot" in errors[5][1]
        assert "-1 is no step" in errors[6][1] and errors[7][0] == "RuntimeError"
        assert "cannot carry powersgd" in errors[8][1]
    assert first[1][0] == "DisagreementError" and "rank 1 cannot set_codec" in first[1][1]
    assert second[1][0] == "ValueError" and "multiple of 128" in second[1][1]
