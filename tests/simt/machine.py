"""The CUDA kernels on the emulator, as an object with the operators of ``torch.ops.gradcomm``.

Every call runs the lanes forwards, backwards and in a random order, and fails if the results differ.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradcomm.ops import checks
from gradcomm.ops.checks import Job

HERE = pathlib.Path(__file__).parent
FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Werror",
]
ORDERS = ("forwards", "backwards", "random")
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Fault(AssertionError):
    """What the emulator has against a kernel."""


def build(
    folder: pathlib.Path, *sources: str, here: pathlib.Path = HERE, optimize: str = "-O1"
) -> ctypes.CDLL:
    """Compiles these files of ``here`` into ``folder``; skips where there is no compiler.
    SIMT_FLAGS replaces ``optimize``, as by the options of sanitizers."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the emulator with")
    library = folder / f"{sources[-1]}.so"
    flags = [*FLAGS, *os.environ.get("SIMT_FLAGS", optimize).split()]
    command = [compiler, *flags, "-o", str(library), *(str(here / s) for s in sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_longlong)]

    @staticmethod
    def of(t: Tensor | None) -> _Buffer:
        return _Buffer(None, 0) if t is None else _Buffer(t.data_ptr(), t.numel() * t.element_size())


class _Run(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_longlong)
            for name in (
                "stage",
                "dtype",
                "records",
                "block_begin",
                "ranks",
                "rank_stride",
                "num_segments",
            )
        ),
        ("key", ctypes.c_ulonglong),
        ("format", ctypes.c_longlong * 6),
        *((name, ctypes.c_longlong) for name in ("warps", "grid", "order", "seed")),
        *((name, _Buffer) for name in ("layout", "bucket", "gain", "residual", "payload", "payloads")),
    ]


@dataclasses.dataclass
class Machine:
    """``warps`` of a thread block (0: as on a GPU) and at most ``grid`` thread blocks."""

    library: ctypes.CDLL
    warps: int = 0
    grid: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        self.library.simt_run.restype = ctypes.c_char_p
        self.library.simt_orthogonalize.restype = ctypes.c_char_p

    def has(self, format: list[int]) -> bool:
        return bool(self.library.simt_has((ctypes.c_longlong * 6)(*format)))

    def _orders(self, written: list[Tensor | None], run: Callable[[int], bytes | None]) -> None:
        """Runs in every order; the written tensors must come out the same."""
        before = [None if t is None else t.clone() for t in written]
        results: list[list[Tensor]] = []
        for order in range(len(ORDERS)):
            for t, b in zip(written, before, strict=True):
                if t is not None and b is not None:
                    t.copy_(b)
            fault = run(order)
            if fault is not None:
                raise Fault(f"{ORDERS[order]}: {fault.decode()}")
            results.append([t.view(torch.uint8).clone() for t in written if t is not None])
        for name, other in zip(ORDERS[1:], results[1:], strict=True):
            if not all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)):
                raise Fault(f"lanes running {name} give other bytes than lanes running forwards")

    def _run(
        self,
        stage: int,
        job: Job,
        layout: Tensor,
        written: list[Tensor | None],
        dtype: torch.dtype = torch.float32,
        payloads: Tensor | None = None,
        block_begin: int = 0,
        key: int = 0,
        **tensors: Tensor | None,
    ) -> None:
        def run(order: int) -> bytes | None:
            arguments = _Run(
                stage=stage,
                dtype=_TYPES.index(dtype),
                records=job.records,
                block_begin=block_begin,
                ranks=1 if payloads is None else payloads.size(0),
                rank_stride=0 if payloads is None else payloads[0].numel(),
                num_segments=layout.size(0),
                key=key % 2**64,
                format=(ctypes.c_longlong * 6)(*job.format.ints()),
                warps=self.warps,
                grid=self.grid,
                order=order,
                seed=self.seed,
                layout=_Buffer.of(layout),
                payloads=_Buffer.of(payloads),
                **{name: _Buffer.of(t) for name, t in tensors.items()},
            )
            return self.library.simt_run(ctypes.byref(arguments))  # type: ignore[no-any-return]

        self._orders(written, run)

    def encode(
        self,
        source: Tensor,
        layout: Tensor,
        format: list[int],
        residual: Tensor | None,
        payload: Tensor,
        gain: Tensor | None,
        key: int,
    ) -> None:
        job = checks.encode(source, layout, format, residual, payload, gain)
        tensors = {"bucket": source, "gain": gain, "residual": residual, "payload": payload}
        self._run(0, job, layout, [residual, payload], source.dtype, key=key, **tensors)

    def decode_mean(
        self, payloads: Tensor, layout: Tensor, format: list[int], block_begin: int, out: Tensor
    ) -> None:
        job = checks.decode_mean(payloads, layout, format, block_begin, out)
        self._run(1, job, layout, [out], out.dtype, payloads, block_begin, bucket=out)

    def reduce_encode(
        self,
        payloads: Tensor,
        layout: Tensor,
        format: list[int],
        block_begin: int,
        residual: Tensor | None,
        payload: Tensor,
        key: int,
    ) -> None:
        job = checks.reduce_encode(payloads, layout, format, block_begin, residual, payload)
        tensors = {"residual": residual, "payload": payload}
        written = [residual, payload]
        self._run(2, job, layout, written, torch.float32, payloads, block_begin, key, **tensors)

    def topk_mask_(self, payload: Tensor, layout: Tensor, format: list[int], buffer: Tensor) -> None:
        job = checks.topk_mask_(payload, layout, format, buffer)
        self._run(3, job, layout, [buffer], payloads=payload.unsqueeze(0), residual=buffer)

    def orthogonalize_(self, rows: Tensor) -> None:
        checks.orthogonalize_(rows)

        def run(order: int) -> bytes | None:
            data, sizes = ctypes.c_void_p(rows.data_ptr()), map(ctypes.c_longlong, rows.shape)
            shape = (self.grid, self.warps or 8, order, ctypes.c_ulonglong(self.seed))
            return self.library.simt_orthogonalize(data, *sizes, *shape)  # type: ignore[no-any-return]

        self._orders([rows], run)
