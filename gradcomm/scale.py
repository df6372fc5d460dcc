"""The loss scale of mixed-precision training, and when it moves.

What error feedback remembers is in the unit of the scaled gradient. When the scale goes from s to s',
all of it is to be multiplied by s'/s before it meets the next gradient.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


class LossScale:
    """Watches a ``torch.amp.GradScaler``; without one the scale never moves. ``last``: the scale that
    the memory is in, a tensor where the scaler's is on a GPU."""

    def __init__(self) -> None:
        self._scaler: Any = None
        self.last: float | Tensor | None = None

    def attach(self, scaler: Any) -> None:
        """Raises TypeError for what has no ``get_scale``."""
        if not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(
                f"gradcomm: scaler={scaler!r} has no get_scale(); give the torch.amp.GradScaler that "
                "scales the loss"
            )
        self._scaler = scaler
        if self.last is None:
            self.last = self._read()

    @property
    def attached(self) -> bool:
        return self._scaler is not None

    def move(self) -> float | Tensor | None:
        """s'/s since the last call, or None where it is known to be 1. On a GPU the ratio is a tensor,
        so that nothing waits for it."""
        if self._scaler is None:
            return None
        old, new = self.last, self._read()
        self.last = new
        if old is None:
            return None
        if isinstance(new, Tensor) or isinstance(old, Tensor):
            return new / old
        usable = math.isfinite(new) and new > 0
        return new / old if usable and new != old else None

    def value(self) -> float | None:
        """As a number, for a checkpoint."""
        return None if self.last is None else float(self.last)

    def _read(self) -> float | Tensor:
        scale = getattr(self._scaler, "_scale", None)  # get_scale() would wait for a GPU
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            return scale.detach().clone()
        return float(self._scaler.get_scale())
