"""The wire formats: their options, and the size of their records.

A payload is a run of records of one size. A record stands for ``span`` blocks of ``block`` elements:
one block for every format but the sparse one, whose record is a whole chunk. The same table, for the
kernels, is ``csrc/device/formats.cuh``; each format's layout, byte by byte, is in the header of its
name beside it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

#: Wire and bucket types, in the order of ``WireType`` in csrc/device/format.cuh.
FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)
WIRE_SIZE = (4, 2, 2, 1)

#: Rows of this many lanes are what every format is laid out in.
LANES = 16


@dataclasses.dataclass(frozen=True)
class Format:
    """What one payload is made of.

    ``block`` counts elements of block space; ``ints()`` is what the operators take.
    """

    family: ClassVar[int]
    block: int

    def __post_init__(self) -> None:
        fault = self.fault()
        if fault is not None:
            raise ValueError(f"gradcomm: bad format: {fault}")

    def fault(self) -> str | None:
        """None when the options describe a format, else what is wrong with them."""
        return None

    def block_fault(self, name: str, least: int, multiple: int) -> str | None:
        good = least <= self.block <= 4096 and self.block % multiple == 0
        return None if good else f"{name} needs a block from {least} to 4096 that {multiple} divides"

    @property
    def span(self) -> int:
        """Blocks that one record stands for."""
        return 1

    @property
    def record_bytes(self) -> int:
        raise NotImplementedError

    def options(self) -> list[int]:
        return []

    def ints(self) -> list[int]:
        ints = [self.family, self.block, *self.options()]
        return ints + [0] * (6 - len(ints))


@dataclasses.dataclass(frozen=True)
class OneBitFormat(Format):
    """csrc/device/onebit.cuh: a float32 scale and a sign bit an element."""

    family: ClassVar[int] = 1

    def fault(self) -> str | None:
        return self.block_fault("onebit", 128, 128)

    @property
    def record_bytes(self) -> int:
        return 4 + self.block // 8


@dataclasses.dataclass(frozen=True)
class TwoBitFormat(Format):
    """csrc/device/twobit.cuh: a float32 scale, and for each element a sign and which of two levels."""

    family: ClassVar[int] = 5

    def fault(self) -> str | None:
        return self.block_fault("twobit", 128, 128)

    @property
    def record_bytes(self) -> int:
        return 4 + self.block // 4


@dataclasses.dataclass(frozen=True)
class QuantizeFormat(Format):
    """csrc/device/quantize.cuh: ``bits`` (2, 4 or 8) an element and a float32 step a block, symmetric
    or (``asymmetric``) from the block's least element on; rounded to nearest or stochastically."""

    family: ClassVar[int] = 2
    bits: int = 8
    asymmetric: bool = False
    stochastic: bool = False

    def fault(self) -> str | None:
        if self.bits not in (2, 4, 8):
            return "quantize needs 2, 4 or 8 bits"
        if self.asymmetric not in (0, 1) or self.stochastic not in (0, 1):
            return "quantize: asymmetric and stochastic are 0 or 1"
        return self.block_fault("quantize", 64, 64)

    @property
    def record_bytes(self) -> int:
        return (8 if self.asymmetric else 4) + self.block * self.bits // 8

    def options(self) -> list[int]:
        return [self.bits, int(self.asymmetric), int(self.stochastic)]


@dataclasses.dataclass(frozen=True)
class CastFormat(Format):
    """csrc/device/cast.cuh: every element as a ``wire`` (FLOAT32, FLOAT16 or BFLOAT16)."""

    family: ClassVar[int] = 0
    wire: int = FLOAT32

    def fault(self) -> str | None:
        if self.wire not in (FLOAT32, FLOAT16, BFLOAT16):
            return "cast needs a wire type of 0 (float32), 1 (float16) or 2 (bfloat16)"
        return self.block_fault("cast", LANES, LANES)

    @property
    def record_bytes(self) -> int:
        return self.block * WIRE_SIZE[self.wire]

    def options(self) -> list[int]:
        return [self.wire]


#: Selections of ``TopKSparseFormat``.
EXACT, THRESHOLD = range(2)


def _check_topk(format: TopKBlockFormat | TopKSparseFormat, k_most: int) -> None:
    if not 1 <= format.k <= k_most:
        raise ValueError(f"gradcomm: bad format: k must be from 1 to {k_most}, not {format.k}")
    if format.value not in (FLOAT32, FLOAT16, INT8):
        raise ValueError(
            f"gradcomm: bad format: top-k values are float32 ({FLOAT32}), float16 ({FLOAT16}) or int8 "
            f"({INT8}), not {format.value}"
        )


@dataclasses.dataclass(frozen=True)
class TopKBlockFormat(Format):
    """csrc/device/topk_block.cuh: the ``k`` largest magnitudes of each of a block's 16 lanes, as values
    and row numbers (Aji & Heafield 2017).

    ``block`` is 16 ``rows``; ``value`` is FLOAT32, FLOAT16 or INT8. Raises ValueError on other options.
    """

    family: ClassVar[int] = 3
    rows: int
    k: int = 1
    value: int = FLOAT32

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535 or self.block != LANES * self.rows:
            raise ValueError(
                "gradcomm: bad format: a top-k block has 16 x rows elements, rows from 1 to 65535, not "
                f"{self.block} elements and {self.rows} rows"
            )
        _check_topk(self, self.rows)

    @property
    def record_bytes(self) -> int:
        scale = 4 if self.value == INT8 else 0
        return scale + self.k * LANES * (WIRE_SIZE[self.value] + (1 if self.rows <= 256 else 2))

    def options(self) -> list[int]:
        return [self.rows, self.k, self.value]


@dataclasses.dataclass(frozen=True)
class TopKSparseFormat(Format):
    """csrc/device/topk_sparse.cuh: the ``k`` largest magnitudes of a chunk of ``blocks_per_chunk``
    blocks (``select`` EXACT; Aji & Heafield 2017), or up to ``k`` over a sampled threshold (THRESHOLD;
    Lin et al. 2018), as uint32 indices and values.

    ``value`` is FLOAT32, FLOAT16 or INT8. Raises ValueError on other options.
    """

    family: ClassVar[int] = 4
    #: int8 entries that share a scale.
    SCALED: ClassVar[int] = 256
    blocks_per_chunk: int
    k: int
    value: int = FLOAT32
    select: int = EXACT

    def __post_init__(self) -> None:
        if not LANES <= self.block <= 2**20 or self.block % LANES:
            raise ValueError(
                "gradcomm: bad format: a block has a multiple of 16 elements from 16 to 2^20, not "
                f"{self.block}"
            )
        if self.blocks_per_chunk < 1 or self.block * self.blocks_per_chunk > 2**31:
            raise ValueError(
                "gradcomm: bad format: a chunk has 1 block to 2^31 elements, not "
                f"{self.blocks_per_chunk} blocks of {self.block}"
            )
        if self.select not in (EXACT, THRESHOLD):
            raise ValueError(
                f"gradcomm: bad format: select is {EXACT} (exact) or {THRESHOLD} (threshold), not "
                f"{self.select}"
            )
        _check_topk(self, self.block * self.blocks_per_chunk)

    @property
    def span(self) -> int:
        return self.blocks_per_chunk

    @property
    def scales(self) -> int:
        """How many float32 scales a record begins with."""
        return -(-self.k // self.SCALED) if self.value == INT8 else 0

    @property
    def record_bytes(self) -> int:
        return -(-(4 * self.scales + self.k * (4 + WIRE_SIZE[self.value])) // 4) * 4

    def options(self) -> list[int]:
        return [self.blocks_per_chunk, self.k, self.value, self.select]


_ALL = (CastFormat, OneBitFormat, QuantizeFormat, TopKBlockFormat, TopKSparseFormat, TwoBitFormat)
_FORMATS: dict[int, type[Format]] = {f.family: f for f in _ALL}


def format_of(ints: list[int]) -> Format:
    """The format that these integers describe (the inverse of ``Format.ints``); ValueError if none."""
    if len(ints) != 6:
        raise ValueError(f"gradcomm: a format has 6 integers, not {len(ints)}")
    cls = _FORMATS.get(ints[0])
    if cls is None:
        raise ValueError(f"gradcomm: bad format: unknown family {ints[0]}")
    return cls(*ints[1 : 1 + len(dataclasses.fields(cls))])
