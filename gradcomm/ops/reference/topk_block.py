"""csrc/device/topk_block.cuh in PyTorch (Aji & Heafield 2017; Lin et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..format import INT8, LANES, Format, TopKBlockFormat
from . import topk_values


def encode(
    p: Tensor, kept: Tensor, counts: Tensor, format: Format, key: int, counters: Tensor
) -> tuple[Tensor, Tensor]:
    assert isinstance(format, TopKBlockFormat)
    keys = topk_values.order_key(p).view(-1, format.rows, LANES)
    # A stable sort: ties go to the smallest row.
    rows = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, : format.k]
    at = (rows * LANES + torch.arange(LANES, device=p.device)).flatten(1)
    values, scale, left, stays = topk_values.write(format.value, p.gather(1, at))
    residual = torch.where(torch.isfinite(p), p, kept)
    residual.scatter_(1, at, torch.where(stays, kept.gather(1, at), left))
    index = rows.to(torch.uint8 if format.rows <= 256 else torch.uint16).flatten(1)
    parts = [scale] if format.value == INT8 else []
    return torch.cat([*parts, values, index.contiguous().view(torch.uint8)], dim=1), residual


def _rows(records: Tensor, format: TopKBlockFormat) -> Tensor:
    """int64 ``[..., k, 16]``."""
    width = 1 if format.rows <= 256 else 2
    index = records[..., -format.k * LANES * width :].contiguous()
    index = index if width == 1 else index.view(torch.uint16)
    return index.long().view(*records.shape[:-1], format.k, LANES)


def check(records: Tensor, format: Format) -> None:
    assert isinstance(format, TopKBlockFormat)
    for rank, rows in enumerate(_rows(records, format)):
        worst = int(rows.max()) if rows.numel() else 0
        if worst >= format.rows:
            raise ValueError(
                f"gradcomm: the payload of rank {rank} holds the index {worst}; indices must "
                f"be below {format.rows}"
            )


def mean(records: Tensor, format: Format) -> Tensor:
    assert isinstance(format, TopKBlockFormat)
    begin = 4 if format.value == INT8 else 0
    rows = _rows(records, format)
    width = 1 if format.rows <= 256 else 2
    values = topk_values.read(
        format.value, records[..., begin : -format.k * LANES * width], records[..., :4]
    )
    values = values * (torch.ones(()) / records.size(0)).item()
    values = values.view(*records.shape[:-1], format.k, LANES)
    total = torch.zeros(records.size(1), format.rows, LANES, device=records.device)
    for rank in range(records.size(0)):
        for s in range(format.k):  # one by one: a payload that repeats a row adds in this order
            total.scatter_add_(1, rows[rank, :, s : s + 1], values[rank, :, s : s + 1])
    return total.flatten(1)


def sent(records: Tensor, format: Format) -> Tensor:
    assert isinstance(format, TopKBlockFormat)
    mask = torch.zeros(records.size(0), format.rows, LANES, dtype=torch.bool, device=records.device)
    return mask.scatter_(1, _rows(records, format), True).flatten(1)
