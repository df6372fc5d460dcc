"""What each rank of the demo does: the same training, once for each codec."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.entry import read
from bench.tasks import TASKS, Task

PHASES = ("encode", "wire", "decode")
MOMENTUM = 0.9  # of every optimizer here, or of the hook in its place


@dataclasses.dataclass(frozen=True)
class Settings:
    """``batch``: windows a rank and step. ``clip``: what the gradient's norm is clipped to, before
    the memory where the codec has one, else after the exchange; 0: not at all. ``lr``: None for the
    optimizer's default here."""

    codecs: tuple[str, ...]
    task: str = "bytes"
    steps: int = 400
    batch: int = 3
    context: int = 96
    width: int = 256
    depth: int = 3
    optimizer: str = "adamw"
    lr: float | None = None
    seed: int = 0
    clip: float = 1.0
    momentum_correction: bool = False
    recipe: bool = True
    error_feedback: bool = True  # where the codec's recipe has it
    plain: tuple[str, ...] = ()
    min_numel: int | None = None  # None for the library's default
    text: str | None = None
    evaluations: int = 10
    held_out: int = 96  # windows that the held-out loss is taken over, by all ranks together


def work(rank: int, tell: Callable[..., None], settings: Settings) -> None:
    """Trains with each codec from the same start on the same batches. Rank 0 tells:
    ``("model", parameters)``, ``("step", codec, step, training loss)``, ``("result", result)``."""
    logging.getLogger("gradcomm").setLevel(logging.ERROR)  # the parent has said it already
    heard = tell if rank == 0 else lambda *event: None
    for index, codec in enumerate(settings.codecs):
        result = _train(rank, index, codec, settings, heard)
        heard("result", result)


def _train(
    rank: int, index: int, codec: str, settings: Settings, tell: Callable[..., None]
) -> dict[str, Any]:
    import gradcomm

    task: Task = TASKS[settings.task](settings, rank)
    torch.manual_seed(settings.seed)
    model = task.model()
    with torch.no_grad():
        task.loss(model)  # lazy layers learn their sizes; draws a batch, on every rank and run alike
    ddp = DistributedDataParallel(model)
    tell("model", sum(p.numel() for p in ddp.parameters()))
    rule, asked = read(codec, settings.steps)
    if not settings.recipe and isinstance(rule, gradcomm.TopK):
        rule = dataclasses.replace(rule, ramp_steps=0)
    options, clip = _options(rule, settings)
    options |= asked
    state = gradcomm.register(ddp, rule, seed=settings.seed, **options)
    optimizer, schedule = _optimizer(ddp, settings, state.momentum)
    every = max(1, settings.steps // settings.evaluations)
    curve: list[dict[str, float]] = []
    times: list[float] = []
    warm: dict[str, Any] = state.stats()
    for step in range(settings.steps):
        if step == state.warmup_steps:
            warm = state.stats()
        if step % every == 0:
            curve.append(_evaluate(ddp, task, step, state.stats()["bytes_sent"]))
        start = time.perf_counter()
        loss = task.loss(ddp)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        times.append(time.perf_counter() - start)
        tell("step", index, step + 1, loss.item())
    stats = state.stats()
    curve.append(_evaluate(ddp, task, settings.steps, stats["bytes_sent"]))
    state.close()
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, _hash(ddp))
    return {
        "codec": codec,
        "recipe": state.describe(),
        "global_clip": clip,
        "measure": task.measure,
        "loss": curve[-1]["loss"],
        "curve": curve,
        "identical": len(set(hashes)) == 1,
        "hash": hashes[0],
        **_costs(warm, stats, times[state.warmup_steps :]),
        "stats": stats,
    }


def _options(rule: Any, settings: Settings) -> tuple[dict[str, Any], float]:
    """Of ``register``; and what the gradient's norm is to be clipped to after the exchange."""
    options: dict[str, Any] = {"plain": settings.plain or None}
    if settings.min_numel is not None:
        options["min_numel"] = settings.min_numel
    recipes = [codec.recipe for codec in (rule.values() if isinstance(rule, dict) else [rule])]
    feedback = any(recipe.error_feedback for recipe in recipes)
    if not settings.recipe:
        options |= {"warmup_steps": 0, "min_numel": 0, "clip_norm": None, "error_feedback": True}
        return options, settings.clip
    # A short run keeps most of its steps for compression.
    options["warmup_steps"] = min(recipes[0].warmup_steps, settings.steps // 4)
    if not settings.error_feedback:
        options["error_feedback"] = False
    if settings.momentum_correction and feedback:
        options["momentum"] = MOMENTUM
    if feedback and settings.clip:
        options["clip_norm"] = settings.clip  # local, before the memory: see gradcomm/clip.py
        return options, 0.0
    return options, settings.clip


def _costs(warm: dict[str, Any], stats: dict[str, Any], times: list[float]) -> dict[str, float]:
    """Means over the compressed steps: what a long run costs."""
    steps = max(1, stats["steps"] - warm["steps"])

    def mean(name: str) -> float:
        return (stats[name] * stats["steps"] - warm[name] * warm["steps"]) / steps

    sent = (stats["bytes_sent"] - warm["bytes_sent"]) / steps
    plain = (stats["bytes_plain"] - warm["bytes_plain"]) / steps
    ms = 1e3 * sum(times) / max(1, len(times))
    costs = {"bytes_per_step": sent, "ratio": plain / sent if sent else 1.0, "step_ms": ms}
    costs |= {f"{phase}_ms": mean(f"{phase}_ms") for phase in (*PHASES, "wait")}
    return costs


def _optimizer(
    ddp: DistributedDataParallel, settings: Settings, corrected: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """With a linear warm-up of the rate over an eighth of the steps, then a cosine down to a tenth."""
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            ddp.parameters(), lr=settings.lr or 0.3, momentum=0.0 if corrected else MOMENTUM
        )
    else:
        # A short memory of squares: a run of a few hundred steps has no use for a thousand.
        optimizer = torch.optim.AdamW(
            ddp.parameters(),
            lr=settings.lr or 1e-3,
            betas=(0.0 if corrected else MOMENTUM, 0.95),
            fused=True,
        )
    warm = max(1, settings.steps // 8)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        share = (step - warm) / max(1, settings.steps - warm)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * share))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


@torch.no_grad()
def _evaluate(ddp: DistributedDataParallel, task: Task, step: int, sent: int) -> dict[str, float]:
    # The module itself: DDP's forward would prepare for a backward that does not come.
    return {"step": step, "loss": task.evaluate(ddp.module), "bytes_sent": sent}


def _hash(ddp: DistributedDataParallel) -> str:
    """Of the bits of all parameters."""
    digest = hashlib.sha256()
    for parameter in ddp.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]
