"""The kernels and the reference give the same bytes for every format; and both keep what the formats
promise: nothing is lost between payload and residual, and nothing becomes non-finite that was finite."""

from __future__ import annotations

import pytest
import torch
from cases import (
    FORMATS,
    SPECIAL,
    Bucket,
    bucket_of,
    executors,
    gradient,
    needs_native,
    same_bytes,
    same_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradcomm.ops import CastFormat, Format, TopKBlockFormat, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=25)
formats = pytest.mark.parametrize("format", FORMATS, ids=str)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, object]:
    """Everything about a run but the format: sizes are (blocks, elements more)."""
    size = st.one_of(
        st.sampled_from([(0, 1), (0, 31), (0, 33), (1, -1), (1, 0), (1, 1)]),
        st.tuples(st.integers(1, 5), st.integers(-40, 40)),
    )
    gain = st.one_of(st.none(), st.sampled_from([1.0, 0.5, -3.0, 1e-3]))
    return {
        "sizes": draw(st.lists(size, min_size=1, max_size=6)),
        "gaps": draw(st.lists(st.integers(0, 70), min_size=1, max_size=3)),
        "chunks": draw(st.integers(1, 4)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "special": draw(st.sampled_from(sorted(SPECIAL))),
        "gain": draw(gain),
        "feedback": draw(st.booleans()),
        "steps": draw(st.integers(1, 3)),
        "key": draw(st.integers(-(2**63), 2**63 - 1)),
        "seed": draw(st.integers(0, 1000)),
    }


def make_bucket(format: Format, run: dict) -> Bucket:
    sizes = [max(1, blocks * format.block + more) for blocks, more in run["sizes"]]
    return bucket_of(format, sizes, run["gaps"], run["chunks"])


def encode_steps(ops: object, bucket: Bucket, run: dict) -> list[tuple[Tensor, Tensor | None]]:
    """Payload and residual after each step, the residual carried from one to the next."""
    residual = bucket.residual() if run["feedback"] else None
    gain = None if run["gain"] is None else torch.tensor([run["gain"]])
    done = []
    for step in range(run["steps"]):
        source = gradient(bucket.numel, run["dtype"], run["special"], run["seed"] + step)
        payload = bucket.payload()
        ops.encode(
            source, bucket.layout.table, bucket.format.ints(), residual, payload, gain, run["key"]
        )
        done.append((payload, None if residual is None else residual.clone()))
    return done


def decoded(ops: object, bucket: Bucket, payloads: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((bucket.numel,), 7.0, dtype=dtype)
    ops.decode_mean(payloads, bucket.layout.table, bucket.format.ints(), 0, out)
    return out


def chunk_residual(bucket: Bucket, begin: int) -> Tensor:
    """An eighth for each element of the chunk that begins at this block."""
    used = bucket.to_blocks(bucket.inside())[begin : begin + bucket.chunk_blocks].float() / 8
    residual = torch.zeros(bucket.chunk_blocks, bucket.format.block)
    residual[: used.size(0)] = used
    return residual.view(-1)


@needs_native
@formats
@given(run=runs())
@EXAMPLES
def test_encode_writes_the_same_payload_and_residual(format: Format, run: dict) -> None:
    bucket = make_bucket(format, run)
    for ours, theirs in zip(
        encode_steps(torch.ops.gradcomm, bucket, run), encode_steps(reference, bucket, run), strict=True
    ):
        assert same_bytes(ours[0], theirs[0])
        assert ours[1] is None or same_bytes(ours[1], theirs[1])


@needs_native
@formats
@given(run=runs(), ranks=st.integers(1, 3))
@EXAMPLES
def test_decoders_give_the_same_from_whole_payloads_and_from_chunks(
    format: Format, run: dict, ranks: int
) -> None:
    bucket = make_bucket(format, run)
    native, ints, table = torch.ops.gradcomm, format.ints(), bucket.layout.table
    payloads = torch.stack(
        [
            encode_steps(native, bucket, {**run, "seed": run["seed"] + 10 * rank})[0][0]
            for rank in range(ranks)
        ]
    )
    assert same_values(
        decoded(native, bucket, payloads, run["dtype"]),
        decoded(reference, bucket, payloads, run["dtype"]),
    )
    for chunk in range(bucket.chunks):
        begin, mine = chunk * bucket.chunk_blocks, payloads[:, chunk : chunk + 1].contiguous()
        outs, results = [], []
        for ops in (native, reference):
            out = torch.full((bucket.numel,), 7.0, dtype=run["dtype"])
            ops.decode_mean(mine, table, ints, begin, out)
            outs.append(out)
            residual = chunk_residual(bucket, begin) if run["feedback"] else None
            payload = torch.full((bucket.chunk_bytes,), 0xA5, dtype=torch.uint8)
            ops.reduce_encode(mine, table, ints, begin, residual, payload, run["key"])
            results.append((payload, residual))
        assert same_values(*outs)
        assert same_bytes(results[0][0], results[1][0])
        assert not run["feedback"] or same_bytes(results[0][1], results[1][1])


@pytest.mark.parametrize("ops", executors())
@formats
@given(run=runs())
@settings(EXAMPLES, max_examples=10)
def test_payload_and_residual_add_up(format: Format, ops: object, run: dict) -> None:
    bucket = make_bucket(format, {**run, "feedback": True})
    old = bucket.residual().view(-1, format.block)
    inside = bucket.to_blocks(bucket.inside())
    for step, (payload, residual) in enumerate(encode_steps(ops, bucket, {**run, "feedback": True})):
        left = residual.view(-1, format.block)
        assert torch.isfinite(left).all()
        assert not left[~inside].any()
        source = gradient(bucket.numel, run["dtype"], run["special"], run["seed"] + step)
        p = bucket.to_blocks(source.float()) * (1.0 if run["gain"] is None else run["gain"]) + old
        sent = bucket.to_blocks(decoded(ops, bucket, payload.unsqueeze(0)))
        finite = torch.isfinite(sent) & torch.isfinite(p) & inside
        error = (left.double() + sent.double() - p.double()).abs()
        allowed = 2.0**-23 * torch.maximum(p.abs(), sent.abs()).double() + 1e-44
        assert (error <= allowed)[finite].all()
        assert torch.equal(left[inside & ~finite], old[inside & ~finite])
        bad = ~torch.isfinite(p) & inside
        if isinstance(format, TopKBlockFormat):  # which sends the first of a lane
            assert not torch.isfinite(sent[bad.any(1)]).all(1).any()
        else:
            if not isinstance(format, CastFormat):  # which has no scale that a block shares
                bad = bad.any(1, keepdim=True) & inside
            assert not torch.isfinite(sent[bad]).any()
        old = left


@pytest.mark.parametrize("ops", executors())
@formats
def test_elements_outside_the_layout_are_untouched(format: Format, ops: object) -> None:
    bucket = bucket_of(format, [format.block + 3, 1, 31], [9, 4], 2)
    source = gradient(bucket.numel, torch.float32, "plain", 1)
    payload = bucket.payload()
    ops.encode(source, bucket.layout.table, format.ints(), None, payload, None, 0)
    out = decoded(ops, bucket, payload.unsqueeze(0))
    assert (out[~bucket.inside()] == 7.0).all()


@pytest.mark.parametrize("ops", executors())
@formats
def test_blocks_that_nobody_owns_send_zeros(format: Format, ops: object) -> None:
    bucket = bucket_of(format, [1], [0], 4)
    payload = bucket.payload()
    ops.encode(torch.ones(bucket.numel), bucket.layout.table, format.ints(), None, payload, None, 0)
    assert not payload[1:].any()
