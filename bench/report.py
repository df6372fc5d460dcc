"""The demo's table, plot and JSON."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from rich.table import Table

from bench.train import PHASES


def baseline(results: list[dict[str, Any]]) -> float | None:
    """The held-out loss of the plain run, if there was one."""
    return next((r["loss"] for r in results if r["codec"] == "none"), None)


def table(results: list[dict[str, Any]]) -> Table:
    """One row a codec."""
    plain = baseline(results)
    made = Table(
        caption="Bytes and times are of the compressed steps. Encode, wire and decode run beside "
        "backward; compute is the rest of a step, without the wait for them. Wire on one machine is "
        "memory and waiting for the other rank, not a network.",
        caption_justify="left",
    )
    made.add_column("codec")
    columns = ("held-out loss", "to plain", "sent / step", "ratio", "ms / step", "compute", *PHASES)
    for name in columns:
        made.add_column(name, justify="right")
    made.add_column("ranks", justify="center")
    for r in results:
        compared = plain is not None and r["codec"] != "none"
        change = f"{100 * (r['loss'] / plain - 1):+.1f} %" if compared else ""
        made.add_row(
            r["codec"],
            f"{r['loss']:.3f}",
            change,
            size(r["bytes_per_step"]),
            f"{r['ratio']:.1f}",
            f"{r['step_ms']:.1f}",
            f"{r['step_ms'] - r['wait_ms']:.1f}",
            *(f"{r[f'{phase}_ms']:.1f}" for phase in PHASES),
            "identical" if r["identical"] else "[red]DIFFER[/red]",
        )
    return made


def size(count: float) -> str:
    """``1.2 MB``, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def plot(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Held-out loss against steps, and against bytes sent by a rank."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for r in results:
        losses = [point["loss"] for point in r["curve"]]
        by_step.plot([point["step"] for point in r["curve"]], losses, label=r["codec"])
        # The first point has sent nothing, which a logarithm cannot show.
        sent = [(p["bytes_sent"] / 1e6, p["loss"]) for p in r["curve"] if p["bytes_sent"]]
        by_bytes.plot(*zip(*sent, strict=True), marker=".", label=r["codec"])
    by_step.set(xlabel="step", ylabel="held-out loss, nats a byte")
    by_bytes.set(xlabel="MB sent by a rank, with the plain first steps", xscale="log")
    lowest = min(r["loss"] for r in results)
    by_step.set_ylim(lowest - 0.1, max(lowest + 1.0, max(r["loss"] for r in results) + 0.1))
    by_step.legend(fontsize="small")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(path: pathlib.Path, settings: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Everything that was measured."""
    path.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
