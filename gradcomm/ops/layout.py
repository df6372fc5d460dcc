"""Block space: how the elements of a bucket are cut into blocks.

The elements that one codec sends are a list of segments, one a parameter. Each segment starts a
block of its own, so what a parameter's blocks hold does not depend on its neighbours; the last block
of a segment may be partly empty. The same in C++ is ``csrc/device/layout.cuh``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Segments of a bucket, cut into blocks.

    ``table`` is int64 ``[segments, 4]`` on the CPU: offset in the bucket, elements, first block, and the
    counter of the random number of its first element.
    ``numel`` counts the elements, ``blocks`` the blocks they fill.
    """

    table: torch.Tensor
    block: int
    numel: int
    blocks: int

    @staticmethod
    def of(
        segments: Sequence[tuple[int, int]], block: int, origins: Sequence[int] | None = None
    ) -> Layout:
        """From ``(offset, elements)`` of each segment, in the order in which they shall lie.

        ``origins``: where each segment's random numbers begin; with one for each parameter a
        parameter draws the same whatever bucket it is in. By default its place in block space.
        """
        rows, first = [], 0
        for i, (offset, numel) in enumerate(segments):
            if numel < 1 or offset < 0:
                raise ValueError(f"gradcomm: no segment has offset {offset} and {numel} elements")
            rows.append((offset, numel, first, first * block if origins is None else origins[i]))
            first += -(-numel // block)
        table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
        return Layout(table, block, sum(n for _, n in segments), first)

    def padded(self, parts: int) -> int:
        """The blocks, rounded up to a multiple of ``parts``: at least one block a part."""
        return max(1, -(-self.blocks // parts)) * parts

    def piece(self, first: int, blocks: int) -> Layout:
        """The blocks from ``first`` on as a layout of their own; those past the end hold nothing."""
        rows = []
        for offset, numel, start, origin in self.table.tolist():
            low = max(start, first)
            high = min(start - -numel // self.block, first + blocks)
            if low < high:
                skip = (low - start) * self.block
                taken = min(numel - skip, (high - low) * self.block)
                rows.append((offset + skip, taken, low - first, origin + skip))
        table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
        return Layout(table, self.block, sum(row[1] for row in rows), blocks)

    def places(self) -> list[tuple[int, int]]:
        """``(first element in block space, elements)`` of each segment."""
        return [(first * self.block, numel) for _, numel, first, _ in self.table.tolist()]
