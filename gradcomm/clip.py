"""Local clipping: each rank scales its gradient down to a norm before the memory sees it.

With error feedback a clip after the exchange throws away mass that the memory believes was sent. But
a hook sees one bucket at a time, so the norm of the whole gradient is not known when the first bucket
leaves: here each bucket is clipped by a running norm, of this step's buckets as far as they have come
and of the last step's for the rest. Clipping a rank's own gradient bounds the mean's norm too (Lin et
al., "Deep Gradient Compression", 2018, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Clip:
    """``norm``: what the local gradient is clipped to."""

    def __init__(self, norm: float) -> None:
        self.norm = norm
        self._squares: dict[object, Tensor] = {}

    def gain(self, bucket_key: object, bucket: Tensor) -> Tensor:
        """One float32: what to multiply this bucket by, at most 1. A non-finite norm gives 1, since
        such a gradient must reach the others as it is; it does not enter the running norm."""
        wide = torch.float32 if bucket.element_size() < 4 else bucket.dtype
        norm = torch.linalg.vector_norm(bucket, dtype=wide).float()
        square = norm.square()
        others = [s for key, s in self._squares.items() if key != bucket_key]
        total = torch.stack([square, *others]).sum().sqrt()
        finite = torch.isfinite(total)
        self._squares[bucket_key] = torch.where(torch.isfinite(square), square, torch.zeros_like(square))
        return torch.where(finite, self.norm / total.clamp(min=self.norm), 1.0)

    def forget(self, bucket_key: object) -> None:
        """A bucket of the old layout is gone."""
        self._squares.pop(bucket_key, None)
