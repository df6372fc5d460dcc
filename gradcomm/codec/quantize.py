"""Linear quantization to 8, 4 or 2 bits with a scale for each block.

    symmetric:  s = max |p| / (2^(n-1) - 1);    q = round(p / s);            decoded s q
    minmax:     s = (max - min) / (2^n - 1);    q = round((p - min) / s);    decoded min + s q
    with error feedback p = g + e and e <- p - decoded

Stochastic rounding (QSGD: Alistarh et al., NeurIPS 2017) is unbiased: floor(x + u), u uniform in [0, 1).
"""

from __future__ import annotations

import dataclasses

from gradcomm import ops

from .base import Recipe, RecordCodec
from .check import require


@dataclasses.dataclass(frozen=True)
class Quantize(RecordCodec):
    """``bits`` bits an element and a float32 scale for each block of ``block`` elements.

    ``bits``: 8, 4 or 2. ``scheme``: ``"symmetric"``, or ``"minmax"`` for gradients that are not
    centred. ``rounding``: ``"nearest"`` or ``"stochastic"``. ``block``: 64 to 4096, a multiple of 64.

    8 bits to nearest need no error feedback: the safe default under every optimizer, no memory. 4 and
    2 bits use error feedback on both sides: one float32 an element.
    """

    name = "quantize"
    bits: int = 8
    block: int = 512
    scheme: str = "symmetric"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        require(self.bits in (2, 4, 8), f"quantize: bits={self.bits!r}; use 2, 4 or 8")
        require(
            isinstance(self.block, int) and self.block % 64 == 0 and 64 <= self.block <= 4096,
            f"quantize: block={self.block!r}; use a multiple of 64 from 64 to 4096",
        )
        require(
            self.scheme in ("symmetric", "minmax"),
            f"quantize: scheme={self.scheme!r}; use 'symmetric' or 'minmax'",
        )
        require(
            self.rounding in ("nearest", "stochastic"),
            f"quantize: rounding={self.rounding!r}; use 'nearest' or 'stochastic'",
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(error_feedback=self.bits < 8)

    def format(self, chunk_blocks: int, step: int) -> ops.Format:
        return ops.QuantizeFormat(
            self.block, self.bits, self.scheme == "minmax", self.rounding == "stochastic"
        )
