"""Bad input to the hook: each a clear error that names the value and what to do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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
    nesterov: Any,
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
    require(isinstance(nesterov, bool), f"nesterov={nesterov!r}; use True or False")
    require(
        momentum > 0 or not nesterov,
        f"nesterov=True with momentum={momentum!r}; give the hook the momentum, momentum=0.9 say",
    )
    require(
        isinstance(error_feedback, bool) or error_feedback == "worker",
        f"error_feedback={error_feedback!r}; use True, False, or 'worker' for none on the owner's side",
    )


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
    # A copy of a model lists its original's hook, but has none.
    hooks = [hook for hook, state in model._comm_hooks if not getattr(state, "copied", False)]
    if hooks:
        names = [getattr(h, "__qualname__", str(h)) for h in hooks]
        raise ValueError(
            f"gradcomm: this model has a communication hook already ({', '.join(names)}) and DDP takes "
            "one only; register gradcomm on a newly wrapped model"
        )


def group(value: Any) -> None:
    if value == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(value) < 0:
        raise ValueError(
            f"gradcomm: rank {dist.get_rank()} is not in process_group; only its members may register"
        )


def one_device(named: list[tuple[str, Tensor]]) -> torch.device:
    """The device of all these parameters."""
    require(bool(named), "this model has no parameter that requires a gradient: nothing to exchange")
    first, tensor = named[0]
    for name, other in named:
        require(
            other.device == tensor.device,
            f"parameter {name!r} is on {other.device}, {first!r} on {tensor.device}; a model that is "
            "exchanged must be on one device: one process for each GPU",
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"gradcomm: parameters on {tensor.device}: there are kernels for CPU and CUDA only"
        )
    return tensor.device


def bucket_device(bucket: torch.device, bound: torch.device | None) -> None:
    require(
        bucket == bound,
        f"a bucket on {bucket}, after one on {bound}; a model that is exchanged must be on one device: "
        "one process for each GPU",
    )


def bound(is_bound: bool, what: str) -> None:
    if not is_bound:
        raise RuntimeError(
            f"gradcomm: {what} before the first backward of a CommState that register() did not make: "
            "it does not know its parameters yet"
        )


def between_steps(what: str) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"gradcomm: {what} inside of a backward; call it between two steps")


def unused(step: int, options: dict[str, Any]) -> None:
    """A state that is to be registered."""
    require(step == 0, f"this CommState is in use, at step {step}; make another, or copy.deepcopy it")
    require(not options, f"options {sorted(options)} belong to the CommState; make it with them")


def still_open(closed: bool) -> None:
    """Raises RuntimeError if the state was closed: its hook stays in DDP, which cannot take it out."""
    if closed:
        raise RuntimeError(
            "gradcomm: this state was closed, and nothing carries the model's gradients any more; "
            "drop this DistributedDataParallel, wrap the module in a new one and register that"
        )
