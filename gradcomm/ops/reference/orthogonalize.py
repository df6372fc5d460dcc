"""Orthonormal rows of small matrices, in PyTorch; by a kernel: csrc/cuda/orthogonalize.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks


def orthogonalize_(rows: Tensor) -> None:
    """See ``schemas.py``. No branch depends on the data, so a GPU never waits."""
    checks.orthogonalize_(rows)
    x = rows.double()
    eye = torch.eye(rows.size(1), dtype=torch.float64, device=rows.device)
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
    x = torch.where(norm > 0, x / norm, 0.0)
    for _ in range(2):
        factor, _ = torch.linalg.cholesky_ex(x @ x.transpose(1, 2) + 1e-12 * eye)
        x = torch.linalg.solve_triangular(factor, x, upper=False)
    rows.copy_(x)
