"""Does it still learn? Every codec in its recommended setting beside 16 bits, over several seeds.

    python -m bench.accuracy [--json FILE] [--fresh]                  # all that docs/results.md shows
    python -m bench.accuracy --tasks bytes-adamw --codecs int8 "onebit momentum=0.9" [--seeds 3]
                             [--ranks 2] [--steps N] [--json FILE]    # what you ask for

The baseline is ``fp16``, with the same optimizer, rate, batches and first weights. Entries are written
as ``bench.entry`` says. "to fp16" compares runs of the same seed, mean ± standard deviation over seeds.
A codec holds when its mean is within 0.5 % of the baseline's, or within one standard deviation of the
baseline over seeds; else its row is marked. "steps" and "bytes" are what it takes, as a share of the
baseline's, until a run comes within 1 % of the baseline's last value of that seed (blank: not reached by
every seed).

Runs are written to the JSON file as they end, and those that are there already are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
from typing import Any

from bench import machine
from bench.entry import read
from bench.ranks import run
from bench.study import BASELINE, STUDIES, TASKS, Study
from bench.train import Settings, work

NEAR = 0.01  # of the baseline's last value: where steps and bytes are read off
DIGITS = 6


def measure(study: Study, made: list[dict[str, Any]], save: Any) -> None:
    """Makes the runs of a study that are not in ``made`` yet, and adds them."""
    fixed = study.settings()
    for seed in range(study.seeds):
        about = {"task": study.task, "ranks": study.ranks, "seed": seed, "steps": fixed["steps"]}
        have = {r["codec"] for r in made if about.items() <= r.items()}
        missing = tuple(c for c in (BASELINE, *study.entries) if c not in have)
        if not missing:
            continue
        print(", ".join(f"{k} {v}" for k, v in about.items()), file=sys.stderr)
        settings = Settings(codecs=missing, seed=seed, evaluations=20, **fixed)
        with contextlib.closing(run(work, study.ranks, settings)) as events:
            for event in events:
                if event[0] == "result":
                    made.append({**about, **_kept(event[1])})
                    save()
                    print(
                        f"  {event[1]['codec']:40} {event[1]['loss']:.4g}", file=sys.stderr, flush=True
                    )


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    """Of a run: what the page is made of."""
    curve = [[p["step"], float(f"{p['loss']:.{DIGITS}g}"), p["bytes_sent"]] for p in result["curve"]]
    names = ("codec", "recipe", "measure", "loss", "identical", "ratio")
    return {**{k: result[k] for k in names}, "curve": curve}


def _reached(run: dict[str, Any], target: float, of: int) -> float | None:
    """Steps (0) or bytes (2) until the curve first meets the target."""
    return next((float(point[of]) for point in run["curve"] if point[1] <= target), None)


def summary(study: Study, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for the baseline and each entry of the study, over the seeds that all of them have run with.
    Raises KeyError when there is none."""
    steps = study.settings()["steps"]
    found = {
        (r["codec"], r["seed"]): r
        for r in runs
        if (r["task"], r["ranks"], r["steps"]) == (study.task, study.ranks, steps)
    }
    entries = tuple(dict.fromkeys((BASELINE, *study.entries)))
    seeds = [s for s in range(study.seeds) if all((entry, s) in found for entry in entries)]
    if not seeds:
        raise KeyError(f"{study.title()}: no seed is complete")
    bases = [found[BASELINE, seed] for seed in seeds]
    ends = [base["loss"] for base in bases]
    spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
    rows = []
    for entry in entries:
        mine = [found[entry, seed] for seed in seeds]
        losses = [r["loss"] for r in mine]
        changes = [100 * (r["loss"] / base["loss"] - 1) for r, base in zip(mine, bases, strict=True)]
        row: dict[str, Any] = {"codec": entry, "measure": mine[0]["measure"], "seeds": len(seeds)}
        row |= {"mean": statistics.fmean(losses), "change_percent": statistics.fmean(changes)}
        row["sd"] = statistics.stdev(losses) if len(losses) > 1 else None
        row["change_sd"] = statistics.stdev(changes) if len(changes) > 1 else None
        row["ratio"], row["recipe"] = mine[0]["ratio"], mine[0]["recipe"]
        row["identical"] = all(r["identical"] for r in mine)
        off = row["mean"] - statistics.fmean(ends)
        row["holds"] = off <= max(0.005 * statistics.fmean(ends), spread)
        for of, name in ((0, "steps_share"), (2, "bytes_share")):
            shares = []
            for r, base in zip(mine, bases, strict=True):
                target = base["loss"] * (1 + NEAR)
                ours, theirs = _reached(r, target, of), _reached(base, target, of)
                shares.append(ours / theirs if ours is not None and theirs else None)
            known = [s for s in shares if s is not None]
            row[name] = statistics.fmean(known) if len(known) == len(shares) else None
        rows.append(row)
    return rows


def change_of(row: dict[str, Any]) -> str:
    """A row's change from the baseline: in percent or, where that says little, times as much."""
    if row["change_percent"] > 1000:
        return f"{1 + row['change_percent'] / 100:.3g} times"
    spread = "" if row["change_sd"] is None else f" ± {row['change_sd']:.1f}"
    return f"{row['change_percent']:+.1f}{spread} %"


def table(study: Study, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    made = Table(
        title=f"{study.title()}: {rows[0]['measure']}, {study.ranks} ranks, {study.seeds} seeds"
    )
    for column in ("codec", "mean ± sd", f"to {BASELINE}", "steps", "bytes", "ratio", "holds"):
        made.add_column(column, justify="left" if column == "codec" else "right")

    for row in rows:
        made.add_row(
            row["codec"],
            f"{row['mean']:.4g}" + ("" if row["sd"] is None else f" ± {row['sd']:.2g}"),
            change_of(row),
            *("" if row[k] is None else f"{row[k]:.2f}" for k in ("steps_share", "bytes_share")),
            f"{row['ratio']:.1f}",
            "yes" if row["holds"] else "[red]no[/red]",
        )
    Console(width=130).print(made)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--codecs", nargs="+", help="these, in place of what the page shows")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: by task")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--fresh", action="store_true", help="make runs again that the file has")
    options = parser.parse_args(argv)
    for entry in options.codecs or ():
        try:
            read(entry, 1000)
        except (ValueError, SyntaxError) as error:
            parser.error(str(error))
    return options


def main(argv: list[str] | None = None) -> None:
    options = _arguments(argv)
    if options.codecs is None:
        studies = [study for study in STUDIES if study.task in options.tasks]
    else:
        entries = tuple(options.codecs)
        studies = [
            Study("asked for", task, entries, options.ranks, options.seeds) for task in options.tasks
        ]
    if options.steps is not None:
        studies = [dataclasses.replace(study, steps=options.steps) for study in studies]
    about = {"date": datetime.date.today().isoformat(), "machine": machine.describe()}
    runs: list[dict[str, Any]] = []
    file = options.json
    if file is not None and file.exists() and not options.fresh:
        runs = json.loads(file.read_text())["runs"]

    def save() -> None:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(r) for r in runs)
            file.write_text(f'{json.dumps(about)[:-1]}, "runs": [\n{lines}\n]}}\n')

    for study in studies:
        measure(study, runs, save)
    for study in studies:
        table(study, summary(study, runs))


if __name__ == "__main__":
    main()
