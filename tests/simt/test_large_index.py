"""Elements and blocks beyond 2^31: buckets and residuals that no memory holds, of which a layout uses a
few pages. An index of 32 bits anywhere would read or write elsewhere."""

from __future__ import annotations

import mmap

import pytest
import torch
from cases import needs_native, same_bytes
from torch import Tensor

from gradcomm.ops import (
    BFLOAT16,
    EXACT,
    INT8,
    THRESHOLD,
    CastFormat,
    Format,
    OneBitFormat,
    QuantizeFormat,
    TopKBlockFormat,
    TopKSparseFormat,
    reference,
)
from gradcomm.ops.layout import Layout

FAR = 2**32 + 2**20  # cut to 32 bits, signed or not, it is 2^20
MAP_NORESERVE = 0x4000  # of Linux; in mmap from Python 3.13 on
FORMATS = [
    OneBitFormat(128),
    QuantizeFormat(128, 4, True, True),
    CastFormat(48, BFLOAT16),
    TopKBlockFormat(160, 10, 2, INT8),
    TopKSparseFormat(64, 5, 40, INT8, EXACT),
    TopKSparseFormat(64, 5, 40, INT8, THRESHOLD),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=str)
NATIVE = pytest.param("native", marks=needs_native)


@pytest.fixture(params=["emulator", NATIVE])
def executor(request: pytest.FixtureRequest) -> object:
    return torch.ops.gradcomm if request.param == "native" else request.getfixturevalue("jit")


def huge(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def layout_at(format: Format, offset: int, first_block: int) -> Tensor:
    """Two segments from this element of the bucket, and this block, on."""
    table = Layout.of([(offset, 261), (offset + 300, 40)], format.block).table
    table[:, 2] += first_block
    return table


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bucket_beyond_32_bits(executor: object, format: Format, dtype: torch.dtype) -> None:
    bucket = huge(FAR + 1000, dtype)
    g = torch.randn(340, generator=torch.Generator().manual_seed(0)).to(dtype)
    bucket[FAR + 3 : FAR + 343] = g
    near, far = layout_at(format, 0, 0), layout_at(format, FAR + 3, 0)
    records = -(-8 // format.span) if format.span > 1 else -(-301 // format.block) + 1
    ours = torch.zeros(1, records * format.record_bytes, dtype=torch.uint8)
    theirs, residual = torch.zeros_like(ours), torch.zeros(records * format.span * format.block)
    expected = torch.zeros_like(residual)
    executor.encode(bucket, far, format.ints(), residual, ours, None, 1)
    reference.encode(g, near, format.ints(), expected, theirs, None, 1)
    assert same_bytes(ours, theirs) and same_bytes(residual, expected)
    executor.decode_mean(ours.unsqueeze(0), far, format.ints(), 0, bucket)
    out = torch.zeros_like(g)
    reference.decode_mean(theirs.unsqueeze(0), near, format.ints(), 0, out)
    out[261:300] = g[261:300]  # between the segments
    assert same_bytes(bucket[FAR + 3 : FAR + 343], out)


@formats
def test_blocks_beyond_32_bits(executor: object, format: Format) -> None:
    """A chunk of block space that begins there: decode_mean of it, and the owner's stage."""
    first = FAR // format.block // format.span * format.span
    near, far = layout_at(format, 0, 0), layout_at(format, 0, first)
    records = -(-8 // format.span) if format.span > 1 else -(-301 // format.block) + 1
    g = torch.randn(340, generator=torch.Generator().manual_seed(1))
    sent = torch.zeros(2, 1, records * format.record_bytes, dtype=torch.uint8)
    for payload in sent:
        reference.encode(g, near, format.ints(), None, payload, None, 2)
    outs = [torch.full_like(g, 7.0) for _ in range(2)]
    payloads, residuals = (
        torch.zeros_like(sent)[:, 0],
        torch.zeros(2, records * format.span * format.block),
    )
    for i, ops in enumerate((executor, reference)):
        ops.decode_mean(sent, far, format.ints(), first, outs[i])
        ops.reduce_encode(sent, far, format.ints(), first, residuals[i], payloads[i], 3)
    assert same_bytes(*outs) and same_bytes(*payloads) and same_bytes(*residuals)
    assert outs[0][:261].any()


@pytest.mark.parametrize("select", [EXACT, THRESHOLD])
def test_a_residual_beyond_32_bits(executor: object, select: int) -> None:
    """One chunk of 2^31 elements, of which the last are in use."""
    blocks = 2**31 // 512
    format = TopKSparseFormat(512, blocks, 100, INT8, select)
    table = layout_at(format, 0, blocks - 2)
    small = TopKSparseFormat(512, 2, 100, INT8, EXACT)
    residual, expected = huge(2**31, torch.float32), torch.zeros(1024)
    g = torch.randn(340, generator=torch.Generator().manual_seed(2))
    payload = torch.zeros(1, format.record_bytes, dtype=torch.uint8)
    executor.encode(g, table, format.ints(), residual, payload, None, 0)
    index = payload[0, 4:404].view(torch.int32).long() % 2**32
    if select == EXACT:
        theirs = torch.zeros(1, small.record_bytes, dtype=torch.uint8)
        reference.encode(g, layout_at(small, 0, 0), small.ints(), expected, theirs, None, 0)
        assert torch.equal(index, theirs[0, 4:404].view(torch.int32).long() + 2**31 - 1024)
        assert same_bytes(payload[0, 404:], theirs[0, 404:])
        assert same_bytes(residual[-1024:], expected)
    used = index != 2**32 - 1
    assert used.any() and (index[used] >= 2**31 - 1024).all()
    buffer = huge(2**31, torch.float32)
    buffer[-1024:] = 1
    executor.topk_mask_(payload, table, format.ints(), buffer)
    assert not buffer[index[used]].any() and int((buffer[-1024:] == 0).sum()) == int(used.sum())
