"""2 bits: a sign, and which of two levels, at those that are best for normally distributed elements.

Lloyd, "Least Squares Quantization in PCM", IEEE Trans. Inf. Theory 1982 (Max 1960):

    s = mean |p| over the block;   send sign(p), |p| > 1.23 s, s
    decoded = sign(p) s (1.893 where over, else 0.5675)
"""

from __future__ import annotations

import dataclasses

from gradcomm import ops

from .base import Recipe
from .check import require
from .refresh import RefreshedCodec


@dataclasses.dataclass(frozen=True)
class TwoBit(RefreshedCodec):
    """Two bits an element and a float32 scale for each block.

    Of a normal distribution they lose a third of what a sign alone does (0.118 of the variance, 0.363).
    ``block``: elements that share a scale, 128 to 4096, a multiple of 128.

    ``refresh``, ``normalize``: see ``RefreshedCodec``; here they are on: 0.31 byte an element in the
    mean, and 4 bytes of memory. Without error feedback, which at two bits costs more than it gives: what
    comes late turns a learning rate that is high too high (docs/results.md).
    """

    name = "twobit"
    block: int = 512
    refresh: int = dataclasses.field(default=16, kw_only=True)
    normalize: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        require(
            self.block % 128 == 0 and 128 <= self.block <= 4096,
            f"twobit: block={self.block!r}; use a multiple of 128 from 128 to 4096",
        )
        super().__post_init__()

    @property
    def recipe(self) -> Recipe:
        return Recipe(warmup_steps=100)

    def between(self, chunk_blocks: int, step: int) -> ops.Format:
        return ops.TwoBitFormat(self.block)
