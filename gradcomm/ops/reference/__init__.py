"""The operators in plain PyTorch: the oracle that every kernel is compared with, and what runs
where there is no kernel. Clear before fast.

A family is a module with two functions over a batch of records:

``encode(p, kept, counts, format, key, counters) -> (records, residual)``
    ``p``: float32 ``[records, elements]``, zero from ``counts`` on; ``kept``: the residual of before,
    same shape; ``counters``: int64 ``[records]``, of the random number of each record's first element.
    Returns uint8 ``[records, record bytes]`` and the new residual.
``mean(records, format) -> Tensor``
    ``records``: uint8 ``[ranks, records, record bytes]``; returns float32 ``[records, elements]``.

Where a record stands for many blocks, ``counts`` is ``[records, blocks]``. A family that sends indices
has two functions more:

``check(records, format)``
    Raises ValueError on an index out of bounds, in records as ``mean`` takes.
``sent(records, format) -> Tensor``
    ``records``: uint8 ``[records, record bytes]``; bool ``[records, elements]``, true where it was sent.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import checks
from ..format import Format
from . import cast, onebit, quantize, topk_block, topk_sparse, twobit
from .lowrank import lowrank_back_project_ as lowrank_back_project_
from .lowrank import lowrank_project_ as lowrank_project_
from .orthogonalize import orthogonalize_ as orthogonalize_

_FAMILIES: dict[int, ModuleType] = {
    0: cast,
    1: onebit,
    2: quantize,
    3: topk_block,
    4: topk_sparse,
    5: twobit,
}


def _blocks(
    rows: list[list[int]], format: Format, first_block: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """Elements in use of each block, and the counter of its first element's random number."""
    counts = torch.zeros(blocks, dtype=torch.int64)
    counters = torch.zeros(blocks, dtype=torch.int64)
    for _, numel, first, origin in rows:
        index = torch.arange(first, first - (-numel // format.block))
        begin = (index - first) * format.block
        inside = (index >= first_block) & (index < first_block + blocks)
        counts[index[inside] - first_block] = (numel - begin).clamp(max=format.block)[inside]
        counters[index[inside] - first_block] = origin + begin[inside]
    return counts, counters


def _encode(
    p: Tensor,
    kept: Tensor,
    format: Format,
    residual: Tensor | None,
    payload: Tensor,
    rows: list[list[int]],
    key: int,
    first_block: int,
) -> None:
    """Blocks to records, and the residual left behind."""
    elements = format.span * format.block
    counts, counters = _blocks(rows, format, first_block, p.numel() // format.block)
    if format.span > 1:  # a record of many blocks draws by its place in block space
        counters = (first_block + torch.arange(counts.numel())) * format.block
    p, kept, counts = p.view(-1, elements), kept.view(-1, elements), counts.view(-1, format.span)
    mask = (torch.arange(format.block) < counts.unsqueeze(-1)).view(-1, elements).to(p.device)
    records, left = _FAMILIES[format.family].encode(
        p,
        kept,
        (counts if format.span > 1 else counts.squeeze(1)).to(p.device),
        format,
        key,
        counters[:: format.span].to(p.device),
    )
    records[counts.sum(1) == 0] = 0
    payload.view(-1, format.record_bytes).copy_(records)
    if residual is not None:
        flat = torch.where(mask, left, 0.0).view(-1)[: residual.numel()]
        used = (counts.view(-1, 1) > 0).expand(-1, format.block).reshape(-1)[: flat.numel()]
        residual[: flat.numel()] = torch.where(used.to(p.device), flat, residual[: flat.numel()])


def encode(
    source: Tensor,
    layout: Tensor,
    format: list[int],
    residual: Tensor | None,
    payload: Tensor,
    gain: Tensor | None,
    key: int,
) -> None:
    """See ``schemas.py``."""
    job = checks.encode(source, layout, format, residual, payload, gain)
    fmt, rows = job.format, job.rows
    p = torch.zeros(job.blocks * fmt.block, device=source.device)
    for offset, numel, first, _ in rows:
        p[first * fmt.block : first * fmt.block + numel] = source[offset : offset + numel].float()
    if gain is not None:
        p *= gain
    kept = torch.zeros_like(p)
    if residual is not None:
        used = min(residual.numel(), kept.numel())
        kept[:used] = residual[:used]
        p += kept
    _encode(p, kept, fmt, residual, payload, rows, key, 0)


def _check_indices(records: Tensor, fmt: Format) -> None:
    check = getattr(_FAMILIES[fmt.family], "check", None)
    if check is not None:
        check(records, fmt)


def _mean(payloads: Tensor, fmt: Format) -> Tensor:
    records = payloads.reshape(payloads.size(0), -1, fmt.record_bytes)
    _check_indices(records, fmt)
    mean: Tensor = _FAMILIES[fmt.family].mean(records, fmt)
    return mean.view(-1, fmt.block)


def decode_mean(
    payloads: Tensor, layout: Tensor, format: list[int], block_begin: int, out: Tensor
) -> None:
    """See ``schemas.py``."""
    job = checks.decode_mean(payloads, layout, format, block_begin, out)
    fmt, rows = job.format, job.rows
    flat = _mean(payloads, fmt).view(-1)
    begin, end = block_begin * fmt.block, block_begin * fmt.block + flat.numel()
    for offset, numel, first, _ in rows:
        low, high = max(first * fmt.block, begin), min(first * fmt.block + numel, end)
        if low < high:
            target = offset + low - first * fmt.block
            out[target : target + high - low] = flat[low - begin : high - begin].to(out.dtype)


def reduce_encode(
    payloads: Tensor,
    layout: Tensor,
    format: list[int],
    block_begin: int,
    residual: Tensor | None,
    payload: Tensor,
    key: int,
) -> None:
    """See ``schemas.py``."""
    job = checks.reduce_encode(payloads, layout, format, block_begin, residual, payload)
    fmt, rows = job.format, job.rows
    mean = _mean(payloads, fmt)
    counts, _ = _blocks(rows, fmt, block_begin, mean.size(0))
    inside = torch.arange(fmt.block) < counts.unsqueeze(-1)
    p = torch.where(inside.to(mean.device), mean, 0.0).view(-1)
    kept = torch.zeros_like(p)
    if residual is not None:
        kept.copy_(residual[: p.numel()])
        p = p + kept
    _encode(p, kept, fmt, residual, payload, rows, key, block_begin)


def topk_mask_(payload: Tensor, layout: Tensor, format: list[int], buffer: Tensor) -> None:
    """See ``schemas.py``."""
    job = checks.topk_mask_(payload, layout, format, buffer)
    fmt, rows = job.format, job.rows
    records = payload.reshape(-1, fmt.record_bytes)
    _check_indices(records.unsqueeze(0), fmt)
    sent = _FAMILIES[fmt.family].sent(records, fmt).view(-1)
    for _, numel, first, _ in rows:
        inside = slice(first * fmt.block, first * fmt.block + numel)
        buffer[inside] = torch.where(sent[inside], 0.0, buffer[inside])
