"""Local clipping by a running norm."""

from __future__ import annotations

import pytest
import torch

from gradcomm.clip import SPIKE, Clip


def test_one_bucket_is_clipped_to_the_norm() -> None:
    clip = Clip(2.0)
    g = torch.tensor([6.0, 8.0])
    assert float(clip.gain("a", g, 0)) == pytest.approx(0.2)
    assert float(clip.gain("a", g / 10, 1)) == 1.0


def test_later_buckets_count_and_earlier_ones_by_their_last_norm() -> None:
    clip = Clip(1.0)
    a, b = torch.tensor([3.0]), torch.tensor([4.0])
    clip.gain("a", a, 0)
    assert float(clip.gain("b", b, 0)) == pytest.approx(1 / 5)
    assert float(clip.gain("a", a, 1)) == pytest.approx(1 / 5)  # b's of the step before
    clip.forget("b")
    assert float(clip.gain("a", a, 2)) == pytest.approx(1 / 3)


def test_auto_leaves_usual_gradients_alone_and_takes_spikes_off() -> None:
    clip = Clip("auto")
    g = torch.tensor([5e-4])
    for step in range(20):
        assert float(clip.gain("a", g * (1 + 0.3 * (step % 2)), step)) == 1.0
    spike = float(clip.gain("a", 100 * g, 20))
    assert spike * 100 == pytest.approx(SPIKE * 1.15, rel=0.1)
    assert float(clip.gain("a", g, 21)) == 1.0
    assert float(clip.gain("a", 100 * g, 22)) * 100 < 1.2 * spike * 100  # a spike hardly moves the mean


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm", [1.0, "auto"])
def test_a_non_finite_gradient_passes_and_is_forgotten(norm: float, bad: float) -> None:
    clip = Clip(norm)
    clip.gain("a", torch.tensor([0.5]), 0)
    assert float(clip.gain("a", torch.tensor([bad]), 1)) == 1.0
    assert float(clip.gain("a", torch.tensor([0.5]), 2)) == 1.0
    assert torch.isfinite(clip.gain("b", torch.tensor([50.0]), 3))
