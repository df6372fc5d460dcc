"""The form of a saved state, checked field by field: whatever a file holds, it ends in a clear error.

``{"format": 1, "ranks": 4, "rank 2": body}``: what each rank saves lies under its own key, so states of
all ranks can be put together, by hand or by ``torch.distributed.checkpoint``, and nothing collides. A
body holds only dicts, lists, strings, numbers and float32 tensors: ``torch.load(weights_only=True)``
reads it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradcomm.codec.check import require

FORMAT = 1

_BODY: dict[str, type] = {
    "progress": dict,
    "options": dict,
    "parameters": list,  # each as ``entry`` gives it
    "buckets": list,  # of a step, in the order of their exchange: lists of indices into parameters
    "clip": dict,
    "shares": dict,  # of how many ranks' mean slots ``owner`` and ``host`` are
    "tensors": list,  # all that memory must hold: [slot, name]
    "memory": dict,
}
REMEDY = (
    "give load_state_dict the states of all ranks, as a list, or gradcomm.merge_states of them; with "
    "torch.distributed.checkpoint load with planner=gradcomm.dcp.LoadPlanner()"
)


def checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"gradcomm: a state is a dict, not {type(value).__name__}")
    form = value.get("format")
    require(type(form) is int, f"format={form!r}: this is not what state_dict() returned")
    require(
        form == FORMAT, f"the state is of format {form}, this version reads {FORMAT}; update gradcomm"
    )
    ranks = value.get("ranks")
    require(type(ranks) is int and 0 < ranks < 1 << 24, f"ranks={ranks!r} in the state; it is damaged")
    return value


def check_body(body: Any, whose: str) -> Any:
    """Raises ValueError unless every field is there and of its kind."""
    require(isinstance(body, dict), f"{whose} of the state is a {type(body).__name__}, not a dict")
    for field, kind in _BODY.items():
        found = type(body.get(field)).__name__
        require(
            isinstance(body.get(field), kind),
            f"{whose}: {field} is of type {found}, not {kind.__name__}",
        )
    progress = body["progress"]
    for field in ("step", "since"):
        value = progress.get(field)
        require(type(value) is int and 0 <= value < 1 << 62, f"{whose}: {field}={value!r} is no step")
    require(type(progress.get("flush")) is bool, f"{whose}: flush={progress.get('flush')!r}")
    require(type(progress.get("seed")) is int, f"{whose}: seed={progress.get('seed')!r} is no integer")
    for of in ("owner", "host"):
        share = body["shares"].get(of)
        require(type(share) is int and 0 <= share < 1 << 24, f"{whose}: share of {of} is {share!r:.80}")
    scale = progress.get("scale", "missing")
    require(
        scale is None or (_number(scale) and scale > 0), f"{whose}: scale={scale!r} is no loss scale"
    )
    for name, value in body["options"].items():
        plain = value is None or type(value) in (str, int, float, bool)
        require(type(name) is str and plain, f"{whose}: option {name!r} is {type(value).__name__}")
    parameters = body["parameters"]
    for p in parameters:
        require(_is_entry(p), f"{whose}: {p!r:.80} is no parameter (name, shape, dtype, strides, plain)")
    names = {p[0] for p in parameters}
    require(len(names) == len(parameters), f"{whose}: a parameter's name comes twice")
    _check_buckets(body, whose)
    for slot, held in body["memory"].items():
        require(type(slot) is str and isinstance(held, dict), f"{whose}: slot {slot!r} is no dict")
        for name, tensor in held.items():
            require(name in names, f"{whose}: {slot} of {name!r}, which is none of its parameters")
            require(_is_flat(tensor), f"{whose}: {slot} of {name!r} is no flat float32 tensor")
            require(bool(torch.isfinite(tensor).all()), f"{whose}: {slot} of {name!r} is not finite")
    tensors = sorted([slot, name] for slot, held in body["memory"].items() for name in held)
    require(
        tensors == body["tensors"],
        f"{whose}: holds {len(tensors)} tensors, {len(body['tensors'])} were saved, or others; was it "
        f"loaded in full? {REMEDY}",
    )
    for slot in ("owner", "host"):
        for name, mine in body["memory"].get("residual", {}).items():
            other = body["memory"].get(slot, {}).get(name, mine)
            require(other.numel() == mine.numel(), f"{whose}: {slot} of {name!r} is of another size")
    return body


def _check_buckets(body: dict[str, Any], whose: str) -> None:
    count = len(body["parameters"])
    seen: set[int] = set()
    for bucket in body["buckets"]:
        require(isinstance(bucket, list), f"{whose}: bucket {bucket!r:.80} is no list")
        for index in bucket:
            good = type(index) is int and 0 <= index < count and index not in seen
            require(
                good, f"{whose}: bucket {bucket!r:.80}: {index!r:.80} is no parameter, or comes twice"
            )
            seen.add(index)
    mean, squares = body["clip"].get("mean", "missing"), body["clip"].get("squares")
    require(mean is None or (_number(mean) and mean >= 0), f"{whose}: clip's mean is {mean!r:.80}")
    require(isinstance(squares, list), f"{whose}: clip's squares are {squares!r:.80}")
    assert isinstance(squares, list)
    require(len(squares) in (0, len(body["buckets"])), f"{whose}: clip has {len(squares)} squares")
    for square in squares:
        require(_number(square) and square >= 0, f"{whose}: clip has a square {square!r:.80}")


def _is_entry(p: Any) -> bool:
    return (
        isinstance(p, list)
        and len(p) == 5
        and type(p[0]) is str
        and all(isinstance(p[i], list) and all(type(n) is int for n in p[i]) for i in (1, 3))
        and type(p[2]) is str
        and type(p[4]) is bool
    )


def _is_flat(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.dtype == torch.float32
        and tensor.dim() == 1
        and tensor.device.type != "meta"
    )


def _number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 64
    return type(value) is float and math.isfinite(value)
