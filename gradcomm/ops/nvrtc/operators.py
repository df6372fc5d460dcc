"""The operators of ``torch.ops.gradcomm`` by kernels compiled at run time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks, reference
from ..checks import Job
from ..format import Format, format_of
from . import compiler, plan
from .compiler import FAMILIES
from .task import Matrices, Task

_ROWS_MOST = 32  # kRowsMost in csrc/cuda/matrices.cuh
_ORTHOGONALIZE_BYTES = 2048 * 12 + 2 * 32 * 32 * 8


def prepare(what: Format | str, device: torch.device) -> None:
    """Compiles what this format (or "orthogonalize") needs, so that the first backward does not wait.
    RuntimeError where nothing can be compiled."""
    if isinstance(what, str):
        compiler.module(what, device.index or 0)
    elif plan.has_kernels(what):
        compiler.module(FAMILIES[what.family], device.index or 0)


def _run(stage: str, job: Job, on: Tensor, dtype: torch.dtype | None, task: Task) -> None:
    device = on.device.index or 0
    words = plan.scratch_words(stage, job, task)
    # Given back on return, to be had again by what this stream runs later: after the launches.
    scratch = torch.empty(words, dtype=torch.int32, device=on.device)
    task.scratch = scratch.data_ptr()
    grid_most = compiler.processors(device) * plan.BLOCKS_PER_PROCESSOR
    for x in plan.launches(stage, job, dtype, task, grid_most):
        compiler.launch(x.source, x.kernel, device, x.grid, x.threads, x.shared, x.task)


def _pointer(t: Tensor | None, on: Tensor, name: str) -> int:
    if t is None:
        return 0
    checks.check(t.device == on.device, f"{name} must be on {on.device}, not {t.device}")
    checks.check(
        t.data_ptr() % 4 == 0 or t.dtype != torch.uint8,
        f"on CUDA {name} must begin at a multiple of 4 bytes",
    )
    return t.data_ptr()


def encode(
    source: Tensor,
    layout: Tensor,
    format: list[int],
    residual: Tensor | None,
    payload: Tensor,
    gain: Tensor | None,
    key: int,
) -> None:
    if not plan.has_kernels(format_of(format)):
        return reference.encode(source, layout, format, residual, payload, gain, key)
    job = checks.encode(source, layout, format, residual, payload, gain)
    task = Task(
        key=key % 2**64,
        source=_pointer(source, source, "source"),
        gain=_pointer(gain, source, "gain"),
        residual=_pointer(residual, source, "residual"),
        payload=_pointer(payload, source, "payload"),
    )
    return _run("encode", job, source, source.dtype, task)


def decode_mean(
    payloads: Tensor, layout: Tensor, format: list[int], block_begin: int, out: Tensor
) -> None:
    if not plan.has_kernels(format_of(format)):
        return reference.decode_mean(payloads, layout, format, block_begin, out)
    job = checks.decode_mean(payloads, layout, format, block_begin, out)
    task = Task(
        block_begin=block_begin,
        out=_pointer(out, payloads, "out"),
        ranks=payloads.size(0),
        rank_stride=payloads[0].numel(),
        payloads=_pointer(payloads, payloads, "payloads"),
    )
    return _run("decode_mean", job, payloads, out.dtype, task)


def reduce_encode(
    payloads: Tensor,
    layout: Tensor,
    format: list[int],
    block_begin: int,
    residual: Tensor | None,
    payload: Tensor,
    key: int,
) -> None:
    if not plan.has_kernels(format_of(format)):
        return reference.reduce_encode(payloads, layout, format, block_begin, residual, payload, key)
    job = checks.reduce_encode(payloads, layout, format, block_begin, residual, payload)
    task = Task(
        block_begin=block_begin,
        ranks=payloads.size(0),
        rank_stride=payloads[0].numel(),
        payloads=_pointer(payloads, payloads, "payloads"),
        key=key % 2**64,
        residual=_pointer(residual, payloads, "residual"),
        payload=_pointer(payload, payloads, "payload"),
    )
    return _run("reduce_encode", job, payloads, None, task)


def topk_mask_(payload: Tensor, layout: Tensor, format: list[int], buffer: Tensor) -> None:
    if not plan.has_kernels(format_of(format)):
        return reference.topk_mask_(payload, layout, format, buffer)
    job = checks.topk_mask_(payload, layout, format, buffer)
    task = Task(
        ranks=1,
        payloads=_pointer(payload, payload, "payload"),
        residual=_pointer(buffer, payload, "buffer"),
    )
    return _run("mask", job, payload, None, task)


def orthogonalize_(rows: Tensor) -> None:
    checks.orthogonalize_(rows)
    if rows.size(1) > _ROWS_MOST:
        return reference.orthogonalize_(rows)
    if rows.numel() == 0:
        return None
    device = rows.device.index or 0
    matrices = Matrices(_pointer(rows, rows, "rows"), *rows.shape)
    grid = min(rows.size(0), compiler.processors(device) * plan.BLOCKS_PER_PROCESSOR)
    return compiler.launch(
        "orthogonalize",
        "gradcomm_orthogonalize",
        device,
        grid,
        32 * plan.WARPS_MOST,
        _ORTHOGONALIZE_BYTES,
        matrices,
    )


OPERATORS: dict[str, Callable[..., None]] = {
    "encode": encode,
    "decode_mean": decode_mean,
    "reduce_encode": reduce_encode,
    "topk_mask_": topk_mask_,
    "orthogonalize_": orthogonalize_,
}
