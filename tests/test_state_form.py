"""Whatever is given to ``load_state_dict``: it fits, or a clear error, and nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.checkpoint import merge_states

from .ranks import Ranks

NAN, INF = float("nan"), float("inf")


def trained(codec: str = "onebit", extra: int = 0, **options: Any) -> tuple[DDP, gradcomm.CommState]:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*[nn.Linear(16, 16 + extra), nn.Linear(16 + extra, 16)]))
    state = gradcomm.register(ddp, codec, warmup_steps=0, min_numel=16, momentum=0.5, **options)
    for _ in range(2):
        ddp(torch.randn(4, 16)).square().mean().backward()
    return ddp, state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _set(state: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    """A copy with one thing changed; ``...`` takes it away."""
    changed = copy.deepcopy(state)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


R = "rank 0"
RESIDUAL = [R, "memory", "residual", "0.weight"]
#: What is changed, to what, and a word of the error.
WRONG: list[tuple[list[Any], Any, str]] = [
    (["format"], ..., "not what state_dict() returned"),
    (["format"], 99, "format 99"),
    (["format"], "0.1", "format='0.1'"),
    (["ranks"], -1, "ranks=-1"),
    (["ranks"], 2, "2 ranks"),
    ([R], ..., "no rank's part"),
    ([R], [1], "not a dict"),
    ([R, "progress"], ..., "progress"),
    ([R, "progress", "step"], -3, "step=-3"),
    ([R, "progress", "step"], 1 << 70, "is no step"),
    ([R, "progress", "since"], True, "since=True"),
    ([R, "progress", "scale"], NAN, "scale=nan"),
    ([R, "progress", "seed"], "x", "seed='x'"),
    (
        [R, "options", "codec"],
        "int4",
        "codec is 'int4' in the checkpoint, 'onebit:block=512,refresh=0,normalize=False' here",
    ),
    ([R, "options", "error_feedback"], False, "error_feedback is False"),
    ([R, "parameters", 0, 0], "new.weight", "none of its parameters"),
    ([R, "parameters", 0, 1], [4, 64], "'0.weight' (shape"),
    ([R, "parameters", 0, 2], "torch.bfloat16", "bfloat16"),
    ([R, "parameters", 0, 4], True, "plain"),
    ([R, "parameters"], [], "is no parameter"),
    ([R, "buckets", 0], [0, 0], "comes twice"),
    ([R, "buckets", 0], [99], "99"),
    ([R, "clip", "mean"], -1.0, "mean"),
    ([R, "clip", "squares"], [INF], "inf"),
    ([R, "memory"], {}, "loaded in full"),
    (RESIDUAL, ..., "loaded in full"),
    (RESIDUAL, torch.full((256,), NAN), "not finite"),
    (RESIDUAL, torch.zeros(3), "3 elements"),
    (RESIDUAL, torch.zeros(16, 16), "no flat float32"),
    (RESIDUAL, torch.zeros(256, dtype=torch.float64), "no flat float32"),
    (RESIDUAL, [0.0] * 256, "no flat float32"),
    ([R, "memory", "more"], {"0.weight": torch.zeros(2)}, "were saved"),
]


def _refused(rank: int, ranks: int) -> list[str]:
    """The messages; the state must not have changed."""
    _, state = trained()
    good = state.state_dict()
    messages = []
    for path, value, _ in WRONG:
        try:
            state.load_state_dict(_set(good, path, value))
            messages.append("")
        except (ValueError, TypeError) as error:
            messages.append(str(error))
        assert same(state.state_dict(), good)
    assert state.load_state_dict(good) == []
    state.close()
    return messages


def test_a_state_that_does_not_fit_is_refused(ranks: Ranks) -> None:
    (messages,) = ranks.run(_refused, 1)
    for (path, value, says), message in zip(WRONG, messages, strict=True):
        assert says in message and message.startswith("gradcomm: "), (path, value, message)


#: What may stand anywhere in a damaged state.
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(
        [
            torch.zeros(0),
            torch.tensor(NAN),
            torch.ones(256),
            torch.full((256,), INF),
            torch.zeros(16, dtype=torch.int64),
            torch.empty(16, device="meta"),
            torch.eye(16).to_sparse(),
            torch.zeros(256, dtype=torch.complex64),
        ]
    ),
)


def _mutated(data: st.DataObject, value: Any, depth: int = 0) -> Any:
    """Something near a state: at a random place, another value, one less or one more."""
    inner = value if isinstance(value, dict | list) else None
    if not inner or depth > 6 or data.draw(st.integers(0, 9)) == 0:
        return data.draw(JUNK)
    copied: Any = copy.copy(inner)
    key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
    what = data.draw(st.sampled_from(["deeper", "deeper", "deeper", "less", "more"]))
    if what == "less":
        del copied[key]
    elif what == "more" and isinstance(inner, dict):
        copied[data.draw(st.one_of(st.text(max_size=6), st.integers(), st.just("mean")))] = data.draw(
            JUNK
        )
    elif what == "more":
        copied.append(data.draw(JUNK))
    else:
        copied[key] = _mutated(data, inner[key], depth + 1)
    return copied


def _fuzzed(rank: int, ranks: int, examples: int) -> tuple[int, int]:
    """How many damaged states were refused and taken."""
    ddp, state = trained("powersgd:rank=2,min_compression_rate=1.0")
    good = state.state_dict()
    counts = [0, 0]

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        damaged = good
        for _ in range(data.draw(st.integers(1, 3))):
            damaged = _mutated(data, damaged)
        strict = data.draw(st.booleans())
        if data.draw(st.integers(0, 4)) == 0:
            damaged = [damaged]
        before = state.state_dict()
        try:
            state.load_state_dict(damaged, strict=strict)
        except (ValueError, TypeError):
            counts[0] += 1
            assert same(state.state_dict(), before)
            return
        counts[1] += 1
        taken = state.state_dict()
        assert state.load_state_dict(taken) == []
        assert all(torch.isfinite(t).all() for s in taken[R]["memory"].values() for t in s.values())

    fuzz()
    state.load_state_dict(good)
    ddp(torch.randn(4, 16)).square().mean().backward()
    state.close()
    return counts[0], counts[1]


def test_damaged_states_end_in_a_value_error_and_nothing_else(
    ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    examples = 250_000 if request.config.getoption("--long") else 400
    ((refused, taken),) = ranks.run(_fuzzed, 1, examples, timeout=3600)
    assert refused > examples / 3 and taken > 10


def _dropped(rank: int, ranks: int) -> tuple[list[str], list[str], list[str]]:
    """What was dropped: for another codec, another model, and for one of two ranks' states."""
    _, saved = trained()
    state = saved.state_dict()
    saved.close()
    _, other = trained("powersgd:rank=2,min_compression_rate=1.0")
    codec = other.load_state_dict(state, strict=False)
    assert other.step == 2
    kept = other.state_dict()[R]["memory"]["residual"]["0.weight"]
    assert torch.equal(kept, state[R]["memory"]["residual"]["0.weight"])
    other.close()
    _, wider = trained(extra=16)
    model = wider.load_state_dict(state, strict=False)
    assert not wider.state_dict()[R]["memory"]["residual"]["0.weight"].any()
    wider.close()
    _, alone = trained()
    half = alone.load_state_dict({"format": 1, "ranks": 2, "rank 1": state[R]}, strict=False)
    assert not alone.state_dict()[R]["memory"]["residual"]["0.weight"].any()
    alone.close()
    return codec, model, half


def test_what_does_not_fit_is_dropped_and_told(ranks: Ranks) -> None:
    ((codec, model, half),) = ranks.run(_dropped, 1)
    assert codec[0].startswith("codec is 'onebit")
    assert any("'0.weight' (shape" in line for line in model)
    assert (
        "dropped the residual of '0.weight'" in model and "dropped the residual of '1.weight'" in model
    )
    assert "some are missing" in half[0] and "dropped the residual of '0.weight'" in half


def _merging(rank: int, ranks: int) -> list[str]:
    _, state = trained()
    good = state.state_dict()
    state.close()
    one = {**good, "ranks": 2}
    two = {"format": 1, "ranks": 2, "rank 1": copy.deepcopy(good[R])}
    messages = []
    for states in (
        [],
        [one],
        [one, one],
        [one, {**two, "ranks": 3}],
        [one, _set(two, ["rank 1", "progress", "step"], 7)],
        [one, _set(two, ["rank 1", "options", "codec"], "none")],
    ):
        with pytest.raises(ValueError) as caught:
            merge_states(states)
        messages.append(str(caught.value))
    merged = merge_states([two, one])
    residual = merged["mean"]["memory"]["residual"]["0.weight"]
    assert torch.equal(residual, good[R]["memory"]["residual"]["0.weight"])
    assert merged["mean"]["clip"]["mean"] == good[R]["clip"]["mean"]
    return messages


def test_merging_needs_every_rank_once_and_of_one_run(ranks: Ranks) -> None:
    (messages,) = ranks.run(_merging, 1)
    said = ["no states", "missing: ['rank 1']", "rank 0", "2 and of 3", "'step', 7", "'codec', 'none'"]
    for says, message in zip(said, messages, strict=True):
        assert says in message


def _another_step(rank: int, ranks: int, late: int) -> tuple[str, str]:
    ddp, state = trained("powersgd:rank=2,min_compression_rate=1.0")
    early = state.state_dict()
    ddp(torch.randn(4, 16)).sum().backward()
    later = state.state_dict()
    state.load_state_dict(later if rank == late else early)
    try:
        ddp(torch.randn(4, 16)).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        state.close()
    return "", ""


def test_a_rank_that_loads_another_step_is_found_out(ranks: Ranks) -> None:
    for kind, message in ranks.run(_another_step, 3, 2):
        assert kind == "DisagreementError"
        assert "rank 2 and rank 0 disagree on step: 3 against 2" in message
