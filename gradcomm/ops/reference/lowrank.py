"""csrc/cpu/lowrank.h in PyTorch: PowerSGD's passes over a matrix (Vogels et al. 2019, algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks

LARGEST = 1e37  # elements from here up count as not finite


def lowrank_project_(
    gradient: Tensor, matrix: Tensor, q: Tensor, gain: Tensor | None, p: Tensor
) -> None:
    checks.lowrank(matrix, p, q, gradient)
    x = gradient if gain is None else gradient * gain
    good = x.abs() < LARGEST
    matrix.copy_(torch.where(good, x + matrix, matrix))
    torch.mm(q, matrix.t(), out=p)
    p.masked_fill_(~good.all(1), float("nan"))


def lowrank_back_project_(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    checks.lowrank(matrix, p, q)
    torch.mm(p, matrix, out=q)
