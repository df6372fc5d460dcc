"""The orthogonalization kernel, run by the emulator, beside the reference: near it, not equal, since it
sums in another order."""

from __future__ import annotations

import ctypes

import pytest
import torch
from machine import Machine
from torch import Tensor

from gradcomm.ops import reference


def both(library: ctypes.CDLL, rows: Tensor, **shape: int) -> tuple[Tensor, Tensor]:
    ours, theirs = rows.clone(), rows.clone()
    Machine(library, **shape).orthogonalize_(ours)
    reference.orthogonalize_(theirs)
    return ours, theirs


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (2, 1, 33), (3, 4, 31), (1, 5, 700), (2, 32, 100), (1, 31, 65), (1, 7, 7)],
    ids=str,
)
def test_near_the_reference_and_orthonormal(library: ctypes.CDLL, shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[1]).view(1, -1, 1)
    ours, theirs = both(library, rows)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.allclose(ours @ ours.transpose(1, 2), torch.eye(shape[1]), atol=1e-5)


def test_the_same_bits_at_any_launch_size(library: ctypes.CDLL) -> None:
    rows = torch.randn(5, 3, 900, generator=torch.Generator().manual_seed(1))
    results = [both(library, rows, warps=w, grid=g)[0] for w, g in ((0, 2), (1, 1), (3, 9))]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_zero_rows_stay_zero_and_dependent_rows_vanish(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(2)
    u, v = torch.randn(2, 1, 50, generator=generator)
    rows = torch.stack([torch.cat([u, 0 * u, 2 * u, v, -v]), torch.zeros(5, 50)])
    ours, theirs = both(library, rows)
    assert not ours[1].any() and not ours[0, 1].any()
    assert ours[0, [2, 4]].abs().max() < 1e-3
    assert torch.allclose(ours[0, [0, 3]], theirs[0, [0, 3]], atol=1e-5)


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1e30, 3e38])
def test_extreme_sizes(library: ctypes.CDLL, size: float) -> None:
    rows = torch.randn(1, 3, 60, generator=torch.Generator().manual_seed(3)).clamp(-1, 1) * size
    ours, theirs = both(library, rows)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_matrix_ends_and_leaves_its_neighbour(library: ctypes.CDLL, bad: float) -> None:
    rows = torch.randn(2, 3, 60, generator=torch.Generator().manual_seed(4))
    right, _ = both(library, rows)
    rows[0, 1, 7] = bad
    ours, _ = both(library, rows)
    assert not ours[0].isfinite().all()
    assert torch.equal(ours[1], right[1])
