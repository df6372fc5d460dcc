"""DDP on one GPU with every codec, over NCCL or Gloo: what ``bench/gpu.py`` and the tests run on ranks.

A process group over NCCL takes one rank a GPU; over Gloo two ranks share it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from bench import ranks
from gradcomm.verify import digest

DEVICE = torch.device("cuda", 0)
PLAIN = "DDP alone"
CODECS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int2",
    "onebit",
    "topk:density=0.01",
    "powersgd:rank=4",
)
#: Those whose arithmetic is the same bit by bit on every executor, with the exchanges that carry them.
RECORDS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:scheme=minmax",
    "int4:rounding=stochastic",
    "int2",
    "onebit",
    "topk:density=0.05",
    "topk:density=0.05,values=int8",
)

SLACK = 2 << 20  # bytes of memory that the allocator's rounding, scales and norms may take
WARM = 4  # steps in which buffers are made, buckets laid out anew and kernels compiled


def train(
    rank: int, tell: Callable[..., None], backend: str, codecs: Sequence[str], steps: int, quiet: bool
) -> None:
    """Tells ``("trained", rank, codec, result)`` for DDP alone and for each codec.

    ``quiet``: an operation that makes the host wait for the GPU is an error, in the steps after the
    first ``WARM``.
    """
    torch.cuda.set_device(DEVICE)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    for codec in (PLAIN, *codecs):
        tell("trained", rank, codec, _train_one(rank, group, codec, steps, quiet))
        gc.collect()  # DDP models lie in cycles


def _train_one(rank: int, group: Any, codec: str, steps: int, quiet: bool) -> dict[str, Any]:
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    ddp = DDP(nn.Sequential(*layers).to(DEVICE), process_group=group, bucket_cap_mb=4)
    state = None
    if codec != PLAIN:
        state = gradcomm.register(ddp, codec, process_group=group, warmup_steps=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(16, 1024, generator=generator).to(DEVICE)
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = ddp(inputs).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _host_may_not_wait() if quiet else contextlib.nullcontext():
        begin.record()
        for _ in range(steps):
            step()
        end.record()
    end.synchronize()
    parameters = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    result = {
        "hash": digest(parameters),
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "finite": bool(torch.isfinite(parameters).all()),
        "step_ms": begin.elapsed_time(end) / steps,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "stats": None,
    }
    if state is not None:
        result["stats"] = state.stats()
        state.close()
    return result


@contextlib.contextmanager
def _host_may_not_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same_as_cpu(rank: int, tell: Callable[..., None], codecs: Sequence[str], steps: int) -> None:
    """Tells ``("compared", rank, codec, exchange, equal)``: whether the same gradients give the same
    means, bit for bit, on the GPU and on the CPU, with error feedback over ``steps`` steps."""
    torch.cuda.set_device(DEVICE)
    for codec in codecs:
        carried_by = gradcomm.codec.parse(codec).exchanges
        for exchange in carried_by:
            here, there = (
                _means(rank, codec, exchange, steps, d) for d in (torch.device("cpu"), DEVICE)
            )
            equal = all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
            tell("compared", rank, codec, exchange, equal)
            gc.collect()


class _Weighted(nn.Module):
    """The gradient of parameter i is ``weights[i]``, exactly."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        shapes = [(70, 130), (257, 64), (31, 33), (1000, 3), (77,)]  # none a multiple of anything
        self.values = nn.ParameterList([torch.ones(s, device=device) for s in shapes])

    def forward(self, weights: list[Tensor]) -> Tensor:
        return torch.stack([(p * w).sum() for p, w in zip(self.values, weights, strict=True)]).sum()


def _means(rank: int, codec: str, exchange: str, steps: int, device: torch.device) -> list[Tensor]:
    model = _Weighted(device)
    ddp = DDP(model, bucket_cap_mb=0.05)
    state = gradcomm.register(
        ddp, codec, exchange=exchange, warmup_steps=0, min_numel=0, clip_norm=None, error_feedback=True
    )
    generator, means = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        weights = [torch.randn(p.shape, generator=generator).to(device) for p in model.values]
        ddp.zero_grad()
        ddp(weights).backward()
        means += [p.grad.cpu() for p in model.values if p.grad is not None]
    state.close()
    return means


def every_codec() -> tuple[dict[str, Any], list[str]]:
    """All of it, on this GPU: the results by backend and codec, and what is wrong with them."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for backend, count in (("nccl", 1), ("gloo", 2)):
        found[backend], faulty = train_over(backend, count, CODECS, 20)
        wrong += faulty
    same = found["same as on the CPU"] = {}
    try:
        for _, _, codec, exchange, equal in ranks.run(same_as_cpu, 2, RECORDS, 4, silence=60):
            name = f"{codec} by {exchange}"
            same[name] = same.get(name, True) and equal
    except ranks.RankError as error:
        wrong.append(f"comparing with the CPU: {error}")
    wrong += [f"means of {name} are not those of the CPU" for name, equal in same.items() if not equal]
    return found, wrong


def train_over(
    backend: str, count: int, codecs: Sequence[str], steps: int
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """``train`` on ``count`` ranks: the results of the ranks by codec, and what is wrong with them."""
    rows: dict[str, list[dict[str, Any]]] = {}
    wrong: list[str] = []
    try:
        arguments = (backend, codecs, steps, backend == "nccl")
        for _, _, codec, result in ranks.run(train, count, *arguments, silence=60):
            rows.setdefault(codec, []).append(result)
    except ranks.RankError as error:
        wrong.append(str(error))
    for codec, results in rows.items():
        if len({r["hash"] for r in results}) != 1:
            wrong.append(f"{codec}: ranks ended with other bits")
        for result in results:
            wrong += [f"{codec}: {line}" for line in _faults(result, rows[PLAIN][0]["peak_bytes"])]
    return rows, [f"training over {backend}: {line}" for line in wrong]


def _faults(result: dict[str, Any], plain_bytes: int) -> Iterator[str]:
    if not result["finite"] or not result["last_loss"] < result["first_loss"]:
        yield f"loss {result['first_loss']} became {result['last_loss']}"
    if (stats := result["stats"]) is not None:
        more, may = result["peak_bytes"] - plain_bytes, stats["memory_bytes"] + stats["scratch_bytes"]
        if more > may + SLACK:
            yield f"{more} bytes over DDP alone; residual and payload are {may}"
