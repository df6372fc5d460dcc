"""What the ``mpi4py`` backend is given: options and tensors, checked and made flat."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def op_of(opts: Any) -> str:
    if opts is None:
        return "sum"
    for op, name in _OPS.items():
        if opts.reduceOp == op:
            return name
    names = ", ".join(_OPS.values())
    raise ValueError(f"gradcomm: backend mpi4py has no reduction {opts.reduceOp}; use one of {names}")


def require_sum(op: str) -> None:
    if op != "sum":
        raise ValueError(f"gradcomm: backend mpi4py sums sparse tensors only, not {op!r}")


def flat_of(tensor: Tensor) -> Tensor:
    """``[numel]`` in one piece: the tensor's own memory if it lies in one, else a copy."""
    if tensor.device.type != "cpu":
        raise ValueError(f"gradcomm: backend mpi4py carries CPU tensors, not those on {tensor.device}")
    return tensor.detach().contiguous().view(-1)


def back(tensor: Tensor, flat: Tensor) -> None:
    """Writes a result to the tensor, if it is not there already."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def split_rows(flat: Tensor, rows: int, splits: list[int] | None, ranks: int) -> list[Tensor]:
    counts = list(splits) if splits else [rows // ranks] * ranks
    width = flat.numel() // rows if rows else 0
    return list(flat.split([c * width for c in counts]))
