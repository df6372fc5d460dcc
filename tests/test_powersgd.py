"""PowerSGD's parts: orthogonalization, rank deficiency, non-finite matrices, warm start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradcomm import ops
from gradcomm.codec import PowerSGD
from gradcomm.codec.base import Scratch, Turn
from gradcomm.memory import Memory
from gradcomm.part import Part, Slice


def orthogonalize(rows: Tensor) -> Tensor:
    rows = rows.clone(memory_format=torch.contiguous_format)
    ops.orthogonalize_(rows)
    return rows


def part_of(codec: PowerSGD, *shapes: tuple[int, ...]) -> Part:
    slices, offset = [], 0
    for key, shape in enumerate(map(torch.Size, shapes)):
        strides = torch.empty(shape).stride()
        slices.append(Slice(key, offset, shape.numel(), shape, strides, True))
        offset += shape.numel()
    return Part(codec, "reduce", slices, whole=True)


def step(codec: PowerSGD, part: Part, gradients: list[Tensor], memories: list[Memory], n: int) -> Tensor:
    """One exchange among ranks played in turn; returns the mean, the same for all."""
    ranks = len(gradients)
    buckets = [g.clone() for g in gradients]
    runs = [
        codec.rounds(part, b, Turn(n, 0, None, ranks, r, memories[r], True, Scratch()))
        for r, b in enumerate(buckets)
    ]
    while True:
        payloads = [next(run, None) for run in runs]
        if payloads[0] is None:
            break
        total = torch.stack([p for p in payloads if p is not None]).sum(0)
        for p in payloads:
            assert p is not None
            p.copy_(total)
    assert all(torch.equal(b.nan_to_num(7), buckets[0].nan_to_num(7)) for b in buckets)
    return buckets[0]


@pytest.mark.parametrize("r", [1, 2, 5])
def test_rows_are_orthonormal(r: int) -> None:
    p = torch.randn(3, r, 40) * torch.logspace(-3, 3, r).view(1, r, 1)
    x = orthogonalize(p)
    assert torch.allclose(x @ x.transpose(1, 2), torch.eye(r), atol=1e-6)
    assert torch.allclose((p @ x.transpose(1, 2)) @ x, p, atol=1e-4 * float(p.abs().max()))


def test_dependent_rows_do_not_count_twice_and_zeros_stay_zero() -> None:
    u = torch.randn(1, 1, 40)
    x = orthogonalize(u.expand(1, 4, 40))
    m = torch.randn(1, 1, 1) * u
    assert torch.allclose((m @ x.transpose(1, 2)) @ x, m, atol=1e-5)
    assert not orthogonalize(torch.zeros(2, 3, 40)).any()


def test_a_low_rank_mean_is_sent_exactly_and_the_residual_is_local() -> None:
    codec = PowerSGD(rank=2, min_compression_rate=0.1)
    part = part_of(codec, (30, 20), (30, 20), (7, 9, 2))
    memories = [Memory(2), Memory(2)]
    left, right = torch.randn(30, 2), torch.randn(2, 20)
    tail = torch.randn(7 * 18)
    means = []
    for n in range(4):
        g = [
            torch.cat([(left @ right).flatten() * (1 + r), torch.zeros(600), tail * (1 + r)])
            for r in range(2)
        ]
        means.append(step(codec, part, g, memories, n))
    assert torch.allclose(means[0][:600], 1.5 * (left @ right).flatten(), atol=1e-4)
    assert not means[0][600:1200].any()
    sent = torch.stack(means).sum(0)[1200:]
    first, numel = part.layout.places()[part.keys.index(2)]
    held = sum(m.flat("residual", part)[first : first + numel] for m in memories) / 2
    assert torch.allclose(sent + held, 4 * 1.5 * tail, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_matrix_costs_that_step_and_no_more(bad: float) -> None:
    codec = PowerSGD(rank=2, min_compression_rate=0.1)
    part = part_of(codec, (30, 20), (30, 20))
    memories = [Memory(2), Memory(2)]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1200, generator=generator) for _ in range(2)]
    step(codec, part, gradients, memories, 0)
    before = [m.flat("residual", part).clone() for m in memories]
    wrong = [gradients[0].clone(), gradients[1]]
    wrong[0][3] = bad
    mean = step(codec, part, wrong, memories, 1)
    assert not torch.isfinite(mean[:600]).any() and torch.isfinite(mean[600:]).all()
    for memory, held in zip(memories, before, strict=True):
        after = memory.flat("residual", part)
        assert torch.isfinite(after).all()
        kept = torch.isfinite(after) & (torch.arange(1200) < 600) & (torch.arange(1200) != 3)
        assert torch.allclose(after[kept], held[kept], atol=1e-5)
    assert torch.isfinite(step(codec, part, gradients, memories, 2)).all()


def test_warm_start_converges_to_the_dominant_subspace() -> None:
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(40, 30, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(30, 30, generator=generator))
    matrix = u @ torch.diag(0.8 ** torch.arange(30.0)) @ v.t()
    best = (0.8 ** torch.arange(2, 30.0)).norm()
    gaps = {}
    for warm in (True, False):
        codec = PowerSGD(rank=2, min_compression_rate=0.1, warm_start=warm)
        part = part_of(codec, (40, 30))
        memory = Memory(1)
        for n in range(30):
            turn = Turn(n, 0, None, 1, 0, memory, False, Scratch())
            bucket = matrix.flatten().clone()
            for _ in codec.rounds(part, bucket, turn):
                pass
        gaps[warm] = float((bucket.view(40, 30) - matrix).norm() / best)
    assert gaps[True] < 1.02 < gaps[False]


def test_small_and_thin_matrices_are_not_taken() -> None:
    codec = PowerSGD(rank=4)
    assert codec.takes(torch.Size([64, 64]), torch.float32)
    assert codec.takes(torch.Size([64, 8, 3, 3]), torch.bfloat16)
    assert not codec.takes(torch.Size([64, 8]), torch.float32)
    assert not codec.takes(torch.Size([64, 64]), torch.float64)
    assert not codec.takes(torch.Size([0, 64]), torch.float32)
