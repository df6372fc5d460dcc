"""What ``bench.accuracy`` compares: tasks, recommended settings, and what was tried besides."""

from __future__ import annotations

import dataclasses
from typing import Any

BASELINE = "fp16"

#: Steps and optimizer by task; all else is what the demo uses. Rates are those at which 16 bits do best
#: after 1,000 steps, of 1, 2, 3, 4e-3 (within 1 %) and of 0.15, 0.3, 0.6: at too low a rate every
#: codec looks good. ``batch`` is of two ranks' each: more ranks share the same work.
TASKS: dict[str, dict[str, Any]] = {
    "bytes-adamw": {"task": "bytes", "steps": 2000, "width": 128, "batch": 4, "lr": 2e-3},
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


ADAM = ("int8", "int4", "twobit", "onebit:refresh=16,normalize=True", "powersgd:rank=8")
SGD = (
    "int8",
    "int4",
    "twobit",
    "twobit momentum=0.9",
    "onebit momentum=0.9",
    "powersgd:rank=8 momentum=0.9",
)
TOPK = "topk:density=0.1,values=int8"

#: What is needed first comes first.
STUDIES = (
    Study("recommended", "bytes-adamw", ADAM),
    Study("recommended", "bytes-sgd", SGD),
    Study("recommended", "mnist1d", SGD),
    Study("recommended", "convex", SGD),
    Study(
        "also tried",
        "bytes-adamw",
        (
            "int2",
            "int4 error_feedback=False",
            "int4 exchange='shard'",
            "int4 exchange='shard' error_feedback='worker'",
            "twobit error_feedback=True",
            "twobit:refresh=0,normalize=False",
            "onebit",
            "onebit error_feedback=False",
            "onebit:refresh=16,normalize=True error_feedback=False",
            "onebit:refresh=16,normalize=True 90%>int8",
            "onebit:refresh=4,normalize=True",
            TOPK,
            "topk",
            "topk:refresh=16,normalize=True",
            "powersgd:rank=4",
        ),
        seeds=1,
        steps=1000,
    ),
    Study(
        "also tried",
        "bytes-sgd",
        (
            "int4 momentum=0.9",
            "int4 error_feedback=False",
            "twobit error_feedback=True",
            "twobit:refresh=0,normalize=False",
            "twobit:refresh=0,normalize=False momentum=0.9",
            "onebit",
            "onebit error_feedback=False",
            "onebit:refresh=16,normalize=True momentum=0.9",
            f"{TOPK} momentum=0.9",
            "topk momentum=0.9",
            "powersgd:rank=4 momentum=0.9",
        ),
        seeds=1,
        steps=1000,
    ),
    *(
        Study("more ranks", "bytes-adamw", ("int8", "int4", "twobit"), ranks, 1, 1000)
        for ranks in (4, 8)
    ),
)
