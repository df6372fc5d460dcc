"""What is compared on a link: gradcomm's codecs, torch's own hooks, plain DDP, and no wire at all.

No postponed annotations here: DDP reads the hook's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomm


@dataclasses.dataclass
class Run:
    """A model wrapped for a method. ``stats``: what tells more of it than its step time; ends it.
    ``period``: so many steps are alike as a whole, and so many first ones are not counted."""

    ddp: DistributedDataParallel
    stats: Callable[[], dict[str, Any]] = dict
    period: int = 1


Method = Callable[[nn.Module], Run]


def _plain(model: nn.Module) -> Run:
    return Run(DistributedDataParallel(model))


def _floor(model: nn.Module) -> Run:
    """Sends nothing: what a step costs when communication is free."""
    ddp = DistributedDataParallel(model)

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    return Run(ddp)


def _torch_fp16(model: nn.Module) -> Run:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Run(ddp)


def _torch_powersgd(model: nn.Module) -> Run:
    """With one bucket: with more, torch's hook dies over Gloo (its collectives run in another order on
    each rank)."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=4096)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Run(ddp)


def _ours(codec: str) -> Method:
    def method(model: nn.Module) -> Run:
        ddp = DistributedDataParallel(model)
        state = gradcomm.register(ddp, codec, warmup_steps=0)
        keys = ("encode_ms", "wire_ms", "decode_ms", "wait_ms", "ratio")

        def stats() -> dict[str, Any]:
            report = state.stats()
            state.close()
            return {key: report[key] for key in keys} | {"codec": state.codec.spec()}

        return Run(ddp, stats, getattr(state.codec, "refresh", 0) or 1)

    return method


METHODS: dict[str, Method] = {
    "no wire (floor)": _floor,
    "plain": _plain,
    "torch fp16": _torch_fp16,
    "torch powersgd r1": _torch_powersgd,
    **{
        codec: _ours(codec)
        for codec in (
            "none",
            "fp16",
            "int8",
            "int4",
            "onebit",
            "twobit",
            "topk:density=0.01,ramp_steps=0",
            "topk:density=0.004,ramp_steps=0",
            "powersgd:rank=4",
            "auto",
        )
    },
}
