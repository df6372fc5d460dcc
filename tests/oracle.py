"""What error feedback must do, twice: as an equation over all steps, and simulated in plain PyTorch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradcomm
from gradcomm.codec import RecordCodec, rms
from gradcomm.codec.refresh import RefreshedCodec
from gradcomm.ops import Layout, reference

#: A rank's gradients of a step by parameter name; a parameter that is not in it is not used.
Gradients = dict[str, Tensor]


class Ledger:
    """Nothing is lost: sum of applied means + mean of residuals = sum of the exact means."""

    def __init__(self, model: nn.Module, state: gradcomm.CommState) -> None:
        self._parameters = dict(model.named_parameters())
        self._state = state
        self._balance = {n: torch.zeros_like(p) for n, p in self._parameters.items()}
        self._exact = {n: torch.zeros_like(p) for n, p in self._parameters.items()}

    def add(self, gradients: Gradients, applied: Gradients) -> None:
        """One step: this rank's gradients, and what training was given in their place."""
        for name, g in gradients.items():
            self._exact[name] += g
            self._balance[name] -= g
        for name, g in applied.items():
            self._balance[name] += g

    def gap(self) -> float:
        """The largest relative error of a parameter. Collective."""
        body = self._state.state_dict()[f"rank {dist.get_rank()}"]
        held = body["memory"]
        worst = 0.0
        for name, p in self._parameters.items():
            left = held.get("residual", {}).get(name, torch.zeros(p.numel())).clone()
            for kind, share in body["shares"].items():  # of a mean: it counts for its ranks
                if name in held.get(kind, {}):
                    left += share * held[kind][name]
            # A residual lies in memory as its gradient does; PowerSGD's, row by row.
            rows = isinstance(self._state.codec, gradcomm.PowerSGD)
            left = left.view(p.shape) if rows else left.as_strided(p.shape, p.stride())
            total = self._balance[name] + left
            exact = self._exact[name].clone()
            dist.all_reduce(total)
            dist.all_reduce(exact)
            worst = max(worst, float(total.norm() / exact.norm().clamp(min=1e-30)))
        return worst


class Simulation:
    """Error feedback of a record codec by gather, parameter by parameter, from the reference operators.
    Every rank simulates all. Only for formats that treat a block without regard to its neighbours."""

    def __init__(self, codec: RecordCodec, ranks: int) -> None:
        self._codec, self._ranks = codec, ranks
        self._residuals: dict[tuple[int, str], Tensor] = {}
        self._units: dict[str, Tensor] = {}
        self._step = 0

    def step(self, gradients: list[Gradients]) -> Gradients:
        """The means that training must be given, to the bit, of the parameters that any rank used."""
        names = dict.fromkeys(name for one in gradients for name in one)
        means = {name: self._mean(name, [one.get(name) for one in gradients]) for name in names}
        self._step += 1
        return means

    def _mean(self, name: str, gradients: list[Tensor | None]) -> Tensor:
        like = next(g for g in gradients if g is not None)
        layout = Layout.of([(0, like.numel())], self._codec.block)
        format = self._codec.format(layout.blocks, self._step)
        size = self._codec.chunk_bytes(layout.blocks, self._step)
        codec, r = self._codec, self._units.setdefault(name, torch.ones(like.numel()))
        learns = isinstance(codec, RefreshedCodec) and codec.normalize
        refreshed = isinstance(codec, RefreshedCodec) and codec.refreshes(self._step)
        unit = r if learns and not refreshed else torch.ones_like(r)
        payloads = torch.empty(self._ranks, 1, size, dtype=torch.uint8)
        for rank, g in enumerate(gradients):
            nothing = torch.zeros(layout.blocks * layout.block)
            e = self._residuals.setdefault((rank, name), nothing.clone())
            source = torch.zeros_like(like) if g is None else g
            left = nothing if g is None else e  # not used here: nothing is sent, and e stays
            left[: len(unit)] /= unit
            scaled = _flat(source) / unit
            reference.encode(
                scaled.to(like.dtype), layout.table, format.ints(), left, payloads[rank], None, 0
            )
            left[: len(unit)] *= unit
        out = torch.empty_like(_flat(like))
        reference.decode_mean(payloads, layout.table, format.ints(), 0, out)
        out.mul_(unit)
        if learns and refreshed:
            count = min(self._step, codec.refresh) + max(0, self._step // codec.refresh - 1)
            r.copy_(rms.moved(r, out, max(rms.LEAST_WEIGHT, 1 / (count + 1))))
        return out.as_strided(like.shape, like.stride())


def _flat(t: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory."""
    return t.as_strided((t.numel(),), (1,))
