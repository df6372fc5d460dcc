"""Saved states: written, read back, fitted to this run, and averaged for another number of ranks.

What has to be kept then is what is still owed to the parameters, the mean of the residuals: the mean
over ranks of e, plus the owners' residuals, which are of the mean already.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomm.codec.check import require
from gradcomm.form import FORMAT, REMEDY, check_body, checked

#: By slot and by parameter name: flat float32.
Slots = dict[str, dict[str, Tensor]]


#: What is still to be sent: by this rank of its own, and of means.
_OWED = ("residual", "owner", "host")
#: Slots of which each rank has its own; all others are the same on every rank.
_OF_A_RANK = ("residual", "owner", "host", "momentum")


@dataclasses.dataclass
class Saved:
    """What one rank shall take. ``exact``: it is this rank's own. ``whole``: no rank's is missing."""

    body: dict[str, Any]
    exact: bool
    whole: bool
    ranks: int


def entry(name: str, tensor: Tensor, plain: bool) -> list[Any]:
    """A parameter as a checkpoint tells it from others: name, shape, dtype, strides, plain."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    return [name, list(tensor.shape), str(tensor.dtype), strides, plain]


def pack(rank: int, ranks: int, memory: Slots, **fields: Any) -> dict[str, Any]:
    """A rank's state. ``fields``: the others of a body."""
    tensors = sorted([slot, name] for slot, held in memory.items() for name in held)
    body = {**fields, "tensors": tensors, "memory": memory}
    return {"format": FORMAT, "ranks": ranks, key_of_rank(rank): body}


def key_of_rank(rank: int) -> str:
    return f"rank {rank}"


def merge_states(states: Iterable[Any]) -> dict[str, Any]:
    """One state for any number of ranks, from those of all ranks of a run, in any order.

    Every rank that loads it begins with the mean over the old ranks of residuals, momentum and running
    norm. Raises ValueError when a rank's state is missing, malformed, or of another step, codec or model
    than the others'.
    """
    value = _joined(states)
    body = _mean(_all_ranks(value))
    return {"format": FORMAT, "ranks": value["ranks"], "mean": body}


def read(value: Any, rank: int, ranks: int) -> Saved:
    """Checks the form of a state, or of a list of all ranks' states, and picks what a rank shall take.

    Raises ValueError or TypeError for anything that ``state_dict`` did not write.
    """
    value = _joined(value) if isinstance(value, list | tuple) else checked(value)
    if "mean" in value:
        return Saved(check_body(value["mean"], "the mean"), False, True, value["ranks"])
    if value["ranks"] == ranks and key_of_rank(rank) in value:
        return Saved(check_body(value[key_of_rank(rank)], key_of_rank(rank)), True, True, ranks)
    present = [r for r in range(value["ranks"]) if key_of_rank(r) in value]
    if len(present) == value["ranks"]:
        return Saved(_mean(_all_ranks(value)), False, True, value["ranks"])
    require(bool(present), f"the state holds no rank's part; {REMEDY}")
    body = check_body(value[key_of_rank(present[0])], key_of_rank(present[0]))
    return Saved(body, False, False, value["ranks"])


def fit(
    saved: Saved,
    ranks: int,
    options: dict[str, Any],
    parameters: list[list[Any]],
    sizes: dict[str, dict[str, int]],
    strict: bool,
) -> tuple[Slots, list[str]]:
    """What this run can take of the slots, and what it cannot, in words.

    ``sizes``: the slots that this run has, by parameter, and their element counts. Raises ValueError
    when ``strict`` and anything differs.
    """
    body = saved.body
    differences = [
        f"{name} is {body['options'].get(name)!r} in the checkpoint, {mine!r} here"
        for name, mine in options.items()
        if body["options"].get(name) != mine
    ]
    theirs, mine = ({p[0]: p for p in entries} for entries in (body["parameters"], parameters))
    differences += [f"{n!r} is in the checkpoint, not in this model" for n in theirs if n not in mine]
    differences += [f"{n!r} is in this model, not in the checkpoint" for n in mine if n not in theirs]
    changed = {n for n in theirs if n in mine and theirs[n] != mine[n]}
    differences += [
        f"{n!r} (shape, dtype, strides, plain) is {tuple(theirs[n][1:])} in the checkpoint, "
        f"{tuple(mine[n][1:])} here"
        for n in theirs
        if n in changed
    ]
    if not saved.whole:
        differences.append(
            f"it is of {saved.ranks} ranks, of which some are missing; this run has {ranks}"
        )
    shown = "; ".join(differences[:4]) + (
        f"; and {len(differences) - 4} more" if differences[4:] else ""
    )
    require(
        not differences or not strict,
        f"the state does not fit: {shown}; "
        + (REMEDY if not saved.whole else "strict=False drops what does not fit and says what"),
    )
    owed = {p[0]: math.prod(p[1]) for p in parameters}
    other_codec = body["options"].get("codec") != options["codec"]
    slots: Slots = {}
    dropped: list[str] = []
    for slot, held in body["memory"].items():
        wanted = sizes.get(slot, {})
        if slot in _OWED:  # another exchange may keep it elsewhere, but will spend it
            wanted = owed if body["progress"]["flush"] else sizes.get("residual", sizes.get("owner", {}))
        for name, tensor in held.items():
            # Another codec may have the elements in another order, but not of a row-major parameter.
            moved = other_codec and slot != "momentum" and name in mine and not _row_major(mine[name])
            fits = (
                name in wanted and tensor.numel() == wanted[name] and name not in changed and not moved
            )
            if fits and (saved.whole or slot not in _OF_A_RANK):
                # A slot of the codec's own that is all zero was not begun: it shall begin here too.
                if slot in _OF_A_RANK or bool(tensor.any()):
                    slots.setdefault(slot, {})[name] = tensor
            else:
                require(
                    not strict,
                    f"the {slot} of {name!r} has {tensor.numel()} elements; this run has "
                    f"{wanted.get(name, 'no such slot')}",
                )
                dropped.append(f"dropped the {slot} of {name!r}")
    missing = [
        f"the {slot} of {name!r} is missing"
        for slot, wanted in sizes.items()
        for name in wanted
        if slot not in _OWED and name in theirs and name not in body["memory"].get(slot, {})
    ]
    require(not strict or not missing, f"the state is incomplete: {'; '.join(missing[:4])}; {REMEDY}")
    return slots, differences + dropped


def _row_major(p: Sequence[Any]) -> bool:
    sizes = [size for size in p[1] if size != 1]
    return list(p[3]) == [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _joined(states: Iterable[Any]) -> dict[str, Any]:
    """States of several ranks as one."""
    joined: dict[str, Any] = {}
    for state in states:
        checked(state)
        require(
            joined.get("ranks", state["ranks"]) == state["ranks"],
            f"states of {joined.get('ranks')} and of {state['ranks']} ranks are not of one run",
        )
        twice = [k for k in state if k in joined and k not in ("format", "ranks")]
        require(not twice, f"two states are both of {', '.join(map(str, twice))}; give each rank's once")
        joined |= state
    require(bool(joined), "no states; give those of all ranks")
    return joined


def _all_ranks(value: dict[str, Any]) -> list[dict[str, Any]]:
    keys = [key_of_rank(r) for r in range(value["ranks"])]
    missing = [key for key in keys if key not in value]
    require(not missing, f"the states of {value['ranks']} ranks are needed; missing: {missing[:8]}")
    bodies = [check_body(value[key], key) for key in keys]
    for key, body in zip(keys, bodies, strict=True):
        for field in ("progress", "options", "parameters"):
            require(
                body[field] == bodies[0][field],
                f"{key} and rank 0 were not saved together: "
                f"{_first_difference(body[field], bodies[0][field])}",
            )
    return bodies


def _first_difference(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = list(a.items()), list(b.items())
    for x, y in zip(a, b, strict=False):
        if x != y:
            return f"{x!r:.200} against {y!r:.200}"
    return f"{len(a)} entries against {len(b)}"


def _mean(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """What a rank of a run with any number of ranks shall begin with."""
    first = bodies[0]
    memory: Slots = {}
    for name in {n: None for slot in _OWED for n in first["memory"].get(slot, {})}:
        memory.setdefault("residual", {})[name] = _owed(bodies, name)
    for slot, held in first["memory"].items():
        if slot in _OWED:
            continue
        averaged = slot in _OF_A_RANK
        memory[slot] = {n: _average(bodies, slot, n) if averaged else t for n, t in held.items()}
    means = [body["clip"]["mean"] for body in bodies if body["clip"]["mean"] is not None]
    clip: dict[str, Any] = {"mean": sum(means) / len(means) if means else None, "squares": []}
    tensors = sorted([slot, name] for slot, held in memory.items() for name in held)
    return {**first, "tensors": tensors, "memory": memory, "clip": clip, "buckets": []}


def _average(bodies: list[dict[str, Any]], slot: str, name: str) -> Tensor:
    total = torch.zeros_like(bodies[0]["memory"][slot][name], dtype=torch.float64)
    for body in bodies:
        _add(total, body["memory"].get(slot, {}).get(name), 1 / len(bodies), name)
    return total.float()


def _owed(bodies: list[dict[str, Any]], name: str) -> Tensor:
    """The mean over ranks of what is still to be sent. A residual of a mean of s ranks is worth s of one
    rank's own."""
    memory = bodies[0]["memory"]
    like = next(memory[slot][name] for slot in _OWED if name in memory.get(slot, {}))
    total = torch.zeros_like(like, dtype=torch.float64)
    for body in bodies:
        for slot in _OWED:
            if name in body["memory"].get(slot, {}):
                share = 1 if slot == "residual" else body["shares"][slot]
                _add(total, body["memory"][slot][name], share / len(bodies), name)
    return total.float()


def _add(total: Tensor, mine: Tensor | None, weight: float, name: str) -> None:
    require(
        mine is not None and mine.numel() == total.numel(),
        f"what the ranks hold of {name!r} is not of one size; they were not saved together",
    )
    assert mine is not None
    total.add_(mine, alpha=weight)
