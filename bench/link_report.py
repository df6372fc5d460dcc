"""The table, plot and JSON of ``link.py``."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.namespaces import Link
from bench.report import size

PHASES_MS = ("encode_ms", "wire_ms", "decode_ms", "wait_ms")


def table(rows: list[dict[str, Any]]) -> None:
    """One link and one model: ``rows`` of ``link.measure``."""
    first = rows[0]
    title = f"{_link(first)}, {first['millions']:g} M parameters, {first['ranks']} ranks"
    made = Table(
        title=title, caption="encode, wire and decode run beside backward; wait is what was not hidden"
    )
    made.add_column("method")
    columns = (
        "ms a step",
        "faster than plain",
        "of the floor",
        "sent",
        "encode",
        "wire",
        "decode",
        "wait",
    )
    for column in columns:
        made.add_column(column, justify="right")
    by_method = {row["method"]: row["ms"] for row in rows}
    plain, floor = by_method.get("plain"), by_method.get("no wire (floor)")
    for row in rows:
        sent = row["bytes_per_step"]
        made.add_row(
            row["method"],
            f"{row['ms']:.1f}",
            "" if plain is None else f"{plain / row['ms']:.2f}",
            "" if floor is None else f"{row['ms'] / floor:.2f}",
            "" if sent is None else size(sent),
            *(
                f"{row[f'{p}_ms']:.1f}" if f"{p}_ms" in row else ""
                for p in ("encode", "wire", "decode", "wait")
            ),
        )
    Console(width=120).print(made)


def _link(row: dict[str, Any]) -> str:
    return Link(row["mbit"], row["delay_ms"]).name() + (" (loopback)" if row["loopback"] else "")


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Everything that was measured, with the day and the machine."""
    settings = {"date": datetime.date.today().isoformat(), "machine": machine.describe()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")


def plot(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Step time against link rate, a panel for each model; unshaped at the right end."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot as plt

    models = sorted({row["millions"] for row in rows})
    figure, panels = plt.subplots(1, len(models), figsize=(5.5 * len(models) + 2.6, 4.8), squeeze=False)
    rates = sorted({row["mbit"] or float("inf") for row in rows})
    for axes, millions in zip(panels[0], models, strict=True):
        axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)  # there are more methods than ten
        mine = [row for row in rows if row["millions"] == millions]
        for method in dict.fromkeys(row["method"] for row in mine):
            points = {row["mbit"] or float("inf"): row["ms"] for row in mine if row["method"] == method}
            known = [r for r in rates if r in points]
            style = "--" if method.startswith(("plain", "torch")) else "-"
            style = ":" if "floor" in method else style
            axes.plot(
                [rates.index(r) for r in known],
                [points[r] for r in known],
                style,
                marker=".",
                label=method,
            )
        labels = ["unshaped" if r == float("inf") else f"{r:g}" for r in rates]
        axes.set_xticks(range(len(rates)), labels)
        axes.set(title=f"{millions:g} M parameters", xlabel="Mbit/s", ylabel="ms a step", yscale="log")
        axes.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="center right", handlelength=3)
    figure.tight_layout(rect=(0, 0, 1 - 2.6 / figure.get_figwidth(), 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
