"""The arguments of the operators, checked before memory is touched, for everything of them that is in
Python. The same in C++, for the libraries, is ``csrc/checks.h``.

Each operator has a function here that raises ValueError on an argument that does not fit and returns a
``Job``: the format, the layout's rows and how many records there are.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .format import Format, TopKBlockFormat, TopKSparseFormat, format_of

FAR = 2**40  # no block or segment lies or reaches beyond: kFar in csrc/checks.h
BUCKET_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Job:
    """``rows``: the layout's table; ``records``: of the payload, or of one rank's; ``needed``: the
    blocks that the layout fills."""

    format: Format
    rows: list[list[int]]
    needed: int
    records: int

    @property
    def blocks(self) -> int:
        """Blocks that the records stand for."""
        return self.records * self.format.span


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"gradcomm: {message}")


def plain(t: Tensor, name: str, dtype: torch.dtype, dim: int) -> None:
    check(
        t.dtype == dtype and t.dim() == dim and t.is_contiguous(),
        f"{name} must be a contiguous {dtype} of {dim} dimensions, not {t.dtype} {list(t.shape)}",
    )


def _bucket(t: Tensor, name: str) -> None:
    check(
        t.dtype in BUCKET_DTYPES and t.dim() == 1 and t.is_contiguous(),
        f"{name} must be contiguous, one-dimensional and float32, float16 or bfloat16, not {t.dtype} "
        f"{list(t.shape)}",
    )


def _rows(layout: Tensor, format: Format, bucket_numel: int | None) -> tuple[list[list[int]], int]:
    """The table as lists, and the number of blocks that it needs."""
    plain(layout, "layout", torch.int64, 2)
    check(layout.size(1) == 4, f"layout must have 4 columns, not {layout.size(1)}")
    rows, following = layout.tolist(), 0
    for i, (offset, numel, first, _) in enumerate(rows):
        inside = bucket_numel is None or offset + numel <= bucket_numel
        check(
            1 <= numel <= FAR and offset >= 0 and inside,
            f"segment {i} of the layout (offset {offset}, {numel} elements) leaves the bucket of "
            f"{bucket_numel} elements",
        )
        check(
            following <= first <= FAR,
            f"segment {i} of the layout begins at block {first}, inside "
            "the segment before it or out of reach",
        )
        following = first - (-numel // format.block)
    return rows, following


def _records(format: Format, chunk_bytes: int) -> int:
    size = format.record_bytes
    check(
        chunk_bytes % size == 0,
        f"a chunk of {chunk_bytes} bytes is no whole number of records of {size} bytes",
    )
    return chunk_bytes // size


def _residual(t: Tensor | None, blocks: int, format: Format, name: str = "residual") -> None:
    if t is None:
        return
    plain(t, name, torch.float32, 1)
    check(
        t.numel() >= blocks * format.block,
        f"the {name} has {t.numel()} elements; {blocks} blocks of {format.block} need "
        f"{blocks * format.block}",
    )


def _written(payload: Tensor, format: Format, rows: list[list[int]], needed: int) -> Job:
    """The job of a payload of chunks, which holds every block of the layout."""
    plain(payload, "payload", torch.uint8, 2)
    job = Job(format, rows, needed, payload.size(0) * _records(format, payload.size(1)))
    check(job.blocks >= needed, f"the payload holds {job.blocks} blocks; the layout needs {needed}")
    return job


def _received(
    payloads: Tensor, format: Format, rows: list[list[int]], needed: int, block_begin: int
) -> Job:
    plain(payloads, "payloads", torch.uint8, 3)
    check(payloads.size(0) >= 1, "payloads must come from one rank or more")
    check(0 <= block_begin <= FAR, f"block_begin is {block_begin}")
    return Job(format, rows, needed, payloads.size(1) * _records(format, payloads.size(2)))


def encode(
    source: Tensor,
    layout: Tensor,
    format: list[int],
    residual: Tensor | None,
    payload: Tensor,
    gain: Tensor | None,
) -> Job:
    fmt = format_of(format)
    _bucket(source, "source")
    job = _written(payload, fmt, *_rows(layout, fmt, source.numel()))
    check(
        gain is None or (gain.dtype == torch.float32 and gain.numel() == 1), "gain must be one float32"
    )
    _residual(residual, job.needed, fmt)
    return job


def decode_mean(
    payloads: Tensor, layout: Tensor, format: list[int], block_begin: int, out: Tensor
) -> Job:
    fmt = format_of(format)
    _bucket(out, "out")
    return _received(payloads, fmt, *_rows(layout, fmt, out.numel()), block_begin)


def reduce_encode(
    payloads: Tensor,
    layout: Tensor,
    format: list[int],
    block_begin: int,
    residual: Tensor | None,
    payload: Tensor,
) -> Job:
    fmt = format_of(format)
    job = _received(payloads, fmt, *_rows(layout, fmt, None), block_begin)
    plain(payload, "payload", torch.uint8, 1)
    size = payloads.size(1) * payloads.size(2)
    check(payload.numel() == size, f"the payload has {payload.numel()} bytes; the chunk needs {size}")
    _residual(residual, job.blocks, fmt)
    return job


def topk_mask_(payload: Tensor, layout: Tensor, format: list[int], buffer: Tensor) -> Job:
    fmt = format_of(format)
    check(
        isinstance(fmt, TopKBlockFormat | TopKSparseFormat),
        f"topk_mask_ needs a top-k format, not family {fmt.family}",
    )
    job = _written(payload, fmt, *_rows(layout, fmt, None))
    _residual(buffer, job.needed, fmt, "buffer")
    return job


def orthogonalize_(rows: Tensor) -> None:
    plain(rows, "rows", torch.float32, 3)


def lowrank(matrix: Tensor, p: Tensor, q: Tensor, gradient: Tensor | None = None) -> None:
    plain(matrix, "matrix", torch.float32, 2)
    n, m = matrix.shape
    for name, factor, columns in (("p", p, n), ("q", q, m)):
        plain(factor, name, torch.float32, 2)
        shape, wanted = tuple(factor.shape), (p.size(0), columns)
        check(shape == wanted, f"{name} is {list(shape)}; it must be {list(wanted)}")
    if gradient is not None:
        plain(gradient, "gradient", torch.float32, 2)
        check(
            gradient.shape == matrix.shape,
            f"gradient is {list(gradient.shape)}, matrix {list(matrix.shape)}",
        )
