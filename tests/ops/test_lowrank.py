"""PowerSGD's passes: the kernels against the reference, and what is not finite."""

from __future__ import annotations

import pytest
import torch
from cases import executors, needs_native
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradcomm.ops import reference

INF, NAN = float("inf"), float("nan")
each = pytest.mark.parametrize("ops", executors())


def whole(*shape: int, seed: int) -> Tensor:
    """Small integers, of which every order has the same sums."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


@needs_native
@given(
    n=st.integers(1, 70),
    m=st.integers(1, 130),
    rank=st.integers(1, 9),
    gain=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 999),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_kernels_are_exact_on_integers(n: int, m: int, rank: int, gain: float | None, seed: int) -> None:
    gradient, q, factor = (
        whole(n, m, seed=seed),
        whole(rank, m, seed=seed + 1),
        whole(rank, n, seed=seed + 2),
    )
    by = None if gain is None else torch.tensor(gain)
    results = []
    for ops in (torch.ops.gradcomm, reference):
        matrix, p, back = whole(n, m, seed=seed + 3), torch.empty(rank, n), torch.full((rank, m), NAN)
        ops.lowrank_project_(gradient, matrix, q, by, p)
        ops.lowrank_back_project_(matrix, factor, back)
        results.append((matrix, p, back))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    exact = whole(n, m, seed=seed + 3) + gradient * (gain or 1.0)
    assert torch.equal(results[0][0], exact) and torch.equal(results[0][1], q @ exact.t())


@each
@pytest.mark.parametrize("bad", [INF, -INF, NAN, 2e37])
@pytest.mark.parametrize("at", [(0, 0), (5, 37), (6, 15)])
def test_what_is_not_finite_stays_out_and_is_told(ops: object, bad: float, at: tuple[int, int]) -> None:
    gradient, matrix, q = whole(7, 38, seed=1), whole(7, 38, seed=2), whole(3, 38, seed=3)
    held, exact = matrix.clone(), matrix + gradient
    gradient[at] = bad
    p = torch.empty(3, 7)
    ops.lowrank_project_(gradient, matrix, q, None, p)  # type: ignore[attr-defined]
    exact[at] = held[at]
    assert torch.equal(matrix, exact)
    assert p[:, at[0]].isnan().all()
    others = [i for i in range(7) if i != at[0]]
    assert torch.equal(p[:, others], (q @ exact.t())[:, others])


@needs_native
def test_the_number_of_threads_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, matrix, q, p = (
        torch.randn(shape, generator=generator) for shape in ((301, 703), (301, 703), (4, 703), (4, 301))
    )
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            m, projected, back = matrix.clone(), torch.empty(4, 301), torch.empty(4, 703)
            torch.ops.gradcomm.lowrank_project_(gradient, m, q, None, projected)
            torch.ops.gradcomm.lowrank_back_project_(m, p, back)
            results.append(torch.cat([m.flatten(), projected.flatten(), back.flatten()]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@each
@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((4, 6), (4, 6), (2, 5), (2, 4)), r"q is \[2, 5\]; it must be \[2, 6\]"),
        (((4, 6), (4, 6), (2, 6), (2, 3)), r"p is \[2, 3\]; it must be \[2, 4\]"),
        (((4, 6), (4, 6), (3, 6), (2, 4)), r"q is \[3, 6\]; it must be \[2, 6\]"),
        (((6, 4), (4, 6), (2, 6), (2, 4)), r"gradient is \[6, 4\], matrix \[4, 6\]"),
        (((4, 6), (24,), (2, 6), (2, 4)), "matrix must .* 2 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(
    ops: object, shapes: tuple[tuple[int, ...], ...], says: str
) -> None:
    gradient, matrix, q, p = (torch.zeros(s) for s in shapes)
    with pytest.raises((RuntimeError, ValueError), match=says):
        ops.lowrank_project_(gradient, matrix, q, None, p)  # type: ignore[attr-defined]
