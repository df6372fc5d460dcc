"""What a rank sends and computes as ranks are added: every exchange, beside its formula.

    python bench/scale.py [--ranks 2 4 8 16] [--millions 4] [--json FILE]

All ranks run on this machine, many to a core, so wall times would say nothing: a row has the bytes that
a rank sends in one exchange of one bucket, and the CPU time of its own encoding and decoding. "counted"
is what the transport was given, which must equal "formula", the table of gradcomm/exchange in whole
blocks, to the byte. "interface" is what the rank's network interface sent, with the protocol's headers
and acknowledgements: every rank is a host of its own (network namespaces, which need root; else it is
blank). By hierarchy two ranks make a host, and "between" is what a rank sends to other hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench import machine, namespaces  # noqa: E402
from bench.namespaces import Link  # noqa: E402

REPEATS = 5
PER_HOST = 2  # ranks, by hierarchy
CASES = [
    ("none", "reduce"),
    *[(codec, how) for how in ("gather", "shard", "hierarchy") for codec in ("fp16", "int8", "int4")],
    *[(codec, how) for how in ("gather", "shard", "hierarchy") for codec in ("onebit", "topk")],
    ("powersgd", "reduce"),
]
STEP = 10**6  # past every ramp


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: a row for each case."""
    import torch
    import torch.distributed as dist

    from gradcomm.codec import parse
    from gradcomm.codec.base import Scratch, Turn
    from gradcomm.exchange import EXCHANGES
    from gradcomm.memory import Memory
    from gradcomm.part import Part, Slice
    from gradcomm.transport.group import GroupTransport
    from gradcomm.transport.hosts import HostsTransport

    ranks = arguments.ranks[0]
    namespaces.init_rank(arguments, ranks)
    group = dist.group.WORLD
    assert group is not None
    transport = GroupTransport(group, torch.device("cpu"))
    pairs = [list(range(first, first + PER_HOST)) for first in range(0, ranks, PER_HOST)]
    hosts = HostsTransport(transport, pairs)
    spent: dict[str, float] = {}

    @contextlib.contextmanager
    def clock(phase: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        spent[phase] = spent.get(phase, 0.0) + time.thread_time() - start

    rows = []
    side = round((arguments.millions * 1e6) ** 0.5)
    shape = torch.Size([side, side])
    bucket = torch.randn(shape.numel(), generator=torch.Generator().manual_seed(arguments.rank))
    for name, exchange in CASES:
        codec = parse(name)
        part = Part(codec, exchange, [Slice(0, 0, shape.numel(), shape, (side, 1), True)], whole=True)
        memory, scratch = Memory(ranks), Scratch()
        feedback = codec.recipe.error_feedback
        turn = Turn(STEP, 0, None, ranks, arguments.rank, memory, feedback, scratch)
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        for repeat in range(REPEATS + 1):
            spent.clear()
            dist.barrier()
            before = transport.traffic.sent, hosts.cross.traffic.sent, namespaces.bytes_sent()
            EXCHANGES[exchange](part, bucket.clone(), turn, hosts, clock)
            after = transport.traffic.sent, hosts.cross.traffic.sent, namespaces.bytes_sent()
            if repeat:  # the first one connects and allocates
                for phase in seconds:
                    seconds[phase].append(spent.get(phase, 0.0))
        row: dict[str, Any] = {"ranks": ranks, "codec": name, "exchange": exchange}
        row["counted"] = after[0] - before[0]
        row["between"] = after[1] - before[1] if exchange == "hierarchy" else None
        row["formula"] = formula(part, ranks)
        known = before[2] is not None and after[2] is not None
        row["interface"] = after[2] - before[2] if known else None  # type: ignore[operator]
        row |= {f"{phase}_cpu_ms": 1e3 * statistics.median(s) for phase, s in seconds.items()}
        rows.append(row)
    dist.destroy_process_group()
    return rows


def formula(part: Any, ranks: int) -> int:
    """Bytes that a rank sends, from the payload's size in whole blocks and the plain size alone."""
    from gradcomm.codec import PowerSGD, RecordCodec

    numel, codec = part.numel, part.codec
    if isinstance(codec, PowerSGD):
        n, m = part.slices[0].shape
        # Two all-reduces, of P and of Q.
        return sum(2 * 4 * codec.rank * side * (ranks - 1) // ranks for side in (n, m))
    if not isinstance(codec, RecordCodec):
        return int(2 * 4 * numel * (ranks - 1) // ranks)
    whole = codec.chunk_bytes(part.chunk_blocks(1), STEP)
    chunk = codec.chunk_bytes(part.chunk_blocks(ranks), STEP)
    if part.exchange == "gather":
        return whole * (ranks - 1)
    if part.exchange == "shard":
        return 2 * chunk * (ranks - 1)
    hosts = ranks // PER_HOST
    largest = max(piece.numel for piece in part.pieces(PER_HOST, part.chunk_blocks(ranks) * hosts))
    inside = (4 * largest + chunk * hosts) * (PER_HOST - 1)
    return int(inside + 2 * chunk * (hosts - 1))


def table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bench.report import size

    made = Table(title="bytes that a rank sends in one exchange, and CPU ms of its own")
    for column in ("exchange", "codec", "ranks", "counted", "formula", "interface", "between", "encode"):
        made.add_column(column, justify="left" if column in ("exchange", "codec") else "right")
    made.add_column("decode", justify="right")
    order = {"reduce": 0, "gather": 1, "shard": 2, "hierarchy": 3}
    for row in sorted(rows, key=lambda r: (order[r["exchange"]], r["codec"], r["ranks"])):
        counted = size(row["counted"])
        made.add_row(
            row["exchange"],
            row["codec"],
            str(row["ranks"]),
            counted if row["counted"] == row["formula"] else f"[red]{counted}[/red]",
            size(row["formula"]),
            "" if row["interface"] is None else size(row["interface"]),
            "" if row["between"] is None else size(row["between"]),
            f"{row['encode_cpu_ms']:.2f}",
            f"{row['decode_cpu_ms']:.2f}",
        )
    Console(width=110).print(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="even numbers")
    parser.add_argument("--millions", type=float, default=4.0, help="of float32 in the bucket")
    parser.add_argument("--json", type=pathlib.Path)
    namespaces.add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        namespaces.answer(arguments, measure(arguments))
        return
    if odd := [r for r in arguments.ranks if r % PER_HOST or r < 2]:
        parser.error(f"--ranks {odd}: use even numbers, {PER_HOST} ranks make a host")
    why = namespaces.missing(Link())
    if why is not None:
        print(f"bytes of interfaces are not measured: {why}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        own = ["--ranks", str(ranks), "--millions", str(arguments.millions)]
        answers = namespaces.run(__file__, own, ranks, None if why else Link())
        for by_rank in zip(*answers, strict=True):
            # All send the same; should they not, the row shows the most.
            rows.append(max(by_rank, key=lambda row: row["counted"]))
    table(rows)
    if arguments.json is not None:
        settings = {"date": datetime.date.today().isoformat(), "machine": machine.describe()}
        settings |= {"millions": arguments.millions}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
