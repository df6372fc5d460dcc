"""The CUDA kernels compiled at run time, for a CUDA torch where no nvcc built them (``gradcomm[jit]``).

CuPy brings NVRTC and launches; the sources are those of the native library (``csrc/cuda``). What CuPy's
own RawModule would add is not wanted: it flushes denormals, and its cache does not see our headers. So
a program is compiled here, with these options alone, and kept for the life of the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .format import Format, QuantizeFormat, TopKBlockFormat, format_of

#: The source of each family, by its number; the same families as kernels_of in csrc/cuda/launch.h.
FAMILIES = {0: "cast", 1: "onebit", 2: "quantize", 3: "topk_block"}
STAGES = ("encode", "decode_mean", "reduce_encode", "mask")  # mask: of block top-k alone
_TYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# As in csrc/cuda/launch.h and task.cuh.
_TILE_BYTES_MOST = 48 * 1024
_WARPS_MOST = 8
_BLOCKS_PER_PROCESSOR = 32
_SEGMENTS = 120


class Task(ctypes.Structure):
    """csrc/cuda/task.cuh."""

    _fields_ = [
        ("format", ctypes.c_int64 * 6),
        *(
            (name, ctypes.c_int64)
            for name in ("block", "record", "block_begin", "begin", "end", "ranks", "rank_stride")
        ),
        *(
            (name, ctypes.c_uint64)
            for name in ("key", "source", "out", "gain", "residual", "payload", "payloads")
        ),
        ("num_segments", ctypes.c_int64),
        ("segments", ctypes.c_int64 * (4 * _SEGMENTS)),
    ]


def sources() -> pathlib.Path:
    """The folder ``csrc``: installed with the package, or that of the repository."""
    package = pathlib.Path(__file__).parents[1]
    for folder in (package / "csrc", package.parent / "csrc", native.find("csrc")):
        if folder is not None and (folder / "cuda" / "task.cuh").exists():
            return folder
    raise RuntimeError("gradcomm: the CUDA sources are not installed: reinstall gradcomm")


@functools.cache
def source_hash() -> str:
    """Of everything that a kernel includes."""
    digest = hashlib.sha256()
    for file in sorted(sources().glob("*/*.cu*")):
        if file.parent.name in ("cuda", "device"):
            digest.update(file.name.encode() + b"\\0" + file.read_bytes() + b"\\0")
    return digest.hexdigest()[:16]


def source(family: int) -> str:
    return (sources() / "cuda" / f"{FAMILIES[family]}.cu").read_text()


def options(arch: str) -> list[str]:
    """For NVRTC; ``arch`` as ``sm_90``. No contraction, no flushing: the same bytes everywhere."""
    return [
        "--std=c++17",
        "--fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        f"--gpu-architecture={arch}",
        f"--include-path={sources() / 'cuda'}",
        f"-DGRADCOMM_SOURCES=0x{source_hash()}",
    ]


def kernel_name(format: Format, stage: str, dtype: torch.dtype | None) -> str:
    bits = str(format.bits) if isinstance(format, QuantizeFormat) else ""
    name = f"gradcomm_{FAMILIES[format.family]}{bits}_{stage}"
    return name if dtype is None else f"{name}_{_TYPE_NAMES[dtype]}"


def has_kernels(format: Format) -> bool:
    return format.family in FAMILIES and 4 * format.block <= _TILE_BYTES_MOST


def fault() -> str | None:
    """None where the kernels can be compiled and run, else why not."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install gradcomm[jit])"
    if not torch.cuda.is_available():
        return "no CUDA device, or no driver"
    return None


_lock = threading.Lock()
_modules: dict[tuple[int, int], Any] = {}


def _module(family: int, device: int) -> Any:
    """The loaded module of a family on a device, compiled when it is not there."""
    with _lock:
        module = _modules.get((family, device))
        if module is None:
            why = fault()
            if why is not None:
                raise RuntimeError(f"gradcomm: cannot compile CUDA kernels at run time: {why}")
            import cupy
            from cupy.cuda import compiler, function

            major, minor = torch.cuda.get_device_capability(device)
            program = compiler._NVRTCProgram(source(family), f"{FAMILIES[family]}.cu")
            code, _ = program.compile(tuple(options(f"sm_{major}{minor}")))
            with cupy.cuda.Device(device):
                module = function.Module()
                module.load(code)
            _modules[family, device] = module
        return module


def prepare(format: Format, device: torch.device) -> None:
    """Compiles what this format needs, so that the first backward does not wait for it."""
    if has_kernels(format):
        _module(format.family, device.index or 0)


def launches(task: Task, rows: list[list[int]], records: int) -> list[tuple[Task, int]]:
    """for_launches of csrc/cuda/launch.h: each launch's task, and its records."""
    begin = task.block_begin
    upto = [i for i, row in enumerate(rows) if row[2] <= begin]
    behind = sum(row[2] <= begin + records - 1 for row in rows)
    at, done, out = (upto[-1] if upto else 0), 0, []
    while done < records:
        some = rows[at : min(at + _SEGMENTS, behind)]
        at += len(some)
        end = rows[at][2] - begin if at < behind else records
        part = Task.from_buffer_copy(task)
        part.begin, part.end, part.num_segments = done, end, len(some)
        part.segments[: 4 * len(some)] = [x for row in some for x in row]
        out.append((part, end - done))
        done = end
    return out


def _launch(
    format: Format,
    stage: str,
    dtype: torch.dtype | None,
    device: int,
    grid: int,
    threads: int,
    shared: int,
    task: Task,
) -> None:
    """One launch on torch's current stream."""
    import cupy
    from cupy_backends.cuda.api import driver

    kernel = _module(format.family, device).get_function(kernel_name(format, stage, dtype))
    # CuPy's own call has no word for a struct of any size; the driver reads it before this returns.
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(task))
    with torch.cuda.device(device), cupy.cuda.Device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        driver.launchKernel(
            kernel.ptr, grid, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(arguments), 0
        )


def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _run(
    stage: str,
    format: Format,
    rows: list[list[int]],
    records: int,
    on: Tensor,
    dtype: torch.dtype | None,
    task: Task,
) -> None:
    device = on.device.index or 0
    warps = max(1, min(_WARPS_MOST, _TILE_BYTES_MOST // 2 // (4 * format.block)))
    most = _processors(device) * _BLOCKS_PER_PROCESSOR
    task.format[:] = format.ints()
    task.block, task.record = format.block, format.record_bytes
    for part, count in launches(task, rows, records):
        grid = min(most, -(-count // warps))
        _launch(format, stage, dtype, device, grid, 32 * warps, 4 * warps * format.block, part)


def _pointer(t: Tensor | None, on: Tensor, name: str) -> int:
    if t is None:
        return 0
    reference._check(t.device == on.device, f"{name} must be on {on.device}, not {t.device}")
    reference._check(
        t.data_ptr() % 4 == 0 or t.dtype != torch.uint8,
        f"on CUDA {name} must begin at a multiple of 4 bytes",
    )
    return t.data_ptr()


def _residual(t: Tensor | None, elements: int) -> None:
    if t is not None:
        reference._plain(t, "residual", torch.float32, 1)
        reference._check(t.numel() >= elements, f"the residual has {t.numel()} elements, not {elements}")


def encode(
    source: Tensor,
    layout: Tensor,
    format: list[int],
    residual: Tensor | None,
    payload: Tensor,
    gain: Tensor | None,
    key: int,
) -> None:
    fmt = format_of(format)
    if not has_kernels(fmt):
        return reference.encode(source, layout, format, residual, payload, gain, key)
    reference._bucket(source, "source")
    reference._plain(payload, "payload", torch.uint8, 2)
    rows, needed = reference._rows(layout, fmt, source.numel())
    records = payload.size(0) * reference._records(fmt, payload.size(1))
    reference._check(records >= needed, f"the payload holds {records} blocks; the layout needs {needed}")
    reference._check(
        gain is None or (gain.dtype == torch.float32 and gain.numel() == 1), "gain must be one float32"
    )
    _residual(residual, needed * fmt.block)
    task = Task(
        key=key % 2**64,
        source=_pointer(source, source, "source"),
        gain=_pointer(gain, source, "gain"),
        residual=_pointer(residual, source, "residual"),
        payload=_pointer(payload, source, "payload"),
    )
    return _run("encode", fmt, rows, records, source, source.dtype, task)


def _payloads(payloads: Tensor, fmt: Format, block_begin: int) -> int:
    reference._plain(payloads, "payloads", torch.uint8, 3)
    reference._check(payloads.size(0) >= 1, "payloads must come from one rank or more")
    reference._check(0 <= block_begin <= reference._FAR, f"block_begin is {block_begin}")
    return payloads.size(1) * reference._records(fmt, payloads.size(2))


def decode_mean(
    payloads: Tensor, layout: Tensor, format: list[int], block_begin: int, out: Tensor
) -> None:
    fmt = format_of(format)
    if not has_kernels(fmt):
        return reference.decode_mean(payloads, layout, format, block_begin, out)
    reference._bucket(out, "out")
    rows, _ = reference._rows(layout, fmt, out.numel())
    records = _payloads(payloads, fmt, block_begin)
    task = Task(
        block_begin=block_begin,
        out=_pointer(out, payloads, "out"),
        ranks=payloads.size(0),
        rank_stride=payloads[0].numel(),
        payloads=_pointer(payloads, payloads, "payloads"),
    )
    return _run("decode_mean", fmt, rows, records, payloads, out.dtype, task)


def reduce_encode(
    payloads: Tensor,
    layout: Tensor,
    format: list[int],
    block_begin: int,
    residual: Tensor | None,
    payload: Tensor,
    key: int,
) -> None:
    fmt = format_of(format)
    if not has_kernels(fmt):
        return reference.reduce_encode(payloads, layout, format, block_begin, residual, payload, key)
    rows, _ = reference._rows(layout, fmt, None)
    records = _payloads(payloads, fmt, block_begin)
    reference._plain(payload, "payload", torch.uint8, 1)
    reference._check(
        payload.numel() == payloads[0].numel(),
        f"the payload has {payload.numel()} bytes; the chunk needs {payloads[0].numel()}",
    )
    _residual(residual, records * fmt.block)
    task = Task(
        block_begin=block_begin,
        ranks=payloads.size(0),
        rank_stride=payloads[0].numel(),
        payloads=_pointer(payloads, payloads, "payloads"),
        key=key % 2**64,
        residual=_pointer(residual, payloads, "residual"),
        payload=_pointer(payload, payloads, "payload"),
    )
    return _run("reduce_encode", fmt, rows, records, payloads, None, task)


def topk_mask_(payload: Tensor, layout: Tensor, format: list[int], buffer: Tensor) -> None:
    fmt = format_of(format)
    if not (isinstance(fmt, TopKBlockFormat) and has_kernels(fmt)):
        return reference.topk_mask_(payload, layout, format, buffer)
    rows, needed = reference._rows(layout, fmt, None)
    reference._plain(payload, "payload", torch.uint8, 2)
    records = payload.size(0) * reference._records(fmt, payload.size(1))
    reference._check(records >= needed, f"the payload holds {records} blocks; the layout needs {needed}")
    _residual(buffer, needed * fmt.block)
    task = Task(
        ranks=1,
        payloads=_pointer(payload, payload, "payload"),
        residual=_pointer(buffer, payload, "buffer"),
    )
    return _run("mask", fmt, rows, records, payload, None, task)


OPERATORS: dict[str, Callable[..., None]] = {
    "encode": encode,
    "decode_mean": decode_mean,
    "reduce_encode": reduce_encode,
    "topk_mask_": topk_mask_,
}
