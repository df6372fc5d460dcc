"""A part of a bucket: the parameters in it that one codec sends by one exchange."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gradcomm import ops
from gradcomm.codec.base import Codec


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """A parameter's place in a bucket. ``key`` is its index in the memory. ``stride`` is that of the
    parameter: DDP lays a gradient out as its parameter is (channels_last, say)."""

    key: int
    offset: int
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]
    dense: bool  # non-overlapping and dense: the bucket's view has the parameter's strides

    def view(self, bucket: Tensor) -> Tensor:
        """The parameter's gradient, as a view of the bucket."""
        if self.dense:
            return bucket.as_strided(self.shape, self.stride, bucket.storage_offset() + self.offset)
        return bucket.narrow(0, self.offset, self.numel).view(self.shape)


class Part:
    """``slices`` in the order of block space; ``whole``: they are all that the bucket holds."""

    def __init__(self, codec: Codec, exchange: str, slices: list[Slice], whole: bool) -> None:
        order = codec.order([s.shape for s in slices])
        self.codec = codec
        self.exchange = exchange
        self.slices = [slices[i] for i in order if slices[i].numel > 0]
        self.whole = whole
        segments = [(s.offset, s.numel) for s in self.slices]
        self.layout = ops.Layout.of(segments, codec.block, [s.key << 40 for s in self.slices])
        self.keys = tuple(s.key for s in self.slices)
        self.numel = self.layout.numel
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        self.end = max((s.offset + s.numel for s in self.slices), default=0)  # in the bucket

    def chunk_blocks(self, chunks: int) -> int:
        """Blocks of each of ``chunks`` equal chunks; the last ones may hold padding only."""
        return self.layout.padded(chunks) // chunks

    def views(self, bucket: Tensor) -> list[Tensor]:
        return [s.view(bucket) for s in self.slices]

    def elements(self, bucket: Tensor) -> list[Tensor]:
        """Its elements in the bucket, as flat views."""
        return [bucket[offset : offset + numel] for offset, numel, *_ in self.layout.table.tolist()]

    def by_segment(self, flat: Tensor) -> list[Tensor]:
        """What belongs to these elements in ``flat``, a tensor in block space; views."""
        return [flat[first : first + numel] for first, numel in self.layout.places()]

    def places_in(self, flat: Tensor | None, indices: tuple[int, ...], begin: int = 0) -> list[Tensor]:
        """The elements of some of the part's parameters in ``flat``, a tensor in block space, or in the
        stretch of it that starts at element ``begin``. None of None."""
        if flat is None or not indices:
            return []
        places = self.layout.places()
        stretch = [(places[i][0] - begin, places[i][0] - begin + places[i][1]) for i in indices]
        inside = [(max(0, low), min(high, flat.numel())) for low, high in stretch]
        return [flat[low:high] for low, high in inside if low < high]

    def pieces(self, count: int, blocks: int) -> list[Piece]:
        """All of block space in ``count`` pieces of ``blocks`` blocks, to be exchanged by themselves."""
        if (count, blocks) not in self._pieces:
            made = [Piece(self, i * blocks, blocks, count) for i in range(count)]
            self._pieces[count, blocks] = made
        return self._pieces[count, blocks]


class Piece(Part):
    """The blocks ``[first, first + blocks)`` of a part, exchanged by themselves, of gradients that are
    the mean of ``share`` ranks."""

    def __init__(self, part: Part, first: int, blocks: int, share: int) -> None:
        self.codec, self.exchange, self.whole = part.codec, part.exchange, False
        self.slices, self.keys = [], ()  # parameters are not whole here
        self.part, self.first, self.blocks, self.share = part, first, blocks, share
        self.layout = part.layout.piece(first, blocks)
        self.numel = self.layout.numel

    def chunk_blocks(self, chunks: int) -> int:
        return self.blocks // chunks
