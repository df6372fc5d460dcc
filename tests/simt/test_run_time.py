"""The host code of run-time compilation, its launches going to the emulator in place of CuPy."""

from __future__ import annotations

import pytest
import torch
from cases import bucket_of, gradient, same_bytes
from compare import check_decoders, check_encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_equal_bytes import decoded, runs

from gradcomm.ops import (
    INT8,
    THRESHOLD,
    CastFormat,
    Format,
    OneBitFormat,
    QuantizeFormat,
    TopKBlockFormat,
    TopKSparseFormat,
    TwoBitFormat,
    reference,
)

EXAMPLES = settings(
    derandomize=True,
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FORMATS = [
    CastFormat(48, 2),
    OneBitFormat(128),
    TwoBitFormat(128),
    QuantizeFormat(128, 4, True, True),
    TopKBlockFormat(480, 30, 2),
    TopKSparseFormat(112, 4, 50),
    TopKSparseFormat(512, 3, 20, INT8, THRESHOLD),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


@formats
@given(run=runs(), ranks=st.integers(1, 3))
@EXAMPLES
def test_equal_to_the_reference(jit: object, format: Format, run: dict, ranks: int) -> None:
    check_encode(jit, format, run)
    check_decoders(jit, format, run, ranks)


@pytest.mark.parametrize("format", FORMATS[-3:], ids=str)
def test_mask(jit: object, format: Format) -> None:
    bucket = bucket_of(format, [1, 483, 1439], [2], 2)
    payload, buffers = bucket.payload(), [torch.ones_like(bucket.residual()) for _ in range(2)]
    source = gradient(bucket.numel, torch.float32, "plain", 6)
    reference.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    for ops, buffer in zip((jit, reference), buffers, strict=True):
        ops.topk_mask_(payload, bucket.layout.table, format.ints(), buffer)
    assert torch.equal(*buffers)


@pytest.mark.parametrize("format", [OneBitFormat(128), TopKSparseFormat(16, 700, 300)], ids=str)
def test_more_segments_than_a_launch_takes(jit: object, format: Format) -> None:
    bucket = bucket_of(format, [1 + i % 300 for i in range(250)], [1, 0, 2], 3)
    source = gradient(bucket.numel, torch.float32, "plain", 3)
    table, ints, results = bucket.layout.table, format.ints(), []
    for ops in (jit, reference):
        payload = bucket.payload()
        ops.encode(source, table, ints, None, payload, None, 0)
        again = torch.zeros(3 * bucket.chunk_bytes, dtype=torch.uint8)
        ops.reduce_encode(payload.unsqueeze(0), table, ints, 0, None, again, 0)
        results.append((payload, decoded(ops, bucket, payload.unsqueeze(0)), again))
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


def test_orthogonalize(jit: object) -> None:
    rows = torch.randn(3, 4, 70, generator=torch.Generator().manual_seed(0))
    ours, theirs = rows.clone(), rows.clone()
    jit.orthogonalize_(ours)
    reference.orthogonalize_(theirs)
    assert torch.allclose(ours, theirs, atol=1e-6)
    wide = torch.randn(1, 33, 40)
    ours, theirs = wide.clone(), wide.clone()
    jit.orthogonalize_(ours)  # no kernel: the reference
    reference.orthogonalize_(theirs)
    assert torch.equal(ours, theirs)
