"""Codecs as options: names, strings, bad values, the density ramp."""

from __future__ import annotations

import itertools

import pytest
import torch

import gradcomm
from gradcomm.codec import Cast, Dense, OneBit, PowerSGD, Quantize, RecordCodec, TopK, TwoBit, parse, rms
from gradcomm.codec.base import STEADY
from gradcomm.codec.parse import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_reads_back_as_the_same_codec(name: str) -> None:
    codec = parse(name)
    assert parse(codec.spec()) == codec


def test_names_and_options() -> None:
    assert parse("topk:density=0.004,values=int8") == TopK(density=0.004, values="int8")
    assert parse("int4") == Quantize(bits=4)
    assert parse("bf16") == Cast("bfloat16")
    assert parse("powersgd:rank=2, warm_start=False") == PowerSGD(rank=2, warm_start=False)
    assert parse("none") == Dense()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TopK(density=0), "density=0; use a share over 0 and up to 1"),
        (lambda: TopK(density=1.5), "density=1.5"),
        (lambda: TopK(k=0, rows=10), "k=0; use an integer that is 1 or more"),
        (lambda: TopK(k=5, rows=4), "rows=4; use an integer from k=5"),
        (lambda: TopK(k=5), "give both"),
        (lambda: TopK(select="best"), "select='best'; use one of"),
        (lambda: TopK(values="float8"), "values='float8'; use one of"),
        (lambda: TopK(density=1e-6), "select='exact'"),
        (
            lambda: TopK(density=0.004, refresh=16),
            "blocks of 4000 elements; 8 bits need",
        ),
        (lambda: Quantize(bits=3), "bits=3; use 2, 4 or 8"),
        (lambda: Quantize(block=100), "block=100; use a multiple of 64"),
        (lambda: Quantize(scheme="log"), "scheme='log'"),
        (lambda: Quantize(rounding="up"), "rounding='up'"),
        (lambda: OneBit(block=64), "block=64; use a multiple of 128"),
        (lambda: TwoBit(block=8192), "block=8192; use a multiple of 128"),
        (lambda: TwoBit(refresh=0), "give refresh=16"),
        (lambda: OneBit(refresh=1), "refresh=1; use 2 or more"),
        (lambda: OneBit(refresh=-16), "refresh=-16"),
        (lambda: OneBit(normalize=True), "give refresh=16"),
        (lambda: OneBit(refresh=16, normalize="rms"), "normalize='rms'"),
        (lambda: PowerSGD(rank=0), "rank=0; use an integer that is 1 or more"),
        (lambda: PowerSGD(min_compression_rate=0), "min_compression_rate=0"),
        (lambda: Cast("float8"), "dtype='float8'"),
        (lambda: parse("topk:"), None),
        (lambda: parse("topk:densty=0.1"), "unknown option 'densty=0.1'; topk takes density=…"),
        (lambda: parse("topk:density"), "unknown option 'density'"),
        (lambda: parse(""), "unknown codec ''"),
        (lambda: parse("TopK"), "unknown codec 'TopK'; use one of none, fp16"),
    ],
)
def test_bad_options_are_told_with_value_and_remedy(make, says) -> None:  # type: ignore[no-untyped-def]
    if says is None:
        make()
        return
    with pytest.raises(ValueError, match=r"^gradcomm: ") as caught:
        make()
    assert says in str(caught.value)


def test_the_ramp_falls_to_the_density_and_keeps_the_blocks() -> None:
    codec = TopK(density=0.01, ramp_steps=10, ramp_from=0.25)
    densities = [codec.density_at(step) for step in range(12)]
    assert densities[0] == 0.25 and densities[10] == densities[11] == 0.01
    assert all(a >= b for a, b in itertools.pairwise(densities))
    formats = [codec.format(8, step) for step in range(12)]
    assert {f.block for f in formats} == {1600}
    sizes = [codec.chunk_bytes(8, step) for step in range(12)]
    assert sizes[0] == 25 * sizes[-1] and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(parse(n), RecordCodec)])
@pytest.mark.parametrize("numel", [0, 1, 31, 511, 513, 100_001])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_payloads_size_follows_from_numel_and_codec(name: str, numel: int, chunks: int) -> None:
    codec = parse(name)
    assert isinstance(codec, RecordCodec)
    size = codec.payload_bytes(numel, chunks)
    assert size % chunks == 0 and size > 0
    padded = size // codec.chunk_bytes(1, STEADY) * codec.block
    assert numel <= padded < numel + (chunks + 1) * codec.block


def test_what_a_codec_has_no_kernel_for_it_does_not_take() -> None:
    for name in NAMES:
        codec = parse(name)
        if codec != Dense():
            assert not codec.takes(torch.Size([64, 64]), torch.float64)
            assert not codec.takes(torch.Size([64, 64]), torch.complex64)
            assert not codec.takes(torch.Size([0, 64]), torch.float32)


def test_the_face() -> None:
    for name in (
        "register",
        "CommState",
        "comm_hook",
        "TopK",
        "OneBit",
        "TwoBit",
        "Quantize",
        "PowerSGD",
        "Dense",
    ):
        assert hasattr(gradcomm, name)


def test_onebit_is_refreshed_at_first_and_now_and_then() -> None:
    codec = OneBit(refresh=4, normalize=True)
    assert [s for s in range(14) if codec.refreshes(s)] == [0, 1, 2, 3, 4, 8, 12]
    assert codec.chunk_bytes(8, 8) == Quantize(block=512).chunk_bytes(8, 8)
    assert codec.chunk_bytes(8, 9) == OneBit().chunk_bytes(8, 9)
    assert not any(OneBit().refreshes(s) for s in range(14))


def test_units_are_the_running_root_mean_square_and_a_floor() -> None:
    generator = torch.Generator().manual_seed(0)
    r, v = torch.ones(1000), torch.zeros(1000, dtype=torch.float64)
    loud = torch.logspace(-4, 1, 1000)
    for n in range(60):
        mean = torch.randn(1000, generator=generator) * loud
        weight = max(rms.LEAST_WEIGHT, 1 / (n + 1))
        v += weight * (mean.double().square() - v)
        r = rms.moved(r, mean, weight)
        expected = v.sqrt() + rms.FLOOR * v.sqrt().mean()
        torch.testing.assert_close(r.double(), expected, rtol=1e-3, atol=0)
    assert torch.equal(rms.moved(r, torch.zeros(1000), 0.05), r)  # nobody used it
    mean[7] = float("inf")
    kept = rms.moved(r, mean, 0.05)
    assert bool(kept.isfinite().all()) and torch.allclose(kept[7], r[7], rtol=0.1)
    fresh = torch.randn(1000, generator=generator)
    expected = fresh.abs() + rms.FLOOR * fresh.abs().mean()
    torch.testing.assert_close(rms.moved(torch.ones(1000), fresh, 0.05), expected)  # nothing was known
