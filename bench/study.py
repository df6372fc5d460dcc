"""What ``bench.accuracy`` compares: tasks, recommended settings, and what was tried besides."""

from __future__ import annotations

import dataclasses
from typing import Any

BASELINE = "fp16"

#: Steps and optimizer by task; all else is what the demo uses. ``batch`` is of two ranks' each: more
#: ranks share the same work.
TASKS: dict[str, dict[str, Any]] = {
    "bytes-adamw": {"task": "bytes", "steps": 2000, "width": 128, "batch": 4},
    "bytes-sgd": {"task": "bytes", "steps": 2000, "width": 128, "batch": 4, "optimizer": "sgd"},
    "mnist1d": {"task": "mnist1d", "steps": 3000, "optimizer": "sgd", "lr": 0.05, "min_numel": 1024},
    "convex": {"task": "convex", "steps": 500, "optimizer": "sgd", "lr": 2.0, "clip": 0.0},
}


@dataclasses.dataclass(frozen=True)
class Study:
    """``entries``, as ``bench.entry`` reads them, against the baseline on one task. ``steps``: None for
    the task's own."""

    kind: str
    task: str
    entries: tuple[str, ...]
    ranks: int = 2
    seeds: int = 3
    steps: int | None = None

    def title(self) -> str:
        return f"{self.task}, {self.kind}"

    def settings(self) -> dict[str, Any]:
        """Of ``bench.train.Settings``, but for codecs and seed."""
        fixed = dict(TASKS[self.task])
        if "batch" in fixed:
            fixed["batch"] = max(1, fixed["batch"] * 2 // self.ranks)
        if self.steps is not None:
            fixed["steps"] = self.steps
        return fixed


RECOMMENDED = "recommended"
ADAM = ("int8", "int4", "onebit:refresh=16,normalize=True momentum=0.9", "topk", "powersgd:rank=4")
SGD = ("int8", "int4", "onebit momentum=0.9", "topk momentum=0.9", "powersgd:rank=4 momentum=0.9")

STUDIES = (
    Study(RECOMMENDED, "bytes-adamw", ADAM),
    Study(RECOMMENDED, "bytes-sgd", SGD),
    Study(RECOMMENDED, "mnist1d", SGD),
    Study(RECOMMENDED, "convex", SGD),
)
