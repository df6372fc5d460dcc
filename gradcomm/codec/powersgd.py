"""PowerSGD: low-rank approximation by one step of subspace iteration.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, algorithms 1 and 2:

    M = g + e, as a matrix;  P <- sum of M Q;  P^ <- orthogonalize(P);  Q <- mean of M^T P^
    the mean's approximation is P^ Q^T;  e <- M - P^ Qi^T with this rank's own Qi = M^T P^
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradcomm import ops
from gradcomm.ops.reference.lowrank import LARGEST
from gradcomm.random import key_of

from .base import Codec, Recipe, SetAside, Turn
from .check import require

if TYPE_CHECKING:
    from gradcomm.part import Part


@dataclasses.dataclass(frozen=True)
class _Group:
    """Matrices of one shape, side by side: ``count`` of them, ``[n, m]`` each, sent at ``rank``."""

    count: int
    n: int
    m: int
    rank: int


@dataclasses.dataclass(frozen=True)
class PowerSGD(Codec):
    """A rank-``rank`` approximation of every matrix: ``rank * (n + m)`` floats for ``n * m``.

    A parameter of shape ``[n, …]`` is taken as a matrix of n rows. Those for which the factors are not
    smaller by ``min_compression_rate`` go plain. ``start_step``: so many first steps are plain (the
    recipe's ``warmup_steps``). ``warm_start``: each step begins with the last step's Q, which makes
    the steps together an iteration to the dominant subspace; without it Q is drawn anew each step.

    Memory: one float32 an element for the residual, and the factors. Linear: an all-reduce carries it,
    so it is as good among many ranks as among two. Safe under SGD with momentum and under Adam; large
    matrices gain the most. The orthogonalization is a Cholesky QR, done twice, in float64.
    """

    name = "powersgd"
    exchanges = ("reduce",)
    by_index = True
    in_pieces = False  # a piece more costs two rounds more, which is over what it hides
    rank: int = 4
    min_compression_rate: float = 2.0
    start_step: int = 100
    warm_start: bool = True

    def __post_init__(self) -> None:
        require(
            isinstance(self.rank, int) and self.rank >= 1,
            f"powersgd: rank={self.rank!r}; use an integer that is 1 or more",
        )
        require(
            self.min_compression_rate > 0,
            f"powersgd: min_compression_rate={self.min_compression_rate!r}; use a positive number",
        )
        require(
            isinstance(self.start_step, int) and self.start_step >= 0,
            f"powersgd: start_step={self.start_step!r}; use an integer that is 0 or more",
        )

    @property
    def recipe(self) -> Recipe:
        return Recipe(warmup_steps=self.start_step, error_feedback=True)

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        if not super().takes(shape, dtype):
            return False
        if len(shape) < 2:
            return len(shape) == 1 and shape[0] > 0  # a bucket
        n, m = shape[0], shape.numel() // shape[0]
        return n * m >= self.min_compression_rate * min(self.rank, n, m) * (n + m)

    def order(self, shapes: list[torch.Size]) -> list[int]:
        """Same-shape matrices beside one another, so that a view batches them."""
        return sorted(range(len(shapes)), key=lambda i: _matrix(shapes[i]))

    def own_slots(self, shape: torch.Size) -> dict[str, int]:
        n, m = _matrix(shape)
        return {"q": min(self.rank, n, m) * m}

    def payload_numel(self, shape: torch.Size) -> int:
        """float32 numbers that are summed over ranks for a parameter of this shape."""
        n, m = _matrix(shape)
        return min(self.rank, n, m) * (n + m)

    def rounds(self, part: Part, bucket: Tensor, turn: Turn) -> Generator[Tensor, None, None]:
        groups = _groups(part, self.rank)
        device = bucket.device
        # M = g + e, in the residual's own memory.
        if turn.error_feedback:
            flat = turn.memory.flat("residual", part)
        else:
            flat = turn.scratch.get("matrices", (part.numel,), torch.float32, device).zero_()
        views = part.views(bucket)
        unused = SetAside(part.places_in(flat, turn.unused))
        ms = _batches(flat, [(g.count, g.n, g.m) for g in groups])
        matrices = [m for batch in ms for m in batch]

        # Factors lie as rows, P^T and Q^T: products with a tall thin matrix are many times slower.
        q_flat = self._q(part, turn, groups, device)
        qs = _batches(q_flat, [(g.count, g.rank, g.m) for g in groups])
        p_shapes = [(g.count, g.rank, g.n) for g in groups]
        p_flat = turn.scratch.get("p", (_numel(p_shapes),), torch.float32, device)
        ps = _batches(p_flat, p_shapes)
        rows = [(q, p) for batch in zip(qs, ps, strict=True) for q, p in zip(*batch, strict=True)]
        for view, m, (q, p) in zip(views, matrices, rows, strict=True):
            ops.lowrank_project_(_rows(view, m), m, q, turn.gain, p)
        yield p_flat

        # A matrix that is not finite on any rank is not finite here, on every rank.
        bad = [~torch.isfinite(p).flatten(1).all(1).view(-1, 1, 1) for p in ps]
        sum_flat = turn.scratch.get("q", (q_flat.numel(),), torch.float32, device)
        sums = _batches(sum_flat, [(g.count, g.rank, g.m) for g in groups])
        for m, p, q, wrong in zip(ms, ps, sums, bad, strict=True):
            ops.orthogonalize_(p.masked_fill_(wrong, 0.0))
            for one in zip(m, p, q, strict=True):
                ops.lowrank_back_project_(*one)
            if turn.error_feedback:
                m.baddbmm_(p.transpose(1, 2), q.masked_fill(wrong, 0.0), alpha=-1)
            q.masked_fill_(wrong, float("nan"))
        if turn.error_feedback:
            _take_out(matrices, views, turn.gain, torch.cat(bad).flatten())
        unused.put_back()
        yield sum_flat

        sum_flat.div_(turn.ranks)
        factors = []
        for p, q, old in zip(ps, sums, qs, strict=True):
            factors += [(p[i].t(), q[i]) for i in range(p.size(0))]
            # A row that vanished or is not finite would stay so for ever: keep the last good one.
            norm = torch.linalg.vector_norm(q, dim=2, keepdim=True)
            good = torch.isfinite(norm) & (norm > 1e-6 * norm.amax(1, keepdim=True))
            old.copy_(torch.where(good, q, old))
        for view, (p, q) in zip(views, factors, strict=True):
            if view.is_contiguous() and view.dtype == torch.float32:
                torch.mm(p, q, out=view.view(p.size(0), q.size(1)))
            else:
                view.copy_((p @ q).view(view.shape))

    def _q(self, part: Part, turn: Turn, groups: list[_Group], device: torch.device) -> Tensor:
        """All Q of a part, by parameter in the memory; the same on every rank."""
        numels = [g.m * g.rank for g in groups for _ in range(g.count)]
        firsts = itertools.accumulate(numels[:-1], initial=0)
        places = list(zip(firsts, numels, strict=True))

        def draw(key: int, numel: int, step: int) -> Tensor:
            # By the CPU, whose generator is the same everywhere; a copy from pinned memory makes no host
            # wait.
            generator = torch.Generator().manual_seed(key_of(key, numel, step))
            drawn = torch.randn(numel, generator=generator, pin_memory=device.type == "cuda")
            return drawn.to(device, non_blocking=True)

        flat = turn.memory.flat_or_none("q", part)
        if flat is None:
            flat = torch.cat(
                [draw(k, numel, 0) for k, (_, numel) in zip(part.keys, places, strict=True)]
            )
            turn.memory.adopt("q", part, flat, places)
        if not self.warm_start:
            for k, (first, numel) in zip(part.keys, places, strict=True):
                flat[first : first + numel] = draw(k, numel, turn.step)
        return flat


def _rows(view: Tensor, matrix: Tensor) -> Tensor:
    """A gradient as a matrix, float32: itself, or a copy."""
    return view.reshape(matrix.shape).float()


def _take_out(matrices: list[Tensor], views: list[Tensor], gain: Tensor | None, bad: Tensor) -> None:
    """M <- M - gain G where the matrix was not finite on some rank: nothing was sent. What was not
    finite here had not been put in."""
    if not bad.is_cuda and not bool(bad.any()):
        return
    for m, view, wrong in zip(matrices, views, bad, strict=True):
        if bad.is_cuda or wrong:  # to ask a GPU is to wait for it
            x = _rows(view, m) if gain is None else _rows(view, m) * gain
            m.sub_(torch.where(wrong & (x.abs() < LARGEST), x, 0.0))


def _matrix(shape: torch.Size) -> tuple[int, int]:
    return shape[0], shape.numel() // shape[0]


def _groups(part: Part, rank: int) -> list[_Group]:
    shapes = (_matrix(s.shape) for s in part.slices)
    return [_Group(len(list(same)), n, m, min(rank, n, m)) for (n, m), same in itertools.groupby(shapes)]


def _numel(shapes: list[tuple[int, int, int]]) -> int:
    return sum(a * b * c for a, b, c in shapes)


def _batches(flat: Tensor, shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    """A flat tensor as batches of matrices that lie one after another in it."""
    parts = flat.split([_numel([shape]) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
