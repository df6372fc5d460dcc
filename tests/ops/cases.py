"""What the tests of the operators have in common: the formats, the two executors, buckets to pack."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from gradcomm.ops import (
    CastFormat,
    Format,
    Layout,
    OneBitFormat,
    QuantizeFormat,
    TopKBlockFormat,
    TwoBitFormat,
    native,
    reference,
)

#: Every format that test_equal_bytes.py compares; a new family adds its variants here.
FORMATS: list[Format] = [
    OneBitFormat(128),
    OneBitFormat(512),
    TwoBitFormat(128),
    TwoBitFormat(512),
    *(
        QuantizeFormat(block, bits, asymmetric, stochastic)
        for (block, bits), asymmetric, stochastic in itertools.product(
            ((512, 8), (128, 4), (64, 2)), (False, True), (False, True)
        )
    ),
    QuantizeFormat(192, 8),
    CastFormat(16, 0),
    CastFormat(512, 0),
    CastFormat(512, 1),
    CastFormat(48, 2),
    TopKBlockFormat(1600, 100, 1, 0),
    TopKBlockFormat(160, 10, 3, 3),
]

#: Skips what compares the kernels with the reference where there are no kernels.
needs_native = pytest.mark.skipif(
    native.missing is not None, reason=f"no native kernels: {native.missing}"
)


def executors() -> list[object]:
    """For parametrize: what runs the operators, the native ones skipped with a reason when missing. The
    reference is called as plain functions."""
    return [
        pytest.param(torch.ops.gradcomm, id="native", marks=needs_native),
        pytest.param(reference, id="reference"),
    ]


def bytes_of(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bytes_of(a), bytes_of(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """As ``same_bytes``, every NaN counting as one: IEEE leaves open which NaN a sum returns."""
    nan = torch.full_like(a, torch.nan)
    return torch.equal(a.isnan(), b.isnan()) and same_bytes(
        torch.where(a.isnan(), nan, a), torch.where(b.isnan(), nan, b)
    )


@dataclasses.dataclass
class Bucket:
    """A bucket's layout under one format, cut into chunks."""

    format: Format
    layout: Layout
    numel: int
    chunks: int

    @property
    def chunk_blocks(self) -> int:
        records = -(-self.layout.blocks // self.format.span)
        return max(1, -(-records // self.chunks)) * self.format.span

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks // self.format.span * self.format.record_bytes

    def payload(self) -> Tensor:
        """Filled with a pattern, so that a byte left unwritten shows."""
        return torch.full((self.chunks, self.chunk_bytes), 0xA5, dtype=torch.uint8)

    def residual(self) -> Tensor:
        return torch.zeros(self.layout.blocks * self.format.block)

    def inside(self) -> Tensor:
        """Which elements of the bucket the layout owns."""
        mask = torch.zeros(self.numel, dtype=torch.bool)
        for offset, numel, _, _ in self.layout.table.tolist():
            mask[offset : offset + numel] = True
        return mask

    def to_blocks(self, bucket: Tensor) -> Tensor:
        """A bucket's elements in block space, ``[blocks, block]``, zero where there are none."""
        out = torch.zeros(self.layout.blocks * self.format.block, dtype=bucket.dtype)
        for (offset, numel, _, _), (place, _) in zip(
            self.layout.table.tolist(), self.layout.places(), strict=True
        ):
            out[place : place + numel] = bucket[offset : offset + numel]
        return out.view(-1, self.format.block)


def bucket_of(format: Format, sizes: list[int], gaps: list[int], chunks: int) -> Bucket:
    """Segments of these sizes, each behind a gap of elements that nobody owns."""
    offset, segments = 0, []
    for size, gap in zip(sizes, itertools.cycle(gaps)):
        segments.append((offset + gap, size))
        offset += gap + size
    return Bucket(format, Layout.of(segments, format.block), offset + gaps[0], chunks)


SPECIAL = {
    "plain": [],
    "zeros": [0.0, -0.0],
    "denormals": [1e-45, -1e-39, 1e-38, 1e-31, -1e-30],
    "huge": [3e38, -3e38, 3.4028235e38],
    "non-finite": [torch.nan, torch.inf, -torch.inf],
}


def gradient(numel: int, dtype: torch.dtype, special: str, seed: int) -> Tensor:
    """Normal values over several magnitudes, constant stretches, and here and there a special one."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(numel, generator=generator)
    g *= (
        10.0
        ** torch.randint(-4, 3, (-(-numel // 100),), generator=generator).repeat_interleave(100)[:numel]
    )
    g[numel // 3 : numel // 2] = 0.25 if seed % 2 else 0.0
    values = SPECIAL[special]
    if values:
        at = torch.randint(0, numel, (1 + numel // 700,), generator=generator)
        g[at] = torch.tensor(values)[torch.randint(0, len(values), at.shape, generator=generator)]
        if special in ("zeros", "denormals"):  # whole blocks of nothing else as well
            g[: numel // 3] = torch.tensor(values)[
                torch.randint(0, len(values), (numel // 3,), generator=generator)
            ]
    return g.to(dtype)
