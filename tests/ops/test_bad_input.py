"""What the operators must refuse, with an error and before they write anything; and that they keep to
their schemas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import FORMATS, Bucket, bucket_of, executors, gradient
from torch import Tensor

from gradcomm.ops import Format, OneBitFormat, QuantizeFormat, format_of

Arguments = dict[str, object]
FORMAT = OneBitFormat(128)


def example(format: Format = FORMAT) -> Bucket:
    return bucket_of(format, [2 * format.block + 5, 40], [3], 2)


def encode_arguments(format: Format = FORMAT) -> Arguments:
    bucket = example(format)
    return {
        "source": gradient(bucket.numel, torch.float32, "plain", 0),
        "layout": bucket.layout.table,
        "format": format.ints(),
        "residual": bucket.residual(),
        "payload": bucket.payload(),
        "gain": torch.ones(1),
        "key": 3,
    }


def decode_arguments(format: Format = FORMAT) -> Arguments:
    bucket = example(format)
    return {
        "payloads": torch.zeros(2, bucket.chunks, bucket.chunk_bytes, dtype=torch.uint8),
        "layout": bucket.layout.table,
        "format": format.ints(),
        "block_begin": 0,
        "out": torch.full((bucket.numel,), 7.0),
    }


def reduce_arguments(format: Format = FORMAT) -> Arguments:
    bucket = example(format)
    return {
        "payloads": torch.zeros(2, 1, bucket.chunk_bytes, dtype=torch.uint8),
        "layout": bucket.layout.table,
        "format": format.ints(),
        "block_begin": 0,
        "residual": torch.zeros(bucket.chunk_blocks * format.block),
        "payload": torch.zeros(bucket.chunk_bytes, dtype=torch.uint8),
        "key": 3,
    }


MAKE = {"encode": encode_arguments, "decode_mean": decode_arguments, "reduce_encode": reduce_arguments}


def change(name: str, how: Callable[[Tensor], object]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name] = how(arguments[name])

    return apply


def row(index: int, column: int, value: int) -> Callable[[Tensor], Tensor]:
    def edit(table: Tensor) -> Tensor:
        table = table.clone()
        table[index, column] = value
        return table

    return edit


def strided(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS = {
    "leaves the bucket": row(1, 1, 10**6),
    "begins behind the bucket": row(1, 0, 10**6),
    "overflows": row(1, 0, 2**63 - 1),
    "negative offset": row(0, 0, -1),
    "no elements": row(0, 1, 0),
    "overlapping blocks": row(1, 2, 2),
    "far block": row(1, 2, 2**63 - 1),
    "blocks not increasing": row(1, 2, 0),
    "negative block": row(0, 2, -1),
    "int32": Tensor.int,
    "two columns": lambda t: t[:, :2].contiguous(),
    "flat": Tensor.flatten,
    "strided": strided,
}
FORMAT_INTS = {
    "no family": [9, 128, 0, 0, 0, 0],
    "negative family": [-1, 128, 0, 0, 0, 0],
    "few": [1, 128],
    "many": [1, 128, 0, 0, 0, 0, 0],
    "no block": [1, 0, 0, 0, 0, 0],
    "odd block": [1, 100, 0, 0, 0, 0],
    "long block": [1, 8192, 0, 0, 0, 0],
    "3 bits": [2, 128, 3, 0, 0, 0],
    "flag": [2, 128, 8, 2, 0, 0],
    "other flag": [2, 128, 8, 0, -1, 0],
    "short block": [2, 32, 8, 0, 0, 0],
    "wire": [0, 128, 3, 0, 0, 0],
    "wire block": [0, 24, 0, 0, 0, 0],
}
BUFFERS = {
    "encode": {
        "source int32": change("source", Tensor.int),
        "source float64": change("source", Tensor.double),
        "source 2-D": change("source", lambda t: t.view(1, -1)),
        "source strided": change("source", strided),
        "payload short": change("payload", lambda t: t[:1].contiguous()),
        "payload cut": change("payload", lambda t: t[:, :-1].contiguous()),
        "payload flat": change("payload", Tensor.flatten),
        "payload int8": change("payload", Tensor.char),
        "payload strided": change("payload", strided),
        "residual short": change("residual", lambda t: t[:-1].contiguous()),
        "residual float64": change("residual", Tensor.double),
        "residual bfloat16": change("residual", Tensor.bfloat16),
        "residual 2-D": change("residual", lambda t: t.view(-1, 128)),
        "residual strided": change("residual", strided),
        "gain float64": change("gain", Tensor.double),
        "two gains": change("gain", lambda t: t.repeat(2)),
    },
    "decode_mean": {
        "payloads cut": change("payloads", lambda t: t[..., :-1].contiguous()),
        "payloads 2-D": change("payloads", lambda t: t[0]),
        "no ranks": change("payloads", lambda t: t[:0]),
        "payloads int8": change("payloads", Tensor.char),
        "payloads strided": change("payloads", strided),
        "negative begin": change("block_begin", lambda _: -1),
        "far begin": change("block_begin", lambda _: 2**62),
        "out int32": change("out", Tensor.int),
        "out 2-D": change("out", lambda t: t.view(1, -1)),
        "out strided": change("out", strided),
    },
    "reduce_encode": {
        "payloads cut": change("payloads", lambda t: t[..., :-1].contiguous()),
        "no ranks": change("payloads", lambda t: t[:0]),
        "negative begin": change("block_begin", lambda _: -1),
        "payloads int8": change("payloads", Tensor.char),
        "payload short": change("payload", lambda t: t[:-1].contiguous()),
        "payload 2-D": change("payload", lambda t: t.view(1, -1)),
        "residual short": change("residual", lambda t: t[:-1].contiguous()),
        "residual float64": change("residual", Tensor.double),
    },
}
#: Faults that are there only where a bucket is known, which reduce_encode does not see.
NEEDS_BUCKET = {"leaves the bucket", "begins behind the bucket", "overflows"}


def cases() -> list[object]:
    found = []
    for op, buffers in BUFFERS.items():
        faults = dict(buffers)
        faults |= {
            f"layout {name}": change("layout", how)
            for name, how in LAYOUTS.items()
            if op != "reduce_encode" or name not in NEEDS_BUCKET
        }
        faults |= {
            f"format {name}": change("format", lambda _, ints=ints: ints)
            for name, ints in FORMAT_INTS.items()
        }
        found += [pytest.param(op, fault, id=f"{op}: {name}") for name, fault in faults.items()]
    return found


@pytest.mark.parametrize("ops", executors())
@pytest.mark.parametrize(("op", "fault"), cases())
def test_bad_input_raises_and_writes_nothing(
    op: str, fault: Callable[[Arguments], None], ops: object
) -> None:
    arguments = MAKE[op]()
    fault(arguments)
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    with pytest.raises((RuntimeError, ValueError), match="gradcomm"):
        getattr(ops, op)(*arguments.values())
    for name, value in before.items():
        assert torch.equal(arguments[name], value), f"{name} was written"


@pytest.mark.parametrize("ops", executors())
@pytest.mark.parametrize("op", MAKE)
def test_the_examples_are_good_without_a_fault(op: str, ops: object) -> None:
    getattr(ops, op)(*MAKE[op]().values())


@pytest.mark.parametrize("ints", [ints for ints in FORMAT_INTS.values() if len(ints) == 6], ids=str)
def test_python_refuses_the_same_formats(ints: list[int]) -> None:
    with pytest.raises(ValueError, match="bad format"):
        format_of(ints)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_format_survives_its_integers(format: Format) -> None:
    assert format_of(format.ints()) == format


@pytest.mark.parametrize("format", [OneBitFormat(128), QuantizeFormat(128, 8, False, True)], ids=str)
@pytest.mark.parametrize("op", MAKE)
def test_operators_keep_to_their_schemas(op: str, format: Format) -> None:
    torch.library.opcheck(getattr(torch.ops.gradcomm, op).default, tuple(MAKE[op](format).values()))
