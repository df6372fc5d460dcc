"""The CUDA kernels, run by the emulator, give the bytes of the reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cases import FORMATS, bucket_of, gradient, same_bytes
from compare import check_decoders, check_encode
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Machine
from test_equal_bytes import decoded, runs

from gradcomm.ops import (
    FLOAT16,
    FLOAT32,
    INT8,
    THRESHOLD,
    Format,
    OneBitFormat,
    TopKBlockFormat,
    TopKSparseFormat,
    nvrtc,
    reference,
)

EXAMPLES = settings(derandomize=True, deadline=None, max_examples=12)
SHAPES = st.sampled_from([(0, 2), (1, 1), (2, 3), (3, 100)])  # warps of a thread block, thread blocks
KERNELS = [
    *FORMATS,
    TopKBlockFormat(16, 1),
    TopKBlockFormat(1600, 100),
    TopKBlockFormat(480, 30, 5, FLOAT16),
    TopKBlockFormat(112, 7, 7, INT8),
    TopKBlockFormat(4112, 257, 3, INT8),
    TopKSparseFormat(512, 2, 30),
    TopKSparseFormat(48, 3, 144, INT8, THRESHOLD),
]
formats = pytest.mark.parametrize("format", KERNELS, ids=str)


@formats
@given(run=runs(), shape=SHAPES)
@EXAMPLES
def test_encode(library: ctypes.CDLL, format: Format, run: dict, shape: tuple[int, int]) -> None:
    check_encode(Machine(library, *shape, run["seed"]), format, {**run, "steps": min(run["steps"], 2)})


@formats
@given(run=runs(), shape=SHAPES, ranks=st.integers(1, 3))
@EXAMPLES
def test_decode_mean_and_reduce_encode(
    library: ctypes.CDLL, format: Format, run: dict, shape: tuple[int, int], ranks: int
) -> None:
    check_decoders(Machine(library, *shape, run["seed"]), format, run, ranks)


def test_a_layout_of_more_segments_than_a_launch_takes(library: ctypes.CDLL) -> None:
    format = OneBitFormat(128)
    bucket = bucket_of(format, [1 + i % 300 for i in range(250)], [1, 0, 2], 3)
    source = gradient(bucket.numel, torch.float32, "plain", 3)
    results = []
    for ops in (Machine(library), reference):
        payload, residual = bucket.payload(), bucket.residual()
        ops.encode(source, bucket.layout.table, format.ints(), residual, payload, None, 0)
        results.append((payload, residual, decoded(ops, bucket, payload.unsqueeze(0))))
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value", [FLOAT32, FLOAT16, INT8])
def test_a_row_out_of_bounds_becomes_nan_and_touches_nothing(library: ctypes.CDLL, value: int) -> None:
    format = TopKBlockFormat(480, 30, 2, value)
    bucket = bucket_of(format, [480, 480], [0], 1)
    payload = bucket.payload()
    source = gradient(bucket.numel, torch.float32, "plain", 5)
    reference.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    right = decoded(reference, bucket, payload.unsqueeze(0))
    payload.view(2, -1)[0, -1] = 31  # the second winner of column 15
    out = decoded(Machine(library), bucket, payload.unsqueeze(0))
    assert out[15].isnan()
    assert torch.equal(out[480:], right[480:])
    assert int((out[:480] != right[:480]).sum()) <= 2


@pytest.mark.parametrize(
    "format", [f for f in KERNELS if isinstance(f, TopKBlockFormat | TopKSparseFormat)], ids=str
)
def test_mask(library: ctypes.CDLL, format: TopKBlockFormat | TopKSparseFormat) -> None:
    bucket = bucket_of(format, [1, format.block + 3, 3 * format.block - 1], [2], 2)
    payload, buffers = bucket.payload(), [torch.ones_like(bucket.residual()) for _ in range(2)]
    source = gradient(bucket.numel, torch.float32, "non-finite", 6)
    reference.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    for ops, buffer in zip((Machine(library), reference), buffers, strict=True):
        ops.topk_mask_(payload, bucket.layout.table, format.ints(), buffer)
    assert torch.equal(*buffers)


def test_formats_without_kernels_are_left_to_the_reference(library: ctypes.CDLL) -> None:
    simt, without = Machine(library), TopKBlockFormat(16 * 769, 769)
    assert all(simt.has(format.ints()) for format in KERNELS)
    assert not simt.has(without.ints())
    for format in [*KERNELS, without]:
        assert nvrtc.has_kernels(format) == simt.has(format.ints())
