"""Exchanges run beside backward.

Here backward does not leave the first layer, which is its last, before the wire has begun, and the wire
does not end before backward has reached that layer. If either waited for the other, the check would end
by an error, whatever the speed of the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.stats import Traffic
from gradcomm.transport import GroupTransport
from tests.models import small_model

from .checks import check


class Order:
    """What happened in one backward, in its order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._lock = threading.Lock()
        self._began, self._reached = threading.Event(), threading.Event()
        self.hold = False

    def begin(self, hold: bool) -> None:
        self.hold = hold
        self.events.clear()
        self._began.clear()
        self._reached.clear()

    def log(self, event: str) -> None:
        with self._lock:
            self.events.append(event)

    def gradient(self, layer: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if layer == 0 and self.hold:
                assert self._began.wait(20), f"no exchange before backward ends: {self.events}"
                self._reached.set()
            self.log(f"gradient {layer}")

        return hook

    def slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, the first of which in a backward waits for the gradient of the first layer."""

        def held(*arguments: Any) -> Any:
            if self.hold:
                self.log("wire begins")
                self._began.set()
                assert self._reached.wait(20), f"backward stands still behind the wire: {self.events}"
                self.log("wire ends")
            return call(*arguments)

        return held


class Slow:
    """A transport whose calls are ``order.slow``."""

    traffic = Traffic()

    def __init__(self, inner: GroupTransport, order: Order) -> None:
        self.rank, self.size, self.close = inner.rank, inner.size, inner.close
        self.all_gather_object = inner.all_gather_object
        self.all_reduce = order.slow(inner.all_reduce)
        self.all_gather = order.slow(inner.all_gather)
        self.all_to_all = order.slow(inner.all_to_all)


def _backward(ddp: Any, order: Order) -> None:
    weights = [p for p in ddp.module.parameters() if p.dim() == 2]
    for layer, weight in enumerate(weights):
        weight.register_hook(order.gradient(layer))
    for hold in (False, True):  # after the first one DDP makes its buckets anew
        order.begin(hold)
        ddp(torch.randn(4, 40)).square().mean().backward()
    assert order.events.index("wire begins") < order.events.index("gradient 0"), order.events
    assert "wire ends" in order.events
    order.hold = False


def _overlaps(codec: str) -> None:
    order = Order()
    group = dist.new_group()
    slow = Slow(GroupTransport(group, torch.device("cpu")), order)
    ddp = DDP(small_model(), bucket_cap_mb=0.005)
    state = gradcomm.register(ddp, codec, min_numel=100, warmup_steps=0, transport=slow)
    _backward(ddp, order)
    state.close()
    slow.close()


@check
def backward_overlaps_plain_exchanges(rank: int, ranks: int) -> None:
    _overlaps("none")


@check
def backward_overlaps_onebit(rank: int, ranks: int) -> None:
    _overlaps("onebit")


@check
def backward_overlaps_powersgd(rank: int, ranks: int) -> None:
    _overlaps("powersgd:rank=2")


@check
def backward_overlaps_ddp_without_a_hook(rank: int, ranks: int) -> None:
    order = Order()
    group: Any = dist.new_group()
    group._calls.all_reduce = order.slow(group._calls.all_reduce)
    _backward(DDP(small_model(), bucket_cap_mb=0.005, process_group=group), order)
    dist.destroy_process_group(group)
