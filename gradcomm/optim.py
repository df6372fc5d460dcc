"""Optimizers that go with the hook's momentum correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradcomm.codec.check import require
from gradcomm.state import CommState


class SGD(torch.optim.SGD):
    """SGD with momentum, where the hook has the momentum of the gradient: with a codec that loses
    nothing it is ``torch.optim.SGD`` of the same momentum, Nesterov and weight decay.

    ``register(…, momentum=mu)`` accelerates each rank's own gradient before it is compressed (Lin et
    al., "Deep Gradient Compression", 2018, section 3.2), so the optimizer must not do it again. But
    ``torch.optim.SGD(momentum=0, weight_decay=lambda)`` would decay weights 1 / (1 - mu) times less than
    with momentum. The decay is the same on every rank and needs no exchange: its momentum is kept here,

        m <- mu m + lambda w;    w <- w - lr (d + m),  by Nesterov w - lr (d + lambda w + mu m)

    with d, what the hook left in ``grad``. Where ``weight_decay`` is 0 nothing is kept.

    Args:
        params: as of any optimizer.
        state: what ``register`` returned; ``momentum`` and ``nesterov`` are its.
        lr: the learning rate, float or tensor.
        weight_decay: lambda; may differ by parameter group.
        maximize, foreach: those of ``torch.optim.SGD``.

    ``step`` raises ValueError when a scheduler moved a group's momentum (``OneCycleLR`` does, unless
    ``cycle_momentum=False``), since the hook's stays what it was.
    """

    def __init__(
        self,
        params: Any,
        state: CommState,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=state.momentum,
            weight_decay=weight_decay,
            nesterov=state.nesterov,
            maximize=maximize,
            foreach=foreach,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step: changes the parameters in place. ``closure``, if any, evaluates the model again and
        returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        momentum = self.defaults["momentum"]
        for group in self.param_groups:
            require(
                group["momentum"] == momentum,
                f"a group's momentum is {group['momentum']}, the hook's {momentum}; let no "
                "scheduler move it (cycle_momentum=False)",
            )
        gradients = {
            p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        if any(group["weight_decay"] for group in self.param_groups):
            try:
                for p in gradients:
                    p.grad = torch.zeros_like(p)  # the decay alone is left to torch's
                super().step()
            finally:
                for p, gradient in gradients.items():
                    p.grad = gradient
        for group in self.param_groups:
            rate = group["lr"] if group["maximize"] else -group["lr"]
            for p in group["params"]:
                if p not in gradients:
                    continue
                if isinstance(rate, Tensor):
                    p.add_(gradients[p] * rate)
                else:
                    p.add_(gradients[p], alpha=rate)
        return loss
