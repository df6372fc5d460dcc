"""The conversions of csrc/device/common.cuh agree with torch's for every half and around every tie."""

from __future__ import annotations

import pytest
import torch
from cases import needs_native, same_values

from gradcomm.ops import CastFormat, Layout

WIDE = CastFormat(64, 0)
HALVES = [torch.float16, torch.bfloat16]


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


@needs_native
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    source = all_halves(dtype)
    layout = Layout.of([(0, source.numel())], WIDE.block)
    payload = torch.empty(1, layout.blocks * WIDE.record_bytes, dtype=torch.uint8)
    torch.ops.gradcomm.encode(source, layout.table, WIDE.ints(), None, payload, None, 0)
    assert same_values(payload.view(torch.float32).view(-1), source.float())


@needs_native
@pytest.mark.parametrize("dtype", HALVES)
def test_floats_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    # Every half, the ties between neighbours, and the floats next to either; then any bits at all.
    exact = all_halves(dtype).float().view(torch.int32).view(-1, 1)
    tie = 0x1000 if dtype == torch.float16 else 0x8000
    near = (exact + torch.tensor([0, tie], dtype=torch.int32)).view(-1, 1) + torch.tensor(
        [-1, 0, 1], dtype=torch.int32
    )
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(-(2**31), 2**31, (200_003,), generator=generator).to(torch.int32)
    # Ties between denormal float16 are elsewhere: halves of odd multiples of 2^-24.
    small = (torch.arange(-4096, 4096) * 2.0**-26).view(torch.int32)
    floats = torch.cat([near.view(-1), some, small, small + 1]).view(torch.float32)
    layout = Layout.of([(0, floats.numel())], WIDE.block)
    payload = torch.zeros(1, 1, layout.blocks * WIDE.record_bytes, dtype=torch.uint8)
    payload.view(-1)[: 4 * floats.numel()] = floats.view(torch.uint8)
    out = torch.empty(floats.numel(), dtype=dtype)
    torch.ops.gradcomm.decode_mean(payload, layout.table, WIDE.ints(), 0, out)
    assert same_values(out, floats.to(dtype))


@pytest.mark.parametrize(("wire", "largest"), [(1, 65504.0), (2, torch.finfo(torch.bfloat16).max)])
def test_a_finite_value_stays_finite(wire: int, largest: float) -> None:
    fmt = CastFormat(16, wire)
    source = torch.tensor([3e38, -3.4028235e38, torch.inf, -torch.inf, torch.nan, 1.0])
    layout = Layout.of([(0, 6)], 16)
    payload = torch.empty(1, fmt.record_bytes, dtype=torch.uint8)
    residual = torch.zeros(16)
    torch.ops.gradcomm.encode(source, layout.table, fmt.ints(), residual, payload, None, 0)
    out = torch.empty(6)
    torch.ops.gradcomm.decode_mean(payload.unsqueeze(0), layout.table, fmt.ints(), 0, out)
    big = 3e38 if wire == 2 else largest
    assert out[0].item() == pytest.approx(big, rel=2**-8) and out[1].item() == -largest
    assert (
        out[2].item() == torch.inf and out[3].item() == -torch.inf and out[4].isnan() and out[5] == 1.0
    )
    assert torch.isfinite(residual).all() and not residual[2:].any()
