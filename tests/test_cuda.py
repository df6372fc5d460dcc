"""On a GPU: the CUDA kernels give the bytes of the reference, and wait for nothing."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradcomm.ops import (
    EXACT,
    FLOAT16,
    INT8,
    THRESHOLD,
    Format,
    OneBitFormat,
    TopKBlockFormat,
    TopKSparseFormat,
    native,
    nvrtc,
    reference,
)

sys.path.insert(0, str(pathlib.Path(__file__).parent / "ops"))

from cases import FORMATS, bucket_of, gradient, same_bytes
from compare import check_decoders, check_encode
from hypothesis import strategies as st
from test_equal_bytes import runs

_no_gpu = None if torch.cuda.is_available() else "no CUDA device"
pytestmark = pytest.mark.skipif(_no_gpu is not None, reason=str(_no_gpu))
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=15)
ALL = [
    *FORMATS,
    TopKBlockFormat(1600, 100),
    TopKBlockFormat(480, 30, 5, FLOAT16),
    TopKBlockFormat(4112, 257, 3, INT8),
    TopKSparseFormat(512, 2, 30),
    TopKSparseFormat(48, 3, 144, INT8, THRESHOLD),
    TopKBlockFormat(16 * 769, 769),  # no kernels: the reference, on the GPU
]
formats = pytest.mark.parametrize("format", ALL, ids=str)


class OnDevice:
    """Operators on the GPU that take tensors of the CPU and write their results into those."""

    def __init__(self, operators: dict[str, object]) -> None:
        self.operators = operators

    def _call(self, name: str, layout_at: int, *arguments: object) -> None:
        there = [
            a.cuda() if isinstance(a, Tensor) and i != layout_at else a for i, a in enumerate(arguments)
        ]
        self.operators[name](*there)
        for here, a in zip(arguments, there, strict=True):
            if isinstance(here, Tensor) and here is not a:
                here.copy_(a)

    def encode(self, *arguments: object) -> None:
        self._call("encode", 1, *arguments)

    def decode_mean(self, *arguments: object) -> None:
        self._call("decode_mean", 1, *arguments)

    def reduce_encode(self, *arguments: object) -> None:
        self._call("reduce_encode", 1, *arguments)

    def topk_mask_(self, *arguments: object) -> None:
        self._call("topk_mask_", 1, *arguments)


def _native() -> dict[str, object]:
    return {name: getattr(torch.ops.gradcomm, name) for name in nvrtc.OPERATORS}


EXECUTORS = [
    pytest.param(
        OnDevice(_native()),
        id="native",
        marks=pytest.mark.skipif(
            native.cuda_missing is not None, reason=f"no CUDA library: {native.cuda_missing}"
        ),
    ),
    pytest.param(
        OnDevice(dict(nvrtc.OPERATORS)),
        id="nvrtc",
        marks=pytest.mark.skipif(
            nvrtc.fault() is not None, reason=f"no run-time compilation: {nvrtc.fault()}"
        ),
    ),
]
executors = pytest.mark.parametrize("ops", EXECUTORS)


@executors
@formats
@given(run=runs())
@EXAMPLES
def test_encode(ops: OnDevice, format: Format, run: dict) -> None:
    check_encode(ops, format, run)


@executors
@formats
@given(run=runs(), ranks=st.integers(1, 9))
@EXAMPLES
def test_decode_mean_and_reduce_encode(ops: OnDevice, format: Format, run: dict, ranks: int) -> None:
    check_decoders(ops, format, run, ranks)


@executors
@pytest.mark.parametrize(
    "format", [f for f in ALL if isinstance(f, TopKBlockFormat | TopKSparseFormat)], ids=str
)
def test_mask(ops: OnDevice, format: TopKBlockFormat | TopKSparseFormat) -> None:
    bucket = bucket_of(format, [1, format.block + 3, 3 * format.block - 1], [2], 2)
    payload, buffers = bucket.payload(), [torch.ones_like(bucket.residual()) for _ in range(2)]
    source = gradient(bucket.numel, torch.float32, "plain", 6)
    reference.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    for each, buffer in zip((ops, reference), buffers, strict=True):
        each.topk_mask_(payload, bucket.layout.table, format.ints(), buffer)
    assert torch.equal(*buffers)


@executors
def test_a_large_sparse_chunk(ops: OnDevice) -> None:
    for select in (EXACT, THRESHOLD):
        format = TopKSparseFormat(512, 6000, 30_000, INT8, select)
        bucket = bucket_of(format, [1_000_001, 2_000_000], [3], 1)
        source, results = gradient(bucket.numel, torch.float32, "plain", 1), []
        for each in (ops, reference):
            payload, residual = bucket.payload(), bucket.residual()
            each.encode(source, bucket.layout.table, format.ints(), residual, payload, None, 5)
            results.append((payload, residual))
        assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


@executors
def test_orthogonalize(ops: OnDevice) -> None:
    for shape in ((3, 4, 5000), (1, 32, 700), (40, 2, 33)):
        ours = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        theirs, again = ours.clone(), ours.clone()
        for rows in (ours, again):
            ops._call("orthogonalize_", -1, rows)
        reference.orthogonalize_(theirs)
        assert torch.equal(ours, again) and torch.allclose(ours, theirs, atol=1e-6)


@executors
@pytest.mark.parametrize("format", [OneBitFormat(512), TopKSparseFormat(512, 100, 500)], ids=str)
def test_nothing_waits_and_a_graph_can_capture_it(ops: OnDevice, format: Format) -> None:
    bucket = bucket_of(format, [5000, 3, 70000], [3], 2)
    source = gradient(bucket.numel, torch.float32, "plain", 1)
    expected, kept = bucket.payload(), bucket.residual()
    reference.encode(source, bucket.layout.table, format.ints(), kept, expected, None, 0)
    there, residual, payload = source.cuda(), bucket.residual().cuda(), bucket.payload().cuda()
    gain = torch.ones(1, device="cuda")
    encode = ops.operators["encode"]
    encode(there, bucket.layout.table, format.ints(), None, payload, gain, 0)  # compiles, where it must
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode(there, bucket.layout.table, format.ints(), residual, payload, gain, 0)
    payload.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bytes(payload.cpu(), expected)
    assert same_bytes(residual.cpu(), kept)


@executors
def test_the_callers_stream_is_used(ops: OnDevice) -> None:
    format = OneBitFormat(512)
    bucket = bucket_of(format, [1 << 20], [0], 1)
    source = gradient(bucket.numel, torch.float32, "plain", 2)
    expected = bucket.payload()
    reference.encode(source, bucket.layout.table, format.ints(), None, expected, None, 0)
    there, payload = torch.zeros(bucket.numel, device="cuda"), bucket.payload().cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # a launch on another stream would read the zeros
        there.copy_(source)
        ops.operators["encode"](there, bucket.layout.table, format.ints(), None, payload, None, 0)
    torch.cuda.synchronize()
    assert same_bytes(payload.cpu(), expected)
