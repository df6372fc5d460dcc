"""Bad input to the hook: each a clear error that names the value and what to do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcomm.codec.base import Codec
from gradcomm.codec.check import require


def codec(value: Any) -> Codec:
    if not isinstance(value, Codec):
        raise TypeError(
            f"gradcomm: codec={value!r}; give a codec, gradcomm.OneBit(), or a name, 'onebit'"
        )
    return value


def options(
    warmup_steps: Any,
    clip_norm: Any,
    error_feedback: Any,
    momentum: Any,
    min_numel: Any,
    measure_every: Any,
) -> None:
    for name, value in (
        ("warmup_steps", warmup_steps),
        ("min_numel", min_numel),
        ("measure_every", measure_every),
    ):
        require(
            isinstance(value, int) and value >= 0, f"{name}={value!r}; use an integer that is 0 or more"
        )
    require(
        clip_norm in (None, "auto")
        or (isinstance(clip_norm, int | float) and 0 < clip_norm < float("inf")),
        f"clip_norm={clip_norm!r}; use a positive number, 'auto', or None for no clipping",
    )
    require(
        isinstance(momentum, int | float) and 0 <= momentum < 1,
        f"momentum={momentum!r}; use a number from 0 up to below 1",
    )
    require(isinstance(error_feedback, bool), f"error_feedback={error_feedback!r}; use True or False")


def ddp(model: Any) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"gradcomm: {type(model).__name__} is not a DistributedDataParallel model; wrap it first: "
            "ddp = torch.nn.parallel.DistributedDataParallel(model)"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "gradcomm: DDP's mixed_precision= takes the model's one communication hook; use "
            "torch.autocast instead"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "gradcomm: torch._dynamo.config.optimize_ddp is 'python_reducer', which calls hooks without "
            "buckets; set it to 'ddp_optimizer', the default, before the model is wrapped"
        )
    if model._comm_hooks:
        names = [getattr(h, "__qualname__", str(h)) for h, _ in model._comm_hooks]
        raise ValueError(
            f"gradcomm: this model has a communication hook already ({', '.join(names)}) and DDP takes "
            "one only; register gradcomm on a newly wrapped model"
        )


def group(value: Any) -> None:
    if value == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(value) < 0:
        raise ValueError(
            f"gradcomm: rank {dist.get_rank()} is not in process_group; only its members may register"
        )


def cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise NotImplementedError(
            f"gradcomm: gradients on {device}: this version has kernels for CPU tensors only"
        )


def bound(is_bound: bool, what: str) -> None:
    if not is_bound:
        raise RuntimeError(
            f"gradcomm: {what} before the first backward of a CommState that register() did not make: "
            "it does not know its parameters yet"
        )


def state(value: Any, spec: str, rank: int, ranks: int, sizes: dict[str, int]) -> None:
    """A loaded state against this run."""
    for field, mine in (("codec", spec), ("rank", rank), ("ranks", ranks)):
        require(field in value, f"the state has no {field!r}; is it what state_dict() returned?")
        require(
            value[field] == mine,
            f"the state is of {field} {value[field]!r}, this is {field} {mine!r}; load each rank's own "
            "state, with the codec it was made with",
        )
    memory = value["memory"]
    for slot, by_name in memory["slots"].items():
        for name, held in by_name.items():
            require(name in sizes, f"the state has a {slot} of {name!r}, which this model has not")
            require(
                slot != "residual" or held.numel() == sizes[name],
                f"the state's {slot} of {name!r} has {held.numel()} elements, the parameter "
                f"{sizes[name]}",
            )
