"""``torch.distributed.checkpoint`` and another number of ranks.

A ``CommState`` is a ``Stateful``: ``dcp.save`` and ``dcp.load`` take it as it is when as many ranks load
it as saved it. Among others load with this planner, which has every rank read what all of them saved:

    dcp.load({"gradcomm": state}, checkpoint_id=path, planner=gradcomm.dcp.LoadPlanner())

The planner also reads what is no tensor without executing pickled code, which torch's own does not.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

_Path = tuple[Any, ...]


class LoadPlanner(DefaultLoadPlanner):
    """``DefaultLoadPlanner``, and gradcomm's states from any number of ranks. Arguments are its own."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is not None:
            for path, state in _states(state_dict, ()):
                _ask_for_all(state, path, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def _states(value: dict[str, Any], path: _Path) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """The states of gradcomm in a dict of dicts, each with its path."""
    if {"format", "ranks"} <= value.keys() and any(map(_of_a_rank, value)):
        yield path, value
        return
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _states(inner, (*path, key))


def _ask_for_all(state: dict[str, Any], path: _Path, metadata: Metadata) -> None:
    """Makes a state name what the checkpoint holds of it: of this rank, or of all where it was saved by
    another number of ranks."""
    names: dict[str, _Path] = metadata.planner_data or {}
    inside = {name: p for name, p in names.items() if p[: len(path)] == path and len(p) > len(path)}
    saved_by = {p[len(path)] for p in inside.values() if _of_a_rank(p[len(path)])}
    mine = {key for key in state if _of_a_rank(key)}
    if not saved_by:
        return  # the planner will say what is missing
    others = saved_by - mine if len(saved_by) == state["ranks"] else set()
    state.clear()
    for name, full in inside.items():
        if full[len(path)] in others:
            continue
        stored = metadata.state_dict_metadata[name]
        level = state
        for key in full[len(path) : -1]:
            level = level.setdefault(key, {})
        level[full[-1]] = None
        if isinstance(stored, TensorStorageMetadata):
            level[full[-1]] = torch.empty(stored.size, dtype=stored.properties.dtype)


def _of_a_rank(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("rank ")
