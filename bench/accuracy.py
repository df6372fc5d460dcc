"""Does it still learn? Every codec in its recommended setting beside 16 bits, over several seeds.

    python -m bench.accuracy [--tasks bytes-adamw bytes-sgd mnist1d convex] [--codecs fp16 int8 …]
                             [--seeds 3] [--ranks 2] [--steps N] [--no-feedback] [--json FILE]

The baseline is ``fp16``, with the same optimizer, rate, batches and first weights. "to fp16" compares
runs of the same seed, mean ± standard deviation over seeds. A codec holds when its mean is within 0.5 %
of the baseline's, or within one standard deviation of the baseline over seeds; else its row is marked.
"steps" and "bytes" are what it takes, as a share of the baseline's, until a run comes within 1 % of the
baseline's last value of that seed (blank: not reached by every seed).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import statistics
import sys
from typing import Any

from bench import machine
from bench.ranks import run
from bench.train import Settings, work

BASELINE = "fp16"
CODECS = ("int8", "int4", "onebit", "topk:density=0.01", "powersgd:rank=4")
NEAR = 0.01  # of the baseline's last value: where steps and bytes are read off

#: Steps and optimizer by task; all else is what the demo uses.
TASKS: dict[str, dict[str, Any]] = {
    "bytes-adamw": {"task": "bytes", "steps": 2000, "width": 128, "batch": 4},
    "bytes-sgd": {"task": "bytes", "steps": 2000, "width": 128, "batch": 4, "optimizer": "sgd"},
    "mnist1d": {"task": "mnist1d", "steps": 3000, "optimizer": "sgd", "lr": 0.05, "min_numel": 1024},
    "convex": {"task": "convex", "steps": 500, "optimizer": "sgd", "lr": 2.0, "clip": 0.0},
}


def measure(settings: Settings, ranks: int) -> list[dict[str, Any]]:
    """The results of all codecs for one task and seed."""
    results = []
    with contextlib.closing(run(work, ranks, settings)) as events:
        for event in events:
            if event[0] == "result":
                results.append(event[1])
                print(f"  {event[1]['codec']:24} {event[1]['loss']:.4g}", file=sys.stderr, flush=True)
    return results


def reached(result: dict[str, Any], target: float, of: str) -> float | None:
    """Steps or bytes until the curve first meets the target."""
    return next((float(p[of]) for p in result["curve"] if p["loss"] <= target), None)


def summary(by_seed: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each codec, over seeds; the baseline is the first of each seed's results."""
    rows = []
    bases = [results[0] for results in by_seed]
    ends = [base["loss"] for base in bases]
    spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
    for runs in zip(*by_seed, strict=True):
        losses = [r["loss"] for r in runs]
        changes = [100 * (r["loss"] / base["loss"] - 1) for r, base in zip(runs, bases, strict=True)]
        row: dict[str, Any] = {"codec": runs[0]["codec"], "measure": runs[0]["measure"]}
        row |= {"mean": statistics.fmean(losses), "change_percent": statistics.fmean(changes)}
        row["sd"] = statistics.stdev(losses) if len(losses) > 1 else None
        row["change_sd"] = statistics.stdev(changes) if len(changes) > 1 else None
        row["ratio"] = runs[0]["ratio"]
        row["recipe"] = runs[0]["recipe"]
        row["identical"] = all(r["identical"] for r in runs)
        off = row["mean"] - statistics.fmean(ends)
        row["holds"] = off <= max(0.005 * statistics.fmean(ends), spread)
        for of, name in (("step", "steps_share"), ("bytes_sent", "bytes_share")):
            shares = []
            for r, base in zip(runs, bases, strict=True):
                target = base["loss"] * (1 + NEAR)
                mine, theirs = reached(r, target, of), reached(base, target, of)
                shares.append(mine / theirs if mine is not None and theirs else None)
            known = [s for s in shares if s is not None]
            row[name] = statistics.fmean(known) if len(known) == len(shares) else None
        rows.append(row)
    return rows


def table(task: str, rows: list[dict[str, Any]], seeds: int, ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    made = Table(title=f"{task}: {rows[0]['measure']}, {ranks} ranks, {seeds} seeds")
    for column in ("codec", "mean ± sd", f"to {BASELINE}", "steps", "bytes", "ratio", "holds"):
        made.add_column(column, justify="left" if column == "codec" else "right")

    def spread(value: float | None, digits: str) -> str:
        return "" if value is None else f" ± {value:{digits}}"

    for row in rows:
        made.add_row(
            row["codec"],
            f"{row['mean']:.4g}{spread(row['sd'], '.2g')}",
            f"{row['change_percent']:+.1f}{spread(row['change_sd'], '.1f')} %",
            *("" if row[k] is None else f"{row[k]:.2f}" for k in ("steps_share", "bytes_share")),
            f"{row['ratio']:.1f}",
            "yes" if row["holds"] else "[red]no[/red]",
        )
    Console(width=110).print(made)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: by task")
    parser.add_argument("--no-feedback", action="store_true", help="without error feedback")
    parser.add_argument("--momentum-correction", action="store_true", help="in place of the optimizer's")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    made: list[dict[str, Any]] = []
    for task in options.tasks:
        fixed = dict(TASKS[task])
        if options.steps is not None:
            fixed["steps"] = options.steps
        by_seed = []
        for seed in range(options.seeds):
            print(f"{task}, seed {seed}", file=sys.stderr)
            codecs = (BASELINE, *(c for c in options.codecs if c != BASELINE))
            settings = Settings(
                codecs=codecs,
                seed=seed,
                evaluations=20,
                error_feedback=not options.no_feedback,
                momentum_correction=options.momentum_correction,
                **fixed,
            )
            by_seed.append(measure(settings, options.ranks))
        rows = summary(by_seed)
        table(task, rows, options.seeds, options.ranks)
        about = {"task": task, "ranks": options.ranks, "seeds": options.seeds, **fixed}
        made.append({**about, "feedback": not options.no_feedback, "rows": rows})
    if options.json is not None:
        settings_of = {"date": datetime.date.today().isoformat(), "machine": machine.describe()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**settings_of, "tasks": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
