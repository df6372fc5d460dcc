"""An operator as launches: csrc/cuda/launch.h, sparse_launch.h and sparse_scratch.cuh for Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ..checks import Job
from ..format import EXACT, Format, QuantizeFormat, TopKSparseFormat
from .compiler import FAMILIES
from .task import SEGMENTS, Task

TYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BLOCKS_PER_PROCESSOR = 32
WARPS_MOST = 8
_TILE_BYTES_MOST = 48 * 1024

# Of the sparse format.
_FILL_BLOCKS = 64
_SLAB_LEAST, _SLABS_MOST, _SLAB_UNIT = 1024, 4096, 128
_BINS = 4096
_TILE_ELEMENTS = 8192
_SAMPLE_BYTES = 4 * (8192 + 256 + 4)
_DIGIT_BYTES = 4 * (2048 + 4)
_PLACE_BYTES = 4 * 8
_DECODE_BYTES = 4 * (_TILE_ELEMENTS + 8 * 6 + 1)


@dataclasses.dataclass(frozen=True)
class Launch:
    """``shared``: bytes of shared memory."""

    source: str
    kernel: str
    grid: int
    threads: int
    shared: int
    task: Task


def has_kernels(format: Format) -> bool:
    if isinstance(format, TopKSparseFormat):
        return True
    return format.family in FAMILIES and 4 * format.block <= _TILE_BYTES_MOST


def _name(format: Format, stage: str, dtype: torch.dtype | None) -> str:
    bits = str(format.bits) if isinstance(format, QuantizeFormat) else ""
    name = f"gradcomm_{FAMILIES[format.family]}{bits}_{stage}"
    return name if dtype is None else f"{name}_{TYPE_NAMES[dtype]}"


def kernels(format: Format) -> list[str]:
    """The names of all kernels of this format."""
    typed, plain = ["encode", "decode_mean"], ["reduce_encode"]
    if isinstance(format, TopKSparseFormat):
        typed = ["sample", "collect", "refine", "count", "place", "decode_mean"]
        plain = ["mask", "segments"]
    elif FAMILIES[format.family] == "topk_block":
        plain.append("mask")
    named = [_name(format, stage, dtype) for stage in typed for dtype in TYPE_NAMES]
    return named + [_name(format, stage, None) for stage in plain]


def touched(task: Task, job: Job) -> list[list[int]]:
    """The segments that the records touch."""
    begin, end = task.block_begin, task.block_begin + job.blocks
    first = max(0, sum(row[2] <= begin for row in job.rows) - 1)
    return job.rows[first : sum(row[2] < end for row in job.rows)]


def launches(
    stage: str, job: Job, dtype: torch.dtype | None, task: Task, grid_most: int
) -> Iterator[Launch]:
    """Each launch of an operator, in order. ``task`` says everything but the format, the segments and
    which records; ``grid_most``: thread blocks of a launch."""
    task.format[:] = job.format.ints()
    task.block, task.record = job.format.block, job.format.record_bytes
    if isinstance(job.format, TopKSparseFormat):
        yield from _sparse(stage, job, job.format, dtype, task, grid_most)
    elif job.records > 0:
        yield from _blocks(stage, job, dtype, task, grid_most)


def _blocks(
    stage: str, job: Job, dtype: torch.dtype | None, task: Task, grid_most: int
) -> Iterator[Launch]:
    format, rows = job.format, touched(task, job)
    warps = max(1, min(WARPS_MOST, _TILE_BYTES_MOST // 2 // (4 * format.block)))
    done = at = 0
    while done < job.records:
        some = rows[at : at + SEGMENTS]
        at += len(some)
        part = Task.from_buffer_copy(task)
        part.put(some)
        part.begin, part.end = done, job.records
        if at < len(rows):
            part.end = rows[at][2] - task.block_begin
        grid = min(grid_most, -(-(part.end - done) // warps))
        done = part.end
        shared = 4 * warps * format.block
        source = FAMILIES[format.family]
        yield Launch(source, _name(format, stage, dtype), grid, 32 * warps, shared, part)


def _slab(format: TopKSparseFormat) -> tuple[int, int]:
    """Elements of a slab, and how many slabs a record has."""
    elements = format.block * format.span
    slab = max(_SLAB_LEAST, -(-elements // _SLABS_MOST))
    slab = -(-slab // _SLAB_UNIT) * _SLAB_UNIT
    return slab, -(-elements // slab)


def _state_words(format: TopKSparseFormat) -> int:
    """struct SparseState."""
    slab, slabs = _slab(format)
    words = 1 + -(-format.k // format.SCALED) + 2 + 2 * slabs + format.k
    return words + (_BINS + slabs + slabs * (slab // 8) if format.select == EXACT else 0)


def _table_words(segments: int) -> int:
    return 8 * segments if segments > SEGMENTS else 0


def _mean_begin(format: TopKSparseFormat, records: int, segments: int) -> int:
    return -(-(_table_words(segments) + records * _state_words(format)) // 4) * 4


def scratch_words(stage: str, job: Job, task: Task) -> int:
    """int32 words of scratch that ``task`` must bring."""
    format = job.format
    if not isinstance(format, TopKSparseFormat):
        return 0
    segments = len(touched(task, job))
    if stage in ("decode_mean", "mask"):
        return _table_words(segments)
    mean = job.blocks * format.block if stage == "reduce_encode" else 0
    return _mean_begin(format, job.records, segments) + mean


def _sparse(
    stage: str,
    job: Job,
    format: TopKSparseFormat,
    dtype: torch.dtype | None,
    task: Task,
    grid_most: int,
) -> Iterator[Launch]:
    if job.records == 0:
        return
    rows = touched(task, job)
    task.slab, task.slabs = _slab(format)

    def launch(name: str, of: torch.dtype | None, needed: int, shared: int) -> Launch:
        grid = max(1, min(grid_most, needed))
        part = Task.from_buffer_copy(task)
        kernel = _name(format, name, of)
        return Launch("topk_sparse", kernel, grid, 32 * WARPS_MOST, shared, part)

    if len(rows) > SEGMENTS:
        task.table = task.scratch
        for begin in range(0, len(rows), SEGMENTS):
            task.begin, task.end = begin, min(len(rows), begin + SEGMENTS)
            task.put(rows[task.begin : task.end])
            yield launch("segments", None, 1, 0)
        task.num_segments = len(rows)
    else:
        task.put(rows)
    task.begin, task.end = 0, job.records
    if stage == "mask":
        yield launch("mask", None, -(-job.records * format.k // (32 * WARPS_MOST)), 0)
        return
    if stage == "reduce_encode":
        dtype, task.flat = torch.float32, 1
        task.source = task.out = task.scratch + 4 * _mean_begin(format, job.records, len(rows))
    if stage != "encode":
        tiles = -(-format.block * format.span // _TILE_ELEMENTS)
        yield launch("decode_mean", dtype, job.records * tiles, _DECODE_BYTES)
    if stage == "decode_mean":
        return
    runs = job.records * -(-task.slabs // WARPS_MOST)
    yield launch("sample", dtype, max(job.records, _FILL_BLOCKS), _SAMPLE_BYTES)
    yield launch("collect", dtype, runs, _DIGIT_BYTES)
    if format.select == EXACT:
        for task.step in (1, 2):
            yield launch("refine", dtype, runs, _DIGIT_BYTES)
        yield launch("count", dtype, runs, _PLACE_BYTES)
    yield launch("place", dtype, runs, _PLACE_BYTES)
