"""The CUDA kernels, run by the emulator, give the bytes of the reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cases import FORMATS, bucket_of, gradient, same_bytes, same_values
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Machine
from test_equal_bytes import chunk_residual, decoded, encode_steps, make_bucket, runs

from gradcomm.ops import FLOAT16, INT8, Format, OneBitFormat, TopKBlockFormat, reference

EXAMPLES = settings(derandomize=True, deadline=None, max_examples=12)
SHAPES = st.sampled_from([(0, 2), (1, 1), (2, 3), (3, 100)])  # warps of a thread block, thread blocks
KERNELS = [
    *FORMATS,
    TopKBlockFormat(16, 1),
    TopKBlockFormat(1600, 100),
    TopKBlockFormat(480, 30, 5, FLOAT16),
    TopKBlockFormat(112, 7, 7, INT8),
    TopKBlockFormat(4112, 257, 3, INT8),
]
formats = pytest.mark.parametrize("format", KERNELS, ids=str)


@formats
@given(run=runs(), shape=SHAPES)
@EXAMPLES
def test_encode(library: ctypes.CDLL, format: Format, run: dict, shape: tuple[int, int]) -> None:
    simt = Machine(library, *shape, run["seed"])
    run = {**run, "steps": min(run["steps"], 2)}
    bucket = make_bucket(format, run)
    for ours, theirs in zip(
        encode_steps(simt, bucket, run), encode_steps(reference, bucket, run), strict=True
    ):
        assert same_bytes(ours[0], theirs[0])
        assert ours[1] is None or same_bytes(ours[1], theirs[1])


@formats
@given(run=runs(), shape=SHAPES, ranks=st.integers(1, 3))
@EXAMPLES
def test_decode_mean_and_reduce_encode(
    library: ctypes.CDLL, format: Format, run: dict, shape: tuple[int, int], ranks: int
) -> None:
    simt = Machine(library, *shape, run["seed"])
    bucket = make_bucket(format, run)
    payloads = torch.stack(
        [encode_steps(reference, bucket, {**run, "seed": run["seed"] + 10 * rank})[0][0]
         for rank in range(ranks)]
    )
    assert same_values(decoded(simt, bucket, payloads, run["dtype"]),
                       decoded(reference, bucket, payloads, run["dtype"]))
    chunk = run["seed"] % bucket.chunks
    begin, mine = chunk * bucket.chunk_blocks, payloads[:, chunk : chunk + 1].contiguous()
    outs, results = [], []
    for ops in (simt, reference):
        out = torch.full((bucket.numel,), 7.0, dtype=run["dtype"])
        ops.decode_mean(mine, bucket.layout.table, format.ints(), begin, out)
        outs.append(out)
        residual = chunk_residual(bucket, begin) if run["feedback"] else None
        payload = torch.full((bucket.chunk_bytes,), 0xA5, dtype=torch.uint8)
        ops.reduce_encode(mine, bucket.layout.table, format.ints(), begin, residual, payload, run["key"])
        results.append((payload, residual))
    assert same_values(*outs)
    assert same_bytes(results[0][0], results[1][0])
    assert not run["feedback"] or same_bytes(results[0][1], results[1][1])


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
