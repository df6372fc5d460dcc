"""Local clipping: each rank scales its gradient down to a norm before the memory sees it.

With error feedback a clip after the exchange throws away mass that the memory believes was sent. But
a hook sees one bucket at a time, so the norm of the whole gradient is not known when the first bucket
leaves: here each bucket is clipped by a running norm, of this step's buckets as far as they have come
and of the last step's for the rest. Clipping a rank's own gradient bounds the mean's norm too (Lin et
al., "Deep Gradient Compression", 2018, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

#: ``"auto"`` clips to so many times the running mean of the norm: it leaves a usual gradient alone and
#: keeps a spike out of the residual, whatever the scale of the loss.
SPIKE = 2.0
_DECAY = 0.9  # of the running mean: it looks back some ten steps


class Clip:
    """``norm``: what the local gradient is clipped to; ``"auto"``: ``SPIKE`` times its running mean."""

    def __init__(self, norm: float | Literal["auto"]) -> None:
        self.norm = norm
        self.loss_scale: float | Tensor = 1.0  # ``norm`` is of the gradient before loss scaling
        self._squares: dict[object, Tensor] = {}
        self._step = -1
        self._mean: Tensor | None = None

    def gain(self, bucket_key: object, bucket: Tensor, step: int) -> Tensor:
        """One float32: what to multiply this bucket by, at most 1. A non-finite norm gives 1, since
        such a gradient must reach the others as it is; it does not enter the running norm."""
        if step != self._step:
            self._step = step
            self._end_step()
        wide = torch.float32 if bucket.element_size() < 4 else bucket.dtype
        square = torch.linalg.vector_norm(bucket, dtype=wide).float().square()
        others = [s for key, s in self._squares.items() if key != bucket_key]
        total = torch.stack([square, *others]).sum().sqrt()
        self._squares[bucket_key] = torch.where(torch.isfinite(square), square, 0.0)
        if self.norm != "auto":
            limit = torch.full_like(total, self.norm) * self.loss_scale
        elif self._mean is None:
            return torch.ones_like(total)
        else:
            limit = SPIKE * self._mean
        clipped = torch.where(total > limit, limit / total, 1.0)
        return torch.where(torch.isfinite(total), clipped, 1.0)

    def forget(self, bucket_key: object) -> None:
        """A bucket of the old layout is gone."""
        self._squares.pop(bucket_key, None)

    def scale(self, ratio: float | Tensor) -> None:
        """The loss scale moved: multiplies the running norms."""
        self._squares = {key: square * ratio * ratio for key, square in self._squares.items()}
        if self._mean is not None:
            self._mean = self._mean * ratio

    def state(self, layout: Sequence[object]) -> dict[str, Any]:
        """The running mean, or None, and the last step's squared norms of the buckets of a layout."""
        zero = torch.zeros(())
        return {
            "mean": None if self._mean is None else float(self._mean),
            "squares": [float(self._squares.get(key, zero)) for key in layout],
        }

    def load(self, state: dict[str, Any], layout: Sequence[object], device: torch.device | None) -> None:
        """Takes what ``state`` returned; ``layout`` may be empty: then the mean only."""
        mean = state["mean"]
        self._mean = None if mean is None else torch.tensor(mean, dtype=torch.float32, device=device)
        squares = [torch.tensor(s, dtype=torch.float32, device=device) for s in state["squares"]]
        self._squares = dict(zip(layout, squares, strict=False))
        self._step = -1

    def _end_step(self) -> None:
        """Takes the norm of the step that has ended into the running mean, a spike as what it was
        clipped to."""
        if not self._squares:
            return
        total = torch.stack(list(self._squares.values())).sum().sqrt()
        if self._mean is None:
            self._mean = total
        else:
            self._mean = _DECAY * self._mean + (1 - _DECAY) * torch.minimum(total, SPIKE * self._mean)
