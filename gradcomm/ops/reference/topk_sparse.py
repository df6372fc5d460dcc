"""csrc/device/topk_sparse.cuh in PyTorch (Aji & Heafield 2017; Lin et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import EXACT, WIRE_SIZE, Format, TopKSparseFormat
from . import bits, topk_values

_UNUSED = 0xFFFFFFFF
_SAMPLE = 4096


def _start_block(key: int, first_element: int, span: int) -> int:
    return int(bits.random_bits(key, torch.tensor([first_element]), 1)) % span


def _exact(keys: Tensor, wanted: int) -> Tensor:
    # A stable sort: ties go to the smallest index.
    return torch.sort(keys, descending=True, stable=True).indices[:wanted].sort().values


def _over_threshold(keys: Tensor, wanted: int, used: int, k: int, first_index: int) -> Tensor:
    sample = keys[:: (keys.numel() // _SAMPLE) | 1]
    sample = sample[sample >= 0].sort(descending=True).values
    threshold = 1
    if sample.numel():
        threshold = max(1, int(sample[-(-wanted * sample.numel() // used) - 1]))
    if int(keys.max()) >= bits.INFINITY:
        threshold = max(threshold, bits.INFINITY)
    passed = (keys >= threshold).nonzero().view(-1)
    return torch.cat([passed[passed >= first_index], passed[passed < first_index]])[:k]


def encode(
    p: Tensor, kept: Tensor, counts: Tensor, format: Format, key: int, counters: Tensor
) -> tuple[Tensor, Tensor]:
    assert isinstance(format, TopKSparseFormat)
    counts = counts.view(-1, format.span)
    in_use = (torch.arange(format.block, device=p.device) < counts.unsqueeze(-1)).flatten(1)
    keys = torch.where(in_use, topk_values.order_key(p), -1)
    residual = torch.where(torch.isfinite(p), p, kept)
    records = torch.zeros(p.size(0), format.record_bytes, dtype=torch.uint8, device=p.device)
    for r in range(p.size(0)):
        used = int(counts[r].sum())
        wanted = min(format.k, used)
        if used == 0:
            continue
        if format.select == EXACT:
            index = _exact(keys[r], wanted)
        else:
            start = _start_block(key, int(counters[r]), format.span) * format.block
            index = _over_threshold(keys[r], wanted, used, format.k, start)
        records[r], residual[r] = _record(p[r], kept[r], residual[r], index, format)
    return records, residual


def _record(
    p: Tensor, kept: Tensor, residual: Tensor, index: Tensor, format: TopKSparseFormat
) -> tuple[Tensor, Tensor]:
    """One chunk's record, and what is left of it once these elements are sent."""
    n, scaled = index.numel(), format.SCALED
    groups = -(-format.k // scaled)
    v = torch.zeros(groups * scaled, device=p.device)
    v[:n] = p[index]
    values, scales, left, stays = topk_values.write(format.value, v.view(groups, scaled))
    residual = residual.scatter(
        0, index, torch.where(stays.flatten()[:n], kept[index], left.flatten()[:n])
    )
    entries = torch.full((format.k,), _UNUSED, dtype=torch.int64, device=p.device)
    entries[:n] = index
    parts = [
        scales.flatten()[: 4 * format.scales],
        torch.where(entries >= 2**31, entries - 2**32, entries).to(torch.int32).view(torch.uint8),
        values.flatten()[: format.k * values.size(1) // scaled],
    ]
    record = torch.zeros(format.record_bytes, dtype=torch.uint8, device=p.device)
    flat = torch.cat(parts)
    record[: flat.numel()] = flat
    return record, residual


def _indices(records: Tensor, format: TopKSparseFormat) -> Tensor:
    """int64 ``[..., k]``."""
    begin = 4 * format.scales
    index = records[..., begin : begin + 4 * format.k].contiguous().view(torch.int32)
    return index.long() & _UNUSED


def check(records: Tensor, format: Format) -> None:
    assert isinstance(format, TopKSparseFormat)
    bound = format.span * format.block
    for rank, index in enumerate(_indices(records, format)):
        worst = int(torch.where(index == _UNUSED, 0, index).max()) if index.numel() else 0
        if worst >= bound:
            raise ValueError(
                f"gradcomm: the payload of rank {rank} holds the index {worst}; indices must "
                f"be below {bound}"
            )


def _values(records: Tensor, format: TopKSparseFormat) -> Tensor:
    """float32 ``[..., k]``."""
    begin = 4 * (format.scales + format.k)
    flat = records[..., begin:]
    if not format.scales:
        return topk_values.read(format.value, flat[..., : WIRE_SIZE[format.value] * format.k], flat)
    shape = (*records.shape[:-1], format.scales)
    grouped = torch.zeros(*shape, format.SCALED, dtype=torch.uint8, device=records.device)
    grouped.flatten(-2)[..., : format.k] = flat[..., : format.k]
    scales = records[..., : 4 * format.scales].reshape(*shape, 4)
    return topk_values.read(format.value, grouped, scales).flatten(-2)[..., : format.k]


def mean(records: Tensor, format: Format) -> Tensor:
    assert isinstance(format, TopKSparseFormat)
    total = torch.zeros(records.size(1), format.span * format.block, device=records.device)
    index = _indices(records, format)
    values = _values(records, format) * (torch.ones(()) / records.size(0)).item()
    for rank in range(records.size(0)):
        for r in range(records.size(1)):
            used = index[rank, r] != _UNUSED
            total[r].index_add_(0, index[rank, r][used], values[rank, r][used])
    return total


def sent(records: Tensor, format: Format) -> Tensor:
    assert isinstance(format, TopKSparseFormat)
    mask = torch.zeros(
        records.size(0), format.span * format.block, dtype=torch.bool, device=records.device
    )
    for r, index in enumerate(_indices(records, format)):
        mask[r, index[index != _UNUSED]] = True
    return mask
