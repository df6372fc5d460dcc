"""Trains a small language model on two ranks of this machine, once with each codec, and compares:
python -m bench.demo --codecs none onebit topk:density=0.01 --steps 400
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from typing import Any

CODECS = ("none", "fp16", "int8", "int4", "onebit", "topk:density=0.01", "powersgd:rank=4")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from bench.train import Settings

    default = {f.name: f.default for f in dataclasses.fields(Settings)}
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--codecs", nargs="+", action="extend", metavar="CODEC", help=f"default: {' '.join(CODECS)}")
    add("--steps", type=_positive, default=default["steps"])
    add("--ranks", type=_positive, default=2)
    add("--batch", type=_positive, default=default["batch"], help="windows a rank and step")
    add("--context", type=_positive, default=default["context"], help="bytes in a window")
    add("--width", type=_positive, default=default["width"])
    add("--depth", type=_positive, default=default["depth"])
    add("--optimizer", choices=("adamw", "sgd"), default=default["optimizer"])
    add("--lr", type=float, help="default: 1e-3 for adamw, 0.3 for sgd with momentum 0.9")
    add("--seed", type=int, default=default["seed"])
    add("--clip", type=float, default=default["clip"], metavar="NORM",
        help="clip of the gradient's norm: before the memory where the codec has one,\n"
             "else after the exchange; 0: none")  # fmt: skip
    add("--no-recipe", dest="recipe", action="store_false",
        help="compress everything from step 0 with error feedback and no clipping:\n"
             "shows what the recipes are for")  # fmt: skip
    add("--momentum-correction", action="store_true",
        help="codecs with a memory get the momentum in place of the optimizer")  # fmt: skip
    add("--plain", nargs="+", action="extend", metavar="NAME",
        help="parameters that go plain besides those of the recipe (fnmatch patterns)")  # fmt: skip
    add("--text", metavar="FILE", help="text to train on; default: Python's standard library")
    add("--json", type=pathlib.Path, default=pathlib.Path("demo.json"))
    add("--png", type=pathlib.Path, default=pathlib.Path("demo.png"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = arguments(argv)
    # One thread a rank: more would fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A polite kill unwinds too, so that the ranks end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from rich.console import Console

    from bench import report
    from bench.ranks import RankError
    from bench.train import Settings
    from gradcomm import __version__, ops
    from gradcomm.codec import parse

    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)
              if hasattr(options, f.name)}  # fmt: skip
    fields["codecs"] = tuple(dict.fromkeys(options.codecs or CODECS))
    fields["plain"] = tuple(options.plain or ())
    settings = Settings(**fields)
    console = Console()
    try:
        for codec in settings.codecs:
            parse(codec)
        if settings.text is not None:
            pathlib.Path(settings.text).stat()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    console.print(
        f"gradcomm {__version__}, kernels: {ops.cpu_executor()}, {options.ranks} Gloo ranks of one "
        f"thread, {settings.optimizer}, {settings.steps} steps"
    )
    try:
        results, parameters = _run(settings, options.ranks, console)
    except RankError as error:
        console.print(f"The demo has ended: {error}", style="red", markup=False, highlight=False)
        return 1
    if console.is_terminal:
        console.print(report.table(results))
    else:
        # Not cut to the 80 columns that a pipe is taken for.
        Console(width=140).print(report.table(results))
    about = {**dataclasses.asdict(settings), "ranks": options.ranks, "parameters": parameters,
             "kernels": ops.cpu_executor(), "version": __version__}  # fmt: skip
    report.write(options.json, about, results)
    report.plot(results, options.png)
    console.print(f"Curves: {options.png}   everything: {options.json}", highlight=False)
    return 0 if all(r["identical"] for r in results) else 1


def _run(settings: Any, ranks: int, console: Any) -> tuple[list[dict[str, Any]], int]:
    """The results of all codecs, and the model's number of parameters; bars meanwhile."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from bench.ranks import run
    from bench.train import work

    results: list[dict[str, Any]] = []
    parameters = 0
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with contextlib.closing(run(work, ranks, settings)) as events, bars:
        tasks = [bars.add_task(c, start=False, total=settings.steps, loss="") for c in settings.codecs]
        for event in events:
            if event[0] == "model":
                parameters = event[1]
                if not results:
                    console.print(f"model of {parameters / 1e6:.2f} M parameters")
            elif event[0] == "step":
                _, index, step, loss = event
                if step == 1:
                    bars.start_task(tasks[index])
                bars.update(tasks[index], completed=step, loss=f"{loss:.3f}")
            elif event[0] == "result":
                results.append(event[1])
                if not console.is_terminal:
                    loss, ms = event[1]["loss"], event[1]["step_ms"]
                    console.print(f"{event[1]['codec']}: held-out loss {loss:.3f}, {ms:.0f} ms a step")
    return results, parameters


if __name__ == "__main__":
    sys.exit(main())
