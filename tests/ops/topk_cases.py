"""Buckets, layouts and payloads of the two top-k formats, for the tests beside this file."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from gradcomm import ops
from gradcomm.ops import native, reference
from gradcomm.ops.format import (
    EXACT,
    FLOAT16,
    FLOAT32,
    INT8,
    THRESHOLD,
    Format,
    TopKBlockFormat,
    TopKSparseFormat,
)
from gradcomm.ops.layout import Layout

VALUES = (FLOAT32, FLOAT16, INT8)
UNUSED = 0xFFFFFFFF
SPECIALS = (
    float("nan"),
    float("inf"),
    -float("inf"),
    -0.0,
    1e-40,
    -3e-45,
    3e38,
    -3.4028234663852886e38,
    65520.0,
    1e5,
    1e-31,
    1e-8,
)

needs_native = pytest.mark.skipif(
    native.missing is not None, reason=f"no native kernels: {native.missing}"
)
executors = pytest.mark.parametrize(
    "executor", [pytest.param(ops, marks=needs_native), reference], ids=["native", "reference"]
)
few = settings(derandomize=True, deadline=None, max_examples=60)


@st.composite
def block_formats(draw: st.DrawFn) -> TopKBlockFormat:
    rows = draw(st.sampled_from([1, 2, 7, 100, 256, 257, 300]))
    k = draw(st.one_of(st.just(1), st.integers(1, min(rows, 5)), st.just(min(rows, 20))))
    return TopKBlockFormat(16 * rows, rows, k, draw(st.sampled_from(VALUES)))


@st.composite
def sparse_formats(draw: st.DrawFn) -> TopKSparseFormat:
    block = draw(st.sampled_from([16, 48, 128, 512]))
    span = draw(st.integers(1, 24))
    k = draw(st.one_of(st.integers(1, min(block * span, 40)), st.integers(1, block * span)))
    return TopKSparseFormat(
        block, span, k, draw(st.sampled_from(VALUES)), draw(st.sampled_from([EXACT, THRESHOLD]))
    )


@dataclasses.dataclass
class Case:
    format: Format
    layout: Layout
    numel: int  # of the bucket
    chunks: int
    dtype: torch.dtype
    kind: str
    feedback: bool
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def bucket(self, generator: torch.Generator) -> Tensor:
        g = torch.randn(self.numel, generator=generator)
        if self.kind == "zeros":
            g.zero_()
        elif self.kind == "equal":
            g = g.sign() * 0.25
        elif self.kind == "few":
            g *= torch.rand(self.numel, generator=generator) < 0.02
        elif self.kind == "wide":
            g *= 10.0 ** torch.randint(-44, 38, (self.numel,), generator=generator)
        elif self.kind == "specials":
            for x in SPECIALS:
                g[torch.randint(self.numel, (1 + self.numel // 100,), generator=generator)] = x
        elif self.kind == "one nan":
            g[torch.randint(self.numel, (1,), generator=generator)] = float("nan")
        elif self.kind == "only specials":
            g = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (self.numel,), generator=generator)]
        return g.to(self.dtype)

    @property
    def blocks(self) -> int:
        return (
            -(-max(1, self.layout.blocks) // (self.chunks * self.format.span))
            * self.chunks
            * self.format.span
        )

    def payload(self) -> Tensor:
        records = self.blocks // self.format.span // self.chunks
        return torch.full((self.chunks, records * self.format.record_bytes), 0xAA, dtype=torch.uint8)

    def residual(self, generator: torch.Generator) -> Tensor | None:
        if not self.feedback:
            return None
        e = torch.zeros(self.blocks * self.format.block)
        for first, numel in self.layout.places():
            e[first : first + numel] = torch.randn(numel, generator=generator) * 0.5
        return e


@st.composite
def cases(draw: st.DrawFn, formats: st.SearchStrategy[Format]) -> Case:
    format = draw(formats)
    segments, offset = [], 0
    for _ in range(draw(st.integers(1, 4))):
        offset += draw(st.sampled_from([0, 3]))
        numel = draw(
            st.one_of(
                st.integers(1, 40), st.integers(1, 3 * format.block + 20), st.just(2 * format.block)
            )
        )
        segments.append((offset, numel))
        offset += numel
    layout = Layout.of(segments, format.block)
    return Case(
        format,
        layout,
        offset + draw(st.sampled_from([0, 5])),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        draw(
            st.sampled_from(
                ["normal", "zeros", "equal", "few", "wide", "specials", "one nan", "only specials"]
            )
        ),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


any_case = cases(st.one_of(block_formats(), sparse_formats()))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_floats(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for which NaN it is: a sum of two NaNs may be either."""
    a, b = a.float(), b.float()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())
