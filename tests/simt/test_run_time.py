"""The host code of run-time compilation, its launches going to the emulator in place of CuPy."""

from __future__ import annotations

import ctypes
import types

import pytest
import torch
from cases import bucket_of, gradient, same_bytes
from compare import check_decoders, check_encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_equal_bytes import runs

from gradcomm.ops import (
    CastFormat,
    Format,
    OneBitFormat,
    QuantizeFormat,
    TopKBlockFormat,
    nvrtc,
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
    QuantizeFormat(128, 4, True, True),
    TopKBlockFormat(480, 30, 2),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


@pytest.fixture
def jit(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> object:
    library.simt_launch.restype = ctypes.c_char_p
    types_ = [None, *nvrtc._TYPE_NAMES]

    def launch(
        format: Format,
        stage: str,
        dtype: torch.dtype | None,
        device: int,
        grid: int,
        threads: int,
        shared: int,
        task: nvrtc.Task,
    ) -> None:
        number = max(0, types_.index(dtype) - 1)
        fault = library.simt_launch(
            nvrtc.STAGES.index(stage), number, grid, threads, shared, ctypes.byref(task)
        )
        assert fault is None, fault

    monkeypatch.setattr(nvrtc, "_launch", launch)
    monkeypatch.setattr(nvrtc, "_processors", lambda device: 1)
    return types.SimpleNamespace(**nvrtc.OPERATORS)


@formats
@given(run=runs(), ranks=st.integers(1, 3))
@EXAMPLES
def test_equal_to_the_reference(jit: object, format: Format, run: dict, ranks: int) -> None:
    check_encode(jit, format, run)
    check_decoders(jit, format, run, ranks)


def test_mask(jit: object) -> None:
    format = TopKBlockFormat(480, 30, 2)
    bucket = bucket_of(format, [1, 483, 1439], [2], 2)
    payload, buffers = bucket.payload(), [torch.ones_like(bucket.residual()) for _ in range(2)]
    source = gradient(bucket.numel, torch.float32, "plain", 6)
    reference.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    for ops, buffer in zip((jit, reference), buffers, strict=True):
        ops.topk_mask_(payload, bucket.layout.table, format.ints(), buffer)
    assert torch.equal(*buffers)


def test_more_segments_than_a_launch_takes(jit: object) -> None:
    format = OneBitFormat(128)
    bucket = bucket_of(format, [1 + i % 300 for i in range(250)], [1, 0, 2], 3)
    source = gradient(bucket.numel, torch.float32, "plain", 3)
    ours, theirs = bucket.payload(), bucket.payload()
    jit.encode(source, bucket.layout.table, format.ints(), None, ours, None, 0)
    reference.encode(source, bucket.layout.table, format.ints(), None, theirs, None, 0)
    assert same_bytes(ours, theirs)
