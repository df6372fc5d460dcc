"""Top-k sparsification: the largest elements, and where they are.

Aji, Heafield: "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Lin, Han, Mao,
Wang, Dally: "Deep Gradient Compression", ICLR 2018:

    p = g + e;   send the k largest |p| and their indices;   e <- p, zero where sent
    momentum correction:   u <- mu u + g;   p = u + e;   u, e <- 0 where sent
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from gradcomm import ops

from .base import Recipe
from .check import require
from .refresh import RefreshedCodec

if TYPE_CHECKING:
    from gradcomm.part import Part

_VALUES = {"float32": ops.FLOAT32, "float16": ops.FLOAT16, "int8": ops.INT8}
_SELECT = ("block", "exact", "threshold")


@dataclasses.dataclass(frozen=True)
class TopK(RefreshedCodec):
    """The largest ``density`` of all elements, at 5 bytes each (``values="float32"``, 1 %).

    ``select``: ``"block"``, the default, keeps the ``k`` largest of every ``rows`` elements that lie
    16 apart: one pass at memory speed, and an index of one byte (two for over 256 rows). Without
    ``k`` and ``rows`` the pair is chosen for ``density``, within 2 %. ``"exact"`` keeps the largest of
    a whole chunk of the bucket, with 4-byte indices; ``"threshold"`` those over a threshold that a
    sample gives, at most as many. ``k`` is then the number kept of each chunk.

    ``values``: ``"float32"``, ``"float16"`` or ``"int8"``; their rounding error stays in the residual.

    ``ramp_steps``: over so many first compressed steps the density falls from ``ramp_from`` to
    ``density``, exponentially. With SGD use ``register``'s ``momentum``.

    ``refresh``, ``normalize``: see ``RefreshedCodec``; elements are then chosen in their units.

    A biased codec: see OneBit. Sharded, the owner keeps the same quota of the mean.
    """

    name = "topk"
    density: float = 0.01
    select: str = "block"
    values: str = "float32"
    k: int | None = None
    rows: int | None = None
    ramp_steps: int = 100
    ramp_from: float = 0.25

    def __post_init__(self) -> None:
        for name in ("density", "ramp_from"):
            value = getattr(self, name)
            require(0 < value <= 1, f"topk: {name}={value!r}; use a share over 0 and up to 1, 0.01 say")
        require(self.select in _SELECT, f"topk: select={self.select!r}; use one of {_SELECT}")
        require(self.values in _VALUES, f"topk: values={self.values!r}; use one of {tuple(_VALUES)}")
        require(
            self.k is None or (isinstance(self.k, int) and self.k >= 1),
            f"topk: k={self.k!r}; use an integer that is 1 or more, or density=",
        )
        if self.select == "block":
            require(
                (self.k is None) == (self.rows is None),
                f"topk: k={self.k!r} and rows={self.rows!r}; give both (k of every rows), or density=",
            )
        else:
            require(self.rows is None, f"topk: rows={self.rows!r} is for select='block' only")
        if self.select == "block" and self.rows is None:
            require(
                self.density >= 1 / 65535,
                f"topk: density={self.density!r}; use 1/65535 or more, or select='exact'",
            )
        if self.rows is not None and self.k is not None:
            require(
                isinstance(self.rows, int) and self.k <= self.rows <= 65535,
                f"topk: rows={self.rows!r}; use an integer from k={self.k} to 65535",
            )
        super().__post_init__()
        require(
            self.refresh == 0 or (self.block % 64 == 0 and self.block <= 4096),
            f"topk: refresh={self.refresh!r} with blocks of {self.block} elements; 8 bits need a "
            "multiple of 64 up to 4096: give k and rows, rows a multiple of 4 up to 256, or "
            "select='exact'",
        )
        require(
            isinstance(self.ramp_steps, int) and self.ramp_steps >= 0,
            f"topk: ramp_steps={self.ramp_steps!r}; use an integer that is 0 or more",
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(warmup_steps=100, clip_norm="auto", error_feedback=True)

    @property
    def _quota(self) -> tuple[int, int]:
        """k of how many rows, for block selection."""
        if self.k is not None and self.rows is not None:
            return self.k, self.rows
        return _fraction(self.density)

    @property
    def block(self) -> int:
        return 16 * self._quota[1] if self.select == "block" else 512

    def density_at(self, step: int) -> float:
        """The density at a step, counted from the first compressed one."""
        if step >= self.ramp_steps:
            return self.density
        return float(self.ramp_from * (self.density / self.ramp_from) ** (step / self.ramp_steps))

    def between(self, chunk_blocks: int, step: int) -> ops.Format:
        values = _VALUES[self.values]
        boost = self.density_at(step) / self.density
        if self.select == "block":
            k, rows = self._quota
            # The ramp moves k alone, so that blocks, and with them residuals, stay where they are.
            return ops.TopKBlockFormat(self.block, rows, min(rows, max(1, round(k * boost))), values)
        elements = chunk_blocks * self.block
        k = self.k if self.k is not None else max(1, round(self.density * elements))
        k = min(elements, max(1, round(k * boost)))
        return ops.TopKSparseFormat(self.block, chunk_blocks, k, values, _SELECT.index(self.select) - 1)

    def forget_sent(self, part: Part, payload: Tensor, format: ops.Format, momentum: Tensor) -> None:
        """Momentum factor masking (Lin et al. 2018, section 3.3): what was sent late is not to be
        carried on by the momentum that it had when it was held back."""
        if not isinstance(format, ops.QuantizeFormat):  # which sends something of every element
            ops.topk_mask_(payload, part.layout.table, format.ints(), momentum)


def _fraction(density: float) -> tuple[int, int]:
    """k of rows that meets a density within 2 %: 1 of rows where that does, else the fewest rows."""
    one = max(1, round(1 / density))
    for rows in (one, *range(1, 257)):
        k = 1 if rows == one else round(density * rows)
        if k >= 1 and abs(k / rows - density) <= 0.02 * density:
            return k, rows
    return 1, min(one, 65535)
