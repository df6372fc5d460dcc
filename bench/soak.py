"""Thousands of steps with whatever may go wrong in months: is memory flat, do ranks stay identical?

    python bench/soak.py [--steps 10000] [--ranks 2] [--codecs onebit …] [--json soak.json]

Each codec trains for its share of the steps, over and over in short lives of a model. At random steps,
the same on every rank: a gradient is Inf and the step is skipped, a step is skipped for no reason, the
gradients of some passes are accumulated, a parameter goes unused, DDP lays out its buckets anew (a new
life), the state is saved and loaded, the state is closed and made again. After every step the ranks'
parameters are compared. Prints a table: memory by quarter of the run, threads, faults.

Resident memory is taken after glibc has given back what is free (``malloc_trim``): every life starts and
ends a thread, and what the threads' arenas keep free goes up and down by more than a leak of a long job
would be. ``in use`` is what malloc has handed out, of all arenas (``mallinfo2``).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import random
import sys
import threading
from collections import Counter
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from bench.namespaces import add_rank_arguments, answer, init_rank, run

CODECS = [
    "none",
    "fp16",
    "int8",
    "int4:rounding=stochastic",
    "onebit",
    "onebit:refresh=4,normalize=True",
    "topk:density=0.05,ramp_steps=5",
    "topk:density=0.05,select=threshold",
    "powersgd:rank=2",
]
#: Chance of each in a step.
EVENTS = {
    "inf": 0.03,
    "skipped step": 0.03,
    "accumulated": 0.05,
    "unused parameter": 0.05,
    "saved and loaded": 0.03,
    "closed and made again": 0.01,
}
LIFE = 50  # steps that a model lives, on average


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *(
            (name, ctypes.c_size_t)
            for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        ),
    ]


def in_use() -> int:
    """Bytes that malloc has handed out and not got back. 0 without glibc 2.33."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def resident() -> int:
    """Bytes of this process in memory, without what malloc could give back."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Life:
    """One model from wrapping to closing, under one codec."""

    def __init__(self, codec: str, luck: random.Random) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import gradcomm

        torch.manual_seed(luck.randrange(2**31))
        layers = [nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 64)]
        self.model = nn.Sequential(*layers)
        self.side = nn.Linear(128, 64)
        self.all = nn.ModuleDict({"main": self.model, "side": self.side})
        self.all.forward = self._forward  # type: ignore[method-assign]
        self.use_side = True
        self.ddp = DistributedDataParallel(
            self.all,
            bucket_cap_mb=luck.choice([0.02, 0.05, 25]),
            find_unused_parameters=True,
            gradient_as_bucket_view=luck.random() < 0.5,
        )
        exchange = luck.choice([None, "shard"])
        self.options: dict[str, Any] = {
            "warmup_steps": luck.choice([0, 3]),
            "momentum": luck.choice([0.0, 0.9]),
            "min_numel": 100,
            "exchange": exchange if "shard" in gradcomm.codec.parse(codec).exchanges else None,
        }
        self.codec = codec
        self.state = gradcomm.register(self.ddp, codec, **self.options)
        self.optimizer = torch.optim.SGD(self.all.parameters(), lr=0.01)

    def _forward(self, x: Any) -> Any:
        y = self.model(x)
        return y + self.side(x) if self.use_side else y


def soak(rank: int, steps: int, codecs: list[str], seed: int, samples: int) -> dict[str, Any]:
    """What one rank saw."""
    import torch
    import torch.distributed as dist

    luck, mine = random.Random(seed), torch.Generator().manual_seed(1000 + rank)
    ranks = dist.get_world_size()
    counts: Counter[str] = Counter()
    memory: list[int] = []
    used: list[int] = []
    threads: list[int] = []
    life: Life | None = None
    for step in range(steps):
        if life is None or luck.random() < 1 / LIFE:
            if life is not None:
                life.state.close()
            life = Life(codecs[counts["lives"] % len(codecs)], luck)
            counts["lives"] += 1
        events = {name for name, chance in EVENTS.items() if luck.random() < chance}
        counts.update(events)
        unlucky = luck.randrange(ranks)
        life.use_side = "unused parameter" not in events
        life.optimizer.zero_grad()
        if "accumulated" in events:
            with life.ddp.no_sync():
                life.ddp(torch.randn(8, 128, generator=mine)).square().mean().backward()
        loss = life.ddp(torch.randn(8, 128, generator=mine)).square().mean()
        if "inf" in events and rank == unlucky:
            loss = loss * float("inf")
        loss.backward()
        grads = [p.grad for p in life.all.parameters() if p.grad is not None]
        finite = all(bool(g.isfinite().all()) for g in grads)
        if finite == ("inf" in events):
            raise SystemExit(f"rank {rank}, step {step}, {life.codec}: finite is {finite}")
        if finite and "skipped step" not in events:
            life.optimizer.step()
        if "saved and loaded" in events:
            life.state.load_state_dict(life.state.state_dict())
        if "closed and made again" in events:
            _again(life)
        _compare(life, rank, step)
        if step % max(1, steps // samples) == 0:
            gc.collect()
            memory.append(resident())
            used.append(in_use())
            threads.append(threading.active_count())
    assert life is not None
    life.state.close()
    quarter = len(memory) // 4
    quarters, handed = _quarters(memory), _quarters(used)
    return {
        "quarters_mib": quarters,
        "in_use_mib": handed,
        "last_to_second": quarters[3] / quarters[1] - 1,
        "threads": [threads[quarter], max(threads[quarter:]), threads[-1]],
        "counts": dict(counts),
    }


def _quarters(samples: list[int]) -> list[float]:
    """The mean of each quarter, in MiB."""
    n = len(samples) // 4
    return [sum(samples[i * n : (i + 1) * n]) / n / 2**20 for i in range(4)]


def _again(life: Life) -> None:
    """As if the job had been restarted: a new DDP around the same parameters, and what was saved."""
    from torch.nn.parallel import DistributedDataParallel

    import gradcomm

    saved = life.state.state_dict()
    life.state.close()
    life.ddp = DistributedDataParallel(life.all, find_unused_parameters=True)
    life.state = gradcomm.register(life.ddp, life.codec, **life.options)
    life.state.load_state_dict(saved)


def _compare(life: Life, rank: int, step: int) -> None:
    """Ends the run when ranks hold other bits, by the sum of the parameters' bits as integers."""
    import torch
    import torch.distributed as dist

    flat = torch.cat([p.detach().flatten() for p in life.all.parameters()])
    if not bool(flat.isfinite().all()):
        raise SystemExit(f"rank {rank}, step {step}, {life.codec}: a parameter is not finite")
    mine = flat.view(torch.int32).to(torch.int64)
    sums = torch.stack([mine.sum(), (mine * torch.arange(1, len(mine) + 1)).sum()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise SystemExit(f"rank {rank}, step {step}, {life.codec}: ranks differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--samples", type=int, default=200, help="of the memory, in the whole run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    add_rank_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        init_rank(arguments, arguments.ranks)
        a = arguments
        answer(a, soak(a.rank, a.steps, a.codecs, a.seed, a.samples))
        return
    own = [f"--steps={arguments.steps}", f"--ranks={arguments.ranks}", f"--seed={arguments.seed}"]
    own.append(f"--samples={arguments.samples}")
    found = run(__file__, [*own, "--codecs", *arguments.codecs], arguments.ranks, None)
    counts = found[0]["counts"]
    print(f"{arguments.steps} steps, {arguments.ranks} ranks, identical throughout; {counts}\n")
    print("| rank | MiB resident by quarter | last to second | MiB in use | threads: early, most, end |")
    print("|---|---|---|---|---|")
    for rank, row in enumerate(found):
        quarters = " ".join(f"{q:.1f}" for q in row["quarters_mib"])
        used = " ".join(f"{q:.2f}" for q in row["in_use_mib"])
        threads = " ".join(map(str, row["threads"]))
        print(f"| {rank} | {quarters} | {row['last_to_second']:+.2%} | {used} | {threads} |")
    if arguments.json is not None:
        from bench.machine import describe

        result = {"machine": describe(), "steps": arguments.steps, "ranks": found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
