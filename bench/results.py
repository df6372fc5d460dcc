"""docs/results.md: measures what is asked for and writes the page from what lies in bench/results.

    python -m bench.results [--measure link scale accuracy] [--page-only]

``make results`` measures everything, which takes hours; the page alone is made from the JSON files.
Every figure on it is read from them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

from bench.accuracy import change_of, summary
from bench.link_report import PHASES_MS
from bench.namespaces import Link
from bench.report import size
from bench.study import STUDIES

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"
PLOT = ROOT / "docs" / "link.png"

COMMANDS: dict[str, list[str]] = {
    "link": [
        *("bench/link.py", "--mbit", "10", "100", "1000", "0", "--millions", "5", "25", "100"),
        *("--plot", str(PLOT.relative_to(ROOT))),
    ],
    "scale": ["bench/scale.py"],
    "accuracy": ["-m", "bench.accuracy"],
}

#: 25 M parameters, 2 ranks: link → method → how many times as fast as plain, at least.
TOPK = "topk:density=0.004,ramp_steps=0"
FASTER: dict[float | None, dict[str, float]] = {
    100: {"onebit": 14, TOPK: 20, "powersgd:rank=4": 16, "int8": 3.5, "int4": 6.5}
}
STRONG = ("onebit", "topk:density=0.01,ramp_steps=0", TOPK, "powersgd:rank=4")
FLOOR, PLAIN, TORCH_POWERSGD, TORCH_FP16 = "no wire (floor)", "plain", "torch powersgd r1", "torch fp16"


def load(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def about(data: dict[str, Any]) -> str:
    m = data["machine"]
    return f"{data['date']}, {m['cpu']}, {m['cores']} cores, torch {m['torch']}, kernels {m['isa']}."


def lines_of(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, all columns but the first to the right."""
    return [
        f"| {' | '.join(columns)} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _prose(text: str) -> list[str]:
    return [*textwrap.wrap(" ".join(text.split()), 107), ""]


def links(data: dict[str, Any]) -> list[str]:
    """Step times, by model and link; then where no codec pays."""
    lines = ["## Step time by link", "", about(data), ""]
    lines += _prose(
        """Medians of the slowest rank's step; two ranks, one core each, eight linear layers, batch 8.
        Ratios are to plain DDP of the same run. Bytes are counted by the hosts' network interfaces.
        Encode, wire and decode, in ms of a step, run beside backward, wire twice at a time; wait is what
        was not hidden. Those of `twobit` include its first 16 steps, all in 8 bits.
        `python bench/link.py` makes it."""
    )
    lines += ["![step time against link rate](link.png)", ""]
    groups: dict[tuple[float, float | None], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault((row["millions"], row["mbit"]), []).append(row)
    losers = []
    for (millions, mbit), rows in groups.items():
        ms = {row["method"]: row["ms"] for row in rows}
        name = Link(mbit, rows[0]["delay_ms"]).name()
        lines += [f"### {millions:g} M parameters, {name}", ""]
        cells = [
            [
                f"`{row['method']}`",
                f"{row['ms']:.0f}",
                f"{ms[PLAIN] / row['ms']:.2f}",
                f"{row['ms'] / ms[FLOOR]:.2f}",
                "" if row["bytes_per_step"] is None else size(row["bytes_per_step"]),
                *(f"{row[p]:.0f}" if p in row else "" for p in PHASES_MS),
            ]
            for row in rows
        ]
        columns = ["method", "ms a step", "faster than plain", "of the floor", "sent"]
        lines += lines_of([*columns, "encode", "wire", "decode", "wait"], cells)
        slow = [m for m, t in ms.items() if t > ms[PLAIN] and m not in (PLAIN, FLOOR)]
        if slow:
            losers.append(f"* {millions:g} M parameters, {name}: {', '.join(f'`{m}`' for m in slow)}")
    lines += ["## Where compression does not pay", ""]
    lines += ["Slower than plain DDP in this run:", "", *losers, ""] if losers else ["Nowhere here.", ""]
    return lines + targets(groups)


def targets(groups: dict[tuple[float, float | None], list[dict[str, Any]]]) -> list[str]:
    """What the project asks of 25 M parameters, beside what was seen."""
    rows = []

    def check(link: str, what: str, asked: str, seen: float, good: bool) -> None:
        rows.append([link, what, asked, f"{seen:.2f}", "yes" if good else "**no**"])

    for mbit in (100, 1000, None):
        ms = {row["method"]: row["ms"] for row in groups.get((25, mbit), [])}
        if not ms:
            continue
        name = Link(mbit).name()
        ours = {m: t for m, t in ms.items() if m not in (FLOOR, PLAIN) and not m.startswith("torch")}
        for method, factor in FASTER.get(mbit, {}).items():
            seen = ms[PLAIN] / ms[method]
            check(name, f"`{method}`, times as fast as plain", f"≥ {factor:g}", seen, seen >= factor)
        best = min(ours.values())
        if mbit == 100:
            check(name, "best codec, of the floor", "≤ 1.5", best / ms[FLOOR], best <= 1.5 * ms[FLOOR])
        if mbit == 1000:
            for m in STRONG:
                check(name, f"`{m}`, of the floor", "≤ 1.5", ms[m] / ms[FLOOR], ms[m] <= 1.5 * ms[FLOOR])
                seen = ms[TORCH_POWERSGD] / ms[m]
                check(name, f"`{m}`, times as fast as torch's PowerSGD", "≥ 1.5", seen, seen >= 1.5)
        if mbit is None:
            check(name, "best codec, of plain", "≤ 1", best / ms[PLAIN], best <= ms[PLAIN])
            seen = ms["fp16"] / ms[TORCH_FP16]
            check(name, "`fp16`, of torch's fp16 hook", "≤ 1.5", seen, seen <= 1.5)
    if not rows:
        return []
    lines = ["## Targets", "", "25 M parameters, 2 ranks.", ""]
    return lines + lines_of(["link", "what", "asked", "seen", "met"], rows)


def scale(data: dict[str, Any]) -> list[str]:
    lines = ["## Bytes by number of ranks", "", about(data), ""]
    ranks = sorted({row["ranks"] for row in data["rows"]})
    lines += _prose(
        f"""What a rank sends in one exchange of {data["millions"]:g} M float32. Counted bytes equal the
        formulas to the byte unless marked; interface bytes (protocol included) are in
        bench/results/scale.json. By hierarchy, of hosts of two ranks, what goes to other hosts.
        `python bench/scale.py` makes it."""
    )
    by_case: dict[tuple[str, str], dict[int, str]] = {}
    for row in data["rows"]:
        shown = size(row["counted"] if row["between"] is None else row["between"])
        shown += "" if row["counted"] == row["formula"] else " (**not the formula**)"
        by_case.setdefault((row["exchange"], row["codec"]), {})[row["ranks"]] = shown
    cells = [
        [f"{how}, `{codec}`", *(c.get(r, "") for r in ranks)] for (how, codec), c in by_case.items()
    ]
    return lines + lines_of(["exchange, codec", *(f"{r} ranks" for r in ranks)], cells)


def accuracy(data: dict[str, Any]) -> list[str]:
    lines = ["## Does it still learn", "", about(data), ""]
    lines += _prose(
        """Hyperparameters, batches and first weights of the 16-bit baseline. A codec holds when its mean
        is within 0.5 % of the baseline's, or within one standard deviation of it over seeds. "to 16
        bits" compares runs of one seed. "steps" and "bytes" are what it takes to come within 1 % of the
        baseline's end, as a share of the baseline's. With `momentum=0.9` the hook has the momentum,
        before the codec, and the optimizer none (`betas=(0, …)`). `python -m bench.accuracy` makes
        it."""
    )
    for study in STUDIES:
        try:
            rows = summary(study, data["runs"])
        except KeyError:
            lines += [f"### {study.title()}, {study.ranks} ranks", "", "Not measured yet.", ""]
            continue
        seeds = rows[0]["seeds"]
        count = "1 seed" if seeds == 1 else f"{seeds} seeds"
        count += f" of {study.seeds}" if seeds < study.seeds else ""
        told = f"{rows[0]['measure']}, {study.ranks} ranks, {count}, {study.settings()['steps']} steps"
        lines += [f"### {study.title()}: {told}", ""]
        cells = []
        for r in rows:
            mean = f"{r['mean']:.4g}"
            cells.append(
                [
                    f"`{r['codec']}`",
                    mean if r["sd"] is None else f"{mean} ± {r['sd']:.2g}",
                    change_of(r),
                    *("" if r[k] is None else f"{r[k]:.2f}" for k in ("steps_share", "bytes_share")),
                    f"{r['ratio']:.1f}",
                    "yes" if r["holds"] else "**no**",
                ]
            )
        lines += lines_of(
            ["codec", "mean ± sd", "to 16 bits", "steps", "bytes", "ratio", "holds"], cells
        )
    return lines


SECTIONS = {"link": links, "scale": scale, "accuracy": accuracy}


def page() -> str:
    lines = ["# Results", "", "Made by `make results`; every figure is read from bench/results.", ""]
    for name, section in SECTIONS.items():
        data = load(name)
        lines += [f"`{name}` has not been measured yet.", ""] if data is None else section(data)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.results", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--measure", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    PAGE.parent.mkdir(exist_ok=True)
    for name in () if options.page_only else options.measure:
        command = [sys.executable, *COMMANDS[name], "--json", str(RESULTS / f"{name}.json")]
        subprocess.run(command, cwd=ROOT, check=True)
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
