"""Step time on links of a given rate: codecs beside plain DDP, torch's own hooks, and no wire at all.

    python bench/link.py [--mbit 100 1000 0] [--millions 25] [--ranks 2] [--delay-ms 0] [--seconds 8]
                         [--methods plain onebit …] [--json FILE] [--plot FILE]

Hosts are network namespaces, one a rank, each with a link of the rate (0: as fast as the machine copies)
to a switch, in both directions. That needs root; without it the ranks run on loopback, unshaped, and the
table says so. The model is eight linear layers, batch 8, SGD, one thread a rank. A figure is the median
step of the slowest rank, after the first two. Bytes are those of the host's network interface, protocol
headers and acknowledgements included, so they hold for torch's hooks as well.

Recipes' plain first steps are left out: this measures the codec, not the warm-up. Where every 16th step
is another (``refresh``), a figure is of 16 steps. Links that the JSON file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench import namespaces  # noqa: E402
from bench.link_methods import METHODS  # noqa: E402
from bench.namespaces import Link  # noqa: E402

LAYERS, BATCH = 8, 8
FIRST = 2  # steps that connect, lay out buckets and fill buffers
SLOW = 15.0  # seconds: one such step is enough


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: a row for each method, the same on all ranks but for bytes."""
    import torch
    import torch.distributed as dist
    from torch import nn

    namespaces.init_rank(arguments, arguments.ranks)
    width = round((arguments.millions[0] * 1e6 / LAYERS) ** 0.5)
    rows = []
    for method in arguments.methods:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        for parameter in model.parameters():  # keeps activations, and so gradients, at one scale
            nn.init.orthogonal_(parameter)
        inputs = torch.randn(BATCH, width) + 0.1 * arguments.rank
        run = METHODS[method](model)
        ddp, period = run.ddp, run.period
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        times: list[float] = []
        first = FIRST if period == 1 else period
        steps, before = first + 1, 0
        while len(times) < steps:
            if len(times) == first:
                before = namespaces.bytes_sent() or 0
            start = time.perf_counter()
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times.append(float(spent))
            # All ranks know the same times, so they agree.
            if len(times) == first + 1 and steps == first + 1:
                least = 1 if times[0] > SLOW else 3
                steps = first + max(least, min(arguments.most_steps, int(arguments.seconds / times[-1])))
                steps = first + math.ceil((steps - first) / period) * period
        measured = times[first:]
        # A period as a whole: the median of steps that are alike, weighed by how many there are.
        alike = [statistics.median(measured[i::period]) for i in range(period)]
        rare, usual = alike[:1], alike[1:]
        ms = 1e3 * (
            statistics.fmean([*rare, *[statistics.median(usual)] * len(usual)]) if usual else rare[0]
        )
        row: dict[str, Any] = {"method": method, "ms": ms}
        row["fastest_ms"], row["slowest_ms"] = 1e3 * min(measured), 1e3 * max(measured)
        row["steps"] = len(measured)
        sent = namespaces.bytes_sent()
        row["bytes_per_step"] = None if sent is None else (sent - before) / len(measured)
        row |= run.stats()
        rows.append(row)
        if arguments.rank == 0:
            print(f"  {method:22} {row['ms']:9.1f} ms", file=sys.stderr, flush=True)
        del run, ddp, model, optimizer
        dist.barrier()
    dist.destroy_process_group()
    return rows


def start(link: Link, millions: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """``measure`` on ranks that are hosts with such a link, or on loopback where none can be made."""
    why = namespaces.missing(link)
    seconds = 4 * millions * 8 / link.mbit if link.mbit else 0.0  # plain, by its bytes alone
    if seconds > arguments.longest:
        print(
            f"{link.name()}, {millions:g} M parameters: left out, since a plain step takes "
            f"{seconds:.0f} s (--longest)",
            file=sys.stderr,
        )
        return []
    if why is not None and (link.mbit is not None or link.delay_ms):
        print(f"no link of {link.name()}: {why}", file=sys.stderr)
        return []
    if why is not None:
        print(f"unshaped, on loopback: {why}", file=sys.stderr)
    print(f"{link.name()}, {millions:g} M parameters, {arguments.ranks} ranks", file=sys.stderr)
    command = ["--ranks", str(arguments.ranks), "--millions", str(millions)]
    command += ["--seconds", str(arguments.seconds), "--most-steps", str(arguments.most_steps)]
    command += ["--methods", *arguments.methods]
    rows = namespaces.run(__file__, command, arguments.ranks, None if why else link)[0]
    shaped = {"mbit": link.mbit, "delay_ms": link.delay_ms, "loopback": why is not None}
    return [{**shaped, "millions": millions, "ranks": arguments.ranks, **row} for row in rows]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--mbit", type=float, nargs="+", default=[100, 1000, 0], help="0: unshaped")
    made.add_argument("--delay-ms", type=float, default=0.0, help="added, one way")
    made.add_argument("--millions", type=float, nargs="+", default=[25], help="of parameters")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--seconds", type=float, default=8.0, help="for each method")
    made.add_argument("--most-steps", type=int, default=30)
    made.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    made.add_argument(
        "--longest", type=float, default=120.0, help="seconds of a plain step; else left out"
    )
    made.add_argument("--json", type=pathlib.Path)
    made.add_argument("--fresh", action="store_true", help="measure again what the file has")
    made.add_argument("--plot", type=pathlib.Path)
    namespaces.add_rank_arguments(made)
    return made


def main() -> None:
    arguments = parser().parse_args()
    if arguments.rank is not None:
        namespaces.answer(arguments, measure(arguments))
        return
    from bench import link_report

    rows: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists() and not arguments.fresh:
        rows = json.loads(arguments.json.read_text())["rows"]
    for millions in arguments.millions:
        for mbit in arguments.mbit:
            wanted = {"mbit": mbit or None, "delay_ms": arguments.delay_ms, "millions": millions}
            wanted["ranks"] = arguments.ranks
            made = [row for row in rows if wanted.items() <= row.items()]
            if not set(arguments.methods) <= {row["method"] for row in made}:  # else it is there
                rows = [row for row in rows if not wanted.items() <= row.items()]
                made = start(Link(mbit or None, arguments.delay_ms), millions, arguments)
                rows += made
                if arguments.json is not None:
                    link_report.write(arguments.json, rows)
            if made:
                link_report.table(made)
    if arguments.plot is not None:
        link_report.plot(arguments.plot, rows)


if __name__ == "__main__":
    main()
