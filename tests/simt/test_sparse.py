"""The CUDA kernels of the sparse top-k, run by the emulator: chunks of many slabs, thresholds that a
sample misjudges, layouts that no argument holds, payloads that nobody should send."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cases import bucket_of, gradient, same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Machine
from test_equal_bytes import decoded
from topk_cases import UNUSED, Case, cases, same, same_floats, sparse_formats

from gradcomm.ops import EXACT, FLOAT16, FLOAT32, INT8, THRESHOLD, TopKSparseFormat, reference
from gradcomm.ops.layout import Layout

EXAMPLES = settings(derandomize=True, deadline=None, max_examples=25)
SHAPES = st.sampled_from([(0, 2), (1, 1), (2, 3), (3, 100)])  # warps of a thread block, thread blocks
selects = pytest.mark.parametrize("select", [EXACT, THRESHOLD])


@given(case=cases(sparse_formats()), shape=SHAPES)
@EXAMPLES
def test_every_stage_gives_the_bytes_of_the_reference(
    library: ctypes.CDLL, case: Case, shape: tuple[int, int]
) -> None:
    simt, generator = Machine(library, *shape, case.seed), case.generator()
    table, ints = case.layout.table, case.format.ints()
    gain = None if case.seed % 2 else torch.tensor([0.37])
    e = case.residual(generator)
    other, sent = None if e is None else e.clone(), []
    for step in range(2):
        g, ours, theirs = case.bucket(generator), case.payload(), case.payload()
        simt.encode(g, table, ints, e, ours, gain, case.seed - step)
        reference.encode(g, table, ints, other, theirs, gain, case.seed - step)
        assert same(ours, theirs)
        assert e is None or (same(e, other) and bool(e.isfinite().all()))
        sent.append(ours)
    per_chunk = case.blocks // case.chunks
    begin = per_chunk * (case.chunks - 1)
    for first, payloads in (
        (0, torch.stack(sent)),
        (begin, torch.stack([p[-1:] for p in sent])),
    ):
        out = case.bucket(generator)
        expected = out.clone()
        simt.decode_mean(payloads, table, ints, first, out)
        reference.decode_mean(payloads, table, ints, first, expected)
        assert same_floats(out, expected)
    own = None if e is None else e[begin * case.format.block :].clone()
    other = None if own is None else own.clone()
    ours, theirs = torch.empty_like(sent[0][0]), torch.empty_like(sent[0][0])
    simt.reduce_encode(payloads, table, ints, begin, own, ours, case.seed)
    reference.reduce_encode(payloads, table, ints, begin, other, theirs, case.seed)
    assert same(ours, theirs)
    assert own is None or same(own, other)


@selects
@pytest.mark.parametrize("kind", ["normal", "zeros", "few", "one nan", "sorted"])
def test_a_chunk_of_many_slabs(library: ctypes.CDLL, kind: str, select: int) -> None:
    """Sampled with a stride; the last of its 23 slabs is not whole."""
    n, k = 23_000, 900
    format = TopKSparseFormat(512, -(-n // 512), k, INT8, select)
    case = Case(
        format, Layout.of([(3, n - 9000), (n, 9000)], 512), n + 9000, 1, torch.float32, kind, True, k
    )
    g = case.bucket(case.generator())
    if kind == "sorted":
        g = g.sort().values ** 9
    results = []
    for ops in (Machine(library, grid=3), reference):
        e, payload = torch.zeros(case.blocks * 512), case.payload()
        ops.encode(g, case.layout.table, format.ints(), e, payload, None, 7)
        results.append((payload, e))
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


@selects
def test_a_layout_of_more_segments_than_an_argument_takes(library: ctypes.CDLL, select: int) -> None:
    format = TopKSparseFormat(16, 200, 300, FLOAT16, select)
    bucket = bucket_of(format, [1 + i % 30 for i in range(250)], [1, 0, 2], 2)
    source = gradient(bucket.numel, torch.float32, "plain", 3)
    results = []
    for ops in (Machine(library), reference):
        payload, residual = bucket.payload(), bucket.residual()
        table, ints = bucket.layout.table, format.ints()
        ops.encode(source, table, ints, residual, payload, None, 0)
        out, buffer = decoded(ops, bucket, payload.unsqueeze(0)), torch.ones_like(residual)
        ops.topk_mask_(payload, table, ints, buffer)
        again = torch.zeros(2 * bucket.chunk_bytes, dtype=torch.uint8)
        ops.reduce_encode(torch.stack([payload, payload]), table, ints, 0, None, again, 1)
        results.append((payload, residual, out, buffer, again))
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


@selects
@pytest.mark.parametrize("value", [FLOAT32, INT8])
@pytest.mark.parametrize("bad", [2048, UNUSED - 1])
def test_an_index_out_of_bounds_becomes_nan_and_touches_nothing(
    library: ctypes.CDLL, bad: int, value: int, select: int
) -> None:
    format = TopKSparseFormat(512, 4, 40, value, select)
    bucket = bucket_of(format, [1500, 500], [2], 1)
    payload = bucket.payload()
    source = gradient(bucket.numel, torch.float32, "plain", 5)
    reference.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    for entry in (0, 17, 39):
        wrong = payload.clone()
        at = 4 * format.scales + 4 * entry
        wrong[0, at : at + 4] = torch.tensor(list(bad.to_bytes(4, "little")), dtype=torch.uint8)
        out = decoded(Machine(library), bucket, torch.stack([payload, wrong]))
        assert out[bucket.inside()].isnan().any()
        assert (out[~bucket.inside()] == 7).all()
        Machine(library).topk_mask_(wrong, bucket.layout.table, format.ints(), bucket.residual())
