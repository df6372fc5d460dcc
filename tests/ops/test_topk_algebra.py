"""The two top-k formats keep the largest, lose nothing, and hide no non-finite element."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from topk_cases import UNUSED, Case, any_case, executors, few

from gradcomm.ops.format import (
    EXACT,
    FLOAT16,
    FLOAT32,
    INT8,
    THRESHOLD,
    TopKBlockFormat,
    TopKSparseFormat,
)
from gradcomm.ops.layout import Layout


@executors
@few
@given(any_case)
def test_what_is_sent_and_what_is_left_make_p(executor, case: Case) -> None:
    generator = case.generator()
    case.feedback = True
    e, g, payload = case.residual(generator), case.bucket(generator), case.payload()
    assert e is not None
    p = torch.zeros_like(e)
    for (offset, numel, _, _), (first, _) in zip(
        case.layout.table.tolist(), case.layout.places(), strict=True
    ):
        p[first : first + numel] = g[offset : offset + numel].float() + e[first : first + numel]
    executor.encode(g, case.layout.table, case.format.ints(), e, payload, None, 1)
    assert e.isfinite().all()
    out = torch.zeros(case.numel)
    executor.decode_mean(payload.unsqueeze(0), case.layout.table, case.format.ints(), 0, out)
    for (offset, numel, _, _), (first, _) in zip(
        case.layout.table.tolist(), case.layout.places(), strict=True
    ):
        want, left, got = (
            p[first : first + numel],
            e[first : first + numel],
            out[offset : offset + numel],
        )
        fine = want.isfinite() & got.isfinite()
        exact = fine & ((got == 0) | (case.format.options()[2] == FLOAT32))
        assert torch.equal((left + got)[exact], want[exact])
        torch.testing.assert_close((left + got)[fine], want[fine], rtol=1e-6, atol=1e-37)
    if not p.isfinite().all():
        assert not out.isfinite().all()


@executors
@pytest.mark.parametrize("n", [100_000, 1000, 70])
def test_exact_keeps_the_largest(executor, n: int) -> None:
    k = 100
    format = TopKSparseFormat(64, -(-n // 64) + 3, k)
    layout = Layout.of([(0, n)], 64)
    g = torch.randn(n, generator=torch.Generator().manual_seed(n))
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, layout.table, format.ints(), None, payload, None, 0)
    kept = min(k, n)
    index = payload[0, : 4 * k].view(torch.int32).long() & UNUSED
    assert torch.equal(index[:kept], torch.topk(g.abs(), kept).indices.sort().values)
    assert (index[kept:] == UNUSED).all()
    assert torch.equal(payload[0, 4 * k :].view(torch.float32)[:kept], g[index[:kept]])


@executors
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("rows", [100, 1000])
def test_block_keeps_the_largest_of_each_lane(executor, rows: int, k: int) -> None:
    format = TopKBlockFormat(16 * rows, rows, k)
    g = torch.randn(16 * rows, generator=torch.Generator().manual_seed(rows))
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    layout = Layout.of([(0, 16 * rows)], 16 * rows)
    executor.encode(g, layout.table, format.ints(), None, payload, None, 0)
    out = torch.full_like(g, 9.0)
    executor.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    tile = g.view(rows, 16)
    rows_kept = torch.topk(tile.abs(), k, dim=0).indices
    assert torch.equal(
        out.view(rows, 16), torch.zeros_like(tile).scatter(0, rows_kept, tile.gather(0, rows_kept))
    )


@executors
def test_threshold_sends_about_k_of_the_largest(executor) -> None:
    n, k = 200_000, 2000
    format = TopKSparseFormat(500 // 4 * 4 + 12, -(-n // 512), k, FLOAT32, THRESHOLD)
    layout = Layout.of([(0, n)], 512)
    g = torch.randn(n, generator=torch.Generator().manual_seed(1))
    starts = set()
    for key in range(4):
        payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
        executor.encode(g, layout.table, format.ints(), None, payload, None, key)
        index = payload[0, : 4 * k].view(torch.int32).long() & UNUSED
        index = index[index != UNUSED]
        assert index.numel() > k // 2
        assert index.unique().numel() == index.numel()
        assert g[index].abs().min() > g.abs().sort().values[-2 * k]
        starts.add(int(index[0]))
    assert len(starts) > 1, "every key begins at the same block"


@executors
@pytest.mark.parametrize("position", [0, 77_777, 99_999])
@pytest.mark.parametrize("select", [EXACT, THRESHOLD])
def test_a_quota_does_not_hide_a_non_finite_element(executor, select: int, position: int) -> None:
    n = 100_000
    format = TopKSparseFormat(512, -(-n // 512), 10, FLOAT16, select)
    layout = Layout.of([(0, n)], 512)
    g = torch.randn(n)
    g[position] = float("nan")
    e = torch.zeros(format.span * 512)
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, layout.table, format.ints(), e, payload, None, 9)
    assert e.isfinite().all()
    out = torch.empty(n)
    executor.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    assert out[position].isnan()


@executors
def test_int8_of_the_largest_float_leaves_a_finite_residual(executor) -> None:
    format = TopKBlockFormat(16, 1, 1, INT8)
    layout = Layout.of([(0, 16)], 16)
    g = torch.full((16,), torch.finfo(torch.float32).max)
    e = torch.zeros(16)
    payload = torch.empty(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, layout.table, format.ints(), e, payload, None, 0)
    out = torch.empty(16)
    executor.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    assert e.isfinite().all() and out.isfinite().all()


@executors
@few
@given(any_case)
def test_mask_zeroes_what_was_sent_and_nothing_else(executor, case: Case) -> None:
    case.kind, case.dtype = "normal", torch.float32
    format = dataclasses.replace(case.format, value=FLOAT32)
    case.format = format
    payload, g = case.payload(), case.bucket(case.generator())
    executor.encode(g, case.layout.table, format.ints(), None, payload, None, 5)
    out = torch.empty(case.numel)
    executor.decode_mean(payload.unsqueeze(0), case.layout.table, format.ints(), 0, out)
    buffer = torch.ones(case.blocks * format.block)
    executor.topk_mask_(payload, case.layout.table, format.ints(), buffer)
    for (offset, numel, _, _), (first, _) in zip(
        case.layout.table.tolist(), case.layout.places(), strict=True
    ):
        assert torch.equal(buffer[first : first + numel] == 0, out[offset : offset + numel] != 0)
        buffer[first : first + numel] = 1
    assert (buffer == 1).all()
