"""Stochastic rounding is unbiased, follows its key, and leaves alone what needs no rounding."""

from __future__ import annotations

import pytest
import torch
from cases import executors

from gradcomm import ops
from gradcomm.ops import Layout, QuantizeFormat

VARIANTS = [
    QuantizeFormat(512, bits, asymmetric, True) for bits in (2, 4, 8) for asymmetric in (False, True)
]
variants = pytest.mark.parametrize("format", VARIANTS, ids=str)
both = pytest.mark.parametrize("ops", executors())


def sent(
    ops: object, format: QuantizeFormat, source: torch.Tensor, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload, and what it decodes to."""
    layout = Layout.of([(0, source.numel())], format.block)
    payload = torch.empty(1, layout.blocks * format.record_bytes, dtype=torch.uint8)
    ops.encode(source, layout.table, format.ints(), None, payload, None, key)
    out = torch.empty_like(source)
    ops.decode_mean(payload.unsqueeze(0), layout.table, format.ints(), 0, out)
    return payload, out


@both
@variants
def test_the_mean_of_what_is_sent_is_what_was_given(format: QuantizeFormat, ops: object) -> None:
    source = torch.empty(512 * 300).uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    source[::512], source[1::512] = 1.0, -1.0  # the same step in every block
    step = 2.0 / (2**format.bits - 1) if format.asymmetric else 1.0 / (2 ** (format.bits - 1) - 1)
    errors = torch.stack([sent(ops, format, source, key)[1] - source for key in range(8)]).double()
    assert errors.abs().max() < step * (1 + 1e-5)
    # A draw's error has a standard deviation of at most step / 2; five of them for the mean of all.
    assert abs(errors.mean().item()) < 5 * step / 2 / errors.numel() ** 0.5
    # Nor may it lean on the place in the block, or on the value.
    assert errors.view(-1, 512).mean(0).abs().max() < 6 * step / 2 / (errors.numel() / 512) ** 0.5
    for low in torch.arange(-1, 1, 0.25):
        some = errors[:, (source >= low) & (source < low + 0.25)]
        assert abs(some.mean().item()) < 5 * step / 2 / some.numel() ** 0.5


@both
@variants
def test_a_key_gives_its_own_draws_and_the_same_each_time(format: QuantizeFormat, ops: object) -> None:
    source = torch.randn(2048, generator=torch.Generator().manual_seed(4))
    first, again, other = (sent(ops, format, source, key)[0] for key in (5, 5, 6))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.05
    # Two blocks with the same elements draw differently.
    twins = sent(ops, format, source[:512].repeat(2), 5)[0].view(2, -1)
    assert not torch.equal(twins[0], twins[1])


@both
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_multiples_of_the_step_are_sent_exactly(bits: int, ops: object) -> None:
    most = 2 ** (bits - 1) - 1
    source = torch.arange(-most, most + 1, dtype=torch.float32).repeat(40) * 0.5
    assert torch.equal(sent(ops, QuantizeFormat(512, bits, False, True), source, 1)[1], source)


def test_draws_belong_to_the_segment_and_not_to_its_place() -> None:
    format = QuantizeFormat(64, 8, False, True)
    g = torch.randn(300, generator=torch.Generator().manual_seed(0))
    alone = Layout.of([(0, 200)], 64, [7 << 40])
    behind = Layout.of([(0, 100), (100, 200)], 64, [3 << 40, 7 << 40])
    one = torch.zeros(1, alone.blocks * format.record_bytes, dtype=torch.uint8)
    two = torch.zeros(1, behind.blocks * format.record_bytes, dtype=torch.uint8)
    ops.encode(g[100:].contiguous(), alone.table, format.ints(), None, one, None, 5)
    ops.encode(g, behind.table, format.ints(), None, two, None, 5)
    assert torch.equal(one[0], two[0, 2 * format.record_bytes :])
