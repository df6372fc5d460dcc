"""The two top-k formats: native kernels and reference agree in every byte, and refuse the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from topk_cases import UNUSED, Case, any_case, executors, few, needs_native, same, same_floats

from gradcomm import ops
from gradcomm.ops import reference
from gradcomm.ops.format import (
    EXACT,
    FLOAT16,
    INT8,
    THRESHOLD,
    Format,
    TopKBlockFormat,
    TopKSparseFormat,
)
from gradcomm.ops.layout import Layout


@needs_native
@few
@given(any_case)
def test_encode_gives_the_same_bytes_step_after_step(case: Case) -> None:
    generator = case.generator()
    e = case.residual(generator)
    other = None if e is None else e.clone()
    gain = None if case.seed % 2 else torch.tensor([0.37])
    for step in range(3):
        g = case.bucket(generator)
        payload, expected = case.payload(), case.payload()
        key = case.seed * 77777 - step
        ops.encode(g, case.layout.table, case.format.ints(), e, payload, gain, key)
        reference.encode(g, case.layout.table, case.format.ints(), other, expected, gain, key)
        assert same(payload, expected)
        if e is not None and other is not None:
            assert same(e, other)
            assert e.isfinite().all()


@needs_native
@few
@given(any_case, st.integers(1, 3))
def test_decode_and_reduce_give_the_same_bytes(case: Case, ranks: int) -> None:
    generator = case.generator()
    payloads = torch.stack([case.payload() for _ in range(ranks)])
    for payload in payloads:
        reference.encode(
            case.bucket(generator), case.layout.table, case.format.ints(), None, payload, None, case.seed
        )
    e = case.residual(generator)
    per_chunk = case.blocks // case.chunks
    for begin, part in ((0, payloads), (per_chunk * (case.chunks - 1), payloads[:, -1:].contiguous())):
        out = case.bucket(generator)
        expected = out.clone()
        ops.decode_mean(part, case.layout.table, case.format.ints(), begin, out)
        reference.decode_mean(part, case.layout.table, case.format.ints(), begin, expected)
        assert same_floats(out, expected)

        own = None if e is None else e[begin * case.format.block :].clone()
        other = None if own is None else own.clone()
        flat = torch.empty(part[0].numel(), dtype=torch.uint8)
        wanted = torch.empty_like(flat)
        ops.reduce_encode(part, case.layout.table, case.format.ints(), begin, own, flat, case.seed)
        reference.reduce_encode(
            part, case.layout.table, case.format.ints(), begin, other, wanted, case.seed
        )
        assert same(flat, wanted)
        if own is not None and other is not None:
            assert same(own, other)
            assert own.isfinite().all()


@needs_native
@few
@given(any_case)
def test_mask_gives_the_same_bytes(case: Case) -> None:
    generator = case.generator()
    payload = case.payload()
    reference.encode(
        case.bucket(generator), case.layout.table, case.format.ints(), None, payload, None, 5
    )
    buffer = torch.randn(case.blocks * case.format.block, generator=generator)
    expected = buffer.clone()
    ops.topk_mask_(payload, case.layout.table, case.format.ints(), buffer)
    reference.topk_mask_(payload, case.layout.table, case.format.ints(), expected)
    assert same(buffer, expected)


@needs_native
@pytest.mark.parametrize("kind", ["normal", "zeros", "equal", "few", "one nan", "sorted"])
@pytest.mark.parametrize("select", [EXACT, THRESHOLD])
@pytest.mark.parametrize("k", [1, 900, 60_000])
def test_a_large_chunk_gives_the_same_bytes(kind: str, select: int, k: int) -> None:
    """Large enough that the threshold is sampled with a stride, and misjudged for some inputs."""
    n = 90_000
    format = TopKSparseFormat(512, -(-n // 512), k, INT8, select)
    layout = Layout.of([(0, n)], 512)
    case = Case(format, layout, n, 1, torch.float32, kind, True, k)
    g = case.bucket(case.generator())
    if kind == "sorted":
        g = g.sort().values ** 9
    e, other = torch.zeros(case.blocks * 512), torch.zeros(case.blocks * 512)
    payload, expected = case.payload(), case.payload()
    for key in (3, 4):
        ops.encode(g, layout.table, format.ints(), e, payload, None, key)
        reference.encode(g, layout.table, format.ints(), other, expected, None, key)
        assert same(payload, expected)
        assert same(e, other)


@executors
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("format", "place", "width", "bad"),
    [
        (TopKBlockFormat(1600, 100), -5, 1, 100),
        (TopKBlockFormat(1600, 100, 3, INT8), -16, 1, 255),
        (TopKBlockFormat(16 * 300, 300, 1, FLOAT16), -4, 2, 300),
        (TopKSparseFormat(64, 4, 5), 8, 4, 256),
        (TopKSparseFormat(64, 4, 5, INT8), 8, 4, UNUSED - 1),
    ],
    ids=str,
)
def test_a_bad_index_is_named_and_nothing_is_written(
    executor, format: Format, place: int, width: int, bad: int, rank: int
) -> None:
    blocks = 4
    n = blocks * format.block
    layout = Layout.of([(0, n)], format.block)
    size = blocks // format.span * format.record_bytes
    payload = torch.empty(1, size, dtype=torch.uint8)
    executor.encode(torch.randn(n), layout.table, format.ints(), None, payload, None, 0)
    payloads = torch.stack([payload, payload])
    place %= format.record_bytes
    payloads[rank, 0, place : place + width] = torch.tensor(
        list(bad.to_bytes(width, "little")), dtype=torch.uint8
    )
    bound = 256 if isinstance(format, TopKSparseFormat) else format.options()[0]
    message = f"index {bad}.*below {bound}"
    out, e, own = torch.full((n,), 7.0), torch.full((n,), 7.0), torch.full((size,), 7, dtype=torch.uint8)
    with pytest.raises((RuntimeError, ValueError), match=message):
        executor.decode_mean(payloads, layout.table, format.ints(), 0, out)
    with pytest.raises((RuntimeError, ValueError), match=message):
        executor.reduce_encode(payloads, layout.table, format.ints(), 0, e, own, 0)
    with pytest.raises((RuntimeError, ValueError), match=message):
        executor.topk_mask_(payloads[rank], layout.table, format.ints(), e)
    assert (out == 7).all() and (e == 7).all() and (own == 7).all()


@executors
@pytest.mark.parametrize(
    "ints",
    [
        [3, 1600, 99, 1, 0, 0],
        [3, 16, 1, 2, 0, 0],
        [3, 16, 1, 0, 0, 0],
        [3, 16, 1, 1, 2, 0],
        [3, 16 * 65536, 65536, 1, 0, 0],
        [4, 8, 1, 1, 0, 0],
        [4, 16, 0, 1, 0, 0],
        [4, 16, 1, 17, 0, 0],
        [4, 16, 1, 1, 2, 0],
        [4, 16, 1, 1, 0, 2],
        [4, 2**20, 2**12, 1, 0, 0],
    ],
    ids=str,
)
def test_a_bad_format_is_refused(executor, ints: list[int]) -> None:
    layout = Layout.of([(0, 16)], 16)
    with pytest.raises((RuntimeError, ValueError), match="bad format"):
        executor.encode(
            torch.zeros(16), layout.table, ints, None, torch.zeros(1, 64, dtype=torch.uint8), None, 0
        )


@executors
def test_mask_is_for_top_k_only(executor) -> None:
    layout = Layout.of([(0, 128)], 128)
    with pytest.raises((RuntimeError, ValueError), match="top-k"):
        executor.topk_mask_(
            torch.zeros(1, 20, dtype=torch.uint8), layout.table, [1, 128, 0, 0, 0, 0], torch.zeros(128)
        )


@pytest.mark.parametrize(
    "format",
    [TopKBlockFormat(160, 10, 2, INT8), TopKSparseFormat(160, 2, 9, FLOAT16, THRESHOLD)],
    ids=str,
)
def test_opcheck(format: Format) -> None:
    layout = Layout.of([(0, 300)], 160)
    size = 2 // format.span * format.record_bytes
    payload, e = torch.zeros(1, size, dtype=torch.uint8), torch.zeros(320)
    g, ints = torch.randn(300), format.ints()
    torch.library.opcheck(
        torch.ops.gradcomm.encode.default, (g, layout.table, ints, e, payload, torch.tensor([1.0]), 0)
    )
    torch.library.opcheck(
        torch.ops.gradcomm.decode_mean.default,
        (torch.stack([payload, payload]), layout.table, ints, 0, g),
    )
    torch.library.opcheck(
        torch.ops.gradcomm.reduce_encode.default,
        (torch.stack([payload, payload]), layout.table, ints, 0, e, payload.view(-1), 0),
    )
    torch.library.opcheck(torch.ops.gradcomm.topk_mask_.default, (payload, layout.table, ints, e))
