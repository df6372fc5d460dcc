"""From a kernel's source to a module on a device.

What CuPy's own RawModule would add is not wanted: it flushes denormals, and its cache does not see our
headers. So a program is compiled here, with these options alone, and kept for the life of the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import pathlib
import threading
from typing import Any

import torch

from .. import native

#: The sources in csrc/cuda; those of the formats by the format's family.
FAMILIES = {0: "cast", 1: "onebit", 2: "quantize", 3: "topk_block", 4: "topk_sparse", 5: "twobit"}
SOURCES = (*FAMILIES.values(), "orthogonalize")


def sources() -> pathlib.Path:
    """The folder ``csrc``: installed with the package, or that of the repository."""
    package = pathlib.Path(__file__).parents[2]
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


def text(source: str) -> str:
    return (sources() / "cuda" / f"{source}.cu").read_text()


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
_modules: dict[tuple[str, int], Any] = {}


def module(source: str, device: int) -> Any:
    """The loaded module of a source on a device, compiled when it is not there."""
    with _lock:
        found = _modules.get((source, device))
        if found is None:
            why = fault()
            if why is not None:
                raise RuntimeError(f"gradcomm: cannot compile CUDA kernels at run time: {why}")
            import cupy
            from cupy.cuda import compiler, function

            major, minor = torch.cuda.get_device_capability(device)
            program = compiler._NVRTCProgram(text(source), f"{source}.cu")
            code, _ = program.compile(tuple(options(f"sm_{major}{minor}")))
            with cupy.cuda.Device(device):
                found = function.Module()
                found.load(code)
            _modules[source, device] = found
        return found


def launch(
    source: str,
    kernel: str,
    device: int,
    grid: int,
    threads: int,
    shared: int,
    argument: ctypes.Structure,
) -> None:
    """One launch on torch's current stream; ``shared``: bytes of shared memory."""
    import cupy
    from cupy_backends.cuda.api import driver

    function = module(source, device).get_function(kernel)
    # CuPy's own call has no word for a struct of any size; the driver reads it before this returns.
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    with torch.cuda.device(device), cupy.cuda.Device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        driver.launchKernel(
            function.ptr, grid, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(arguments), 0
        )


def processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
