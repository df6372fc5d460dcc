"""Registering: ranks agree, bad input is told clearly, both ways of registering are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm

from .models import small_model, train, train_registered
from .ranks import Ranks


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
    same = ranks.run(train_registered, 2, "powersgd:rank=2", {"warmup_steps": 1})
    assert same[0][0] == results[0][0]


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
        ("('codec', 'threebit')", "ValueError", "unknown codec 'threebit'; use one of none"),
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
