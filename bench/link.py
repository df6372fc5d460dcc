"""Step time on links of a given rate: codecs beside plain DDP, torch's own hooks, and no wire at all.

    python bench/link.py [--mbit 100 1000 0] [--millions 25] [--ranks 2] [--delay-ms 0] [--seconds 8]
                         [--methods plain onebit …] [--json FILE] [--plot FILE]

Hosts are network namespaces, one a rank, each with a link of the rate (0: as fast as the machine copies)
to a switch, in both directions. That needs root; without it the ranks run on loopback, unshaped, and the
table says so. The model is eight linear layers, batch 8, SGD, one thread a rank. A figure is the median
step of the slowest rank, after the first two. Bytes are those of the host's network interface, protocol
headers and acknowledgements included, so they hold for torch's hooks as well.

Recipes' plain first steps are left out: this measures the codec, not the warm-up.
"""

from __future__ import annotations

import argparse
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
        ddp, stats = METHODS[method](model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        times: list[float] = []
        steps, before = FIRST + 1, 0
        while len(times) < steps:
            if len(times) == FIRST:
                before = namespaces.bytes_sent() or 0
            start = time.perf_counter()
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times.append(float(spent))
            if len(times) == FIRST + 1:  # all ranks know the same times, so they agree
                steps = FIRST + max(3, min(arguments.most_steps, int(arguments.seconds / times[-1])))
        measured = times[FIRST:]
        row: dict[str, Any] = {"method": method, "ms": 1e3 * statistics.median(measured)}
        row["fastest_ms"], row["slowest_ms"] = 1e3 * min(measured), 1e3 * max(measured)
        row["steps"] = len(measured)
        sent = namespaces.bytes_sent()
        row["bytes_per_step"] = None if sent is None else (sent - before) / len(measured)
        row |= stats()
        rows.append(row)
        if arguments.rank == 0:
            print(f"  {method:22} {row['ms']:9.1f} ms", file=sys.stderr, flush=True)
        del ddp, model, optimizer
        dist.barrier()
    dist.destroy_process_group()
    return rows


def start(link: Link, millions: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """``measure`` on ranks that are hosts with such a link, or on loopback where none can be made."""
    why = namespaces.missing(link)
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
    made.add_argument("--json", type=pathlib.Path)
    made.add_argument("--plot", type=pathlib.Path)
    namespaces.add_rank_arguments(made)
    return made


def main() -> None:
    arguments = parser().parse_args()
    if arguments.rank is not None:
        namespaces.answer(arguments, measure(arguments))
        return
    from bench import link_report

    rows = []
    for millions in arguments.millions:
        for mbit in arguments.mbit:
            made = start(Link(mbit or None, arguments.delay_ms), millions, arguments)
            if made:
                link_report.table(made)
            rows += made
    if arguments.json is not None:
        link_report.write(arguments.json, rows)
    if arguments.plot is not None:
        link_report.plot(arguments.plot, rows)


if __name__ == "__main__":
    main()
