"""Local clipping: each rank scales its gradient down to a norm before the memory sees it.

With error feedback a clip after the exchange throws away mass that the memory believes was sent. But
a hook sees one bucket at a time, so the norm of the whole gradient is not known when the first bucket
leaves: here each bucket is clipped by a running norm, of this step's buckets as far as they have come
and of the last step's for the rest. Clipping a rank's own gradient bounds the mean's norm too (Lin et
al., "Deep Gradient Compression", 2018, section 3.3).
"""

from __future__ import annotations

from typing import Literal

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
            limit = torch.full_like(total, self.norm)
        elif self._mean is None:
            return torch.ones_like(total)
        else:
            limit = SPIKE * self._mean
        clipped = torch.where(total > limit, limit / total, 1.0)
        return torch.where(torch.isfinite(total), clipped, 1.0)

    def forget(self, bucket_key: object) -> None:
        """A bucket of the old layout is gone."""
        self._squares.pop(bucket_key, None)

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
