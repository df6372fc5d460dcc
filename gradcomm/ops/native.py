"""Loads the native kernels, when they were built, over the reference."""

from __future__ import annotations

import importlib.metadata
import logging
import pathlib

import torch

logger = logging.getLogger("gradcomm")

_VERSION = 5  # kVersion in csrc/cpu/bindings.cpp and csrc/cuda/bindings.cpp


def find(name: str) -> pathlib.Path | None:
    """A file of the package, as "lib/…": beside the package, or in the installed distribution when
    the package is imported from its source folder (an editable install, or the repository's root as
    working directory)."""
    beside = pathlib.Path(__file__).parent.parent / name
    if beside.exists():
        return beside
    try:
        installed = importlib.metadata.distribution("gradcomm").locate_file(f"gradcomm/{name}")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = pathlib.Path(str(installed))
    return path if path.exists() else None


def _load(device: str, not_built: str) -> str | None:
    """Loads the library of a device; returns None, or why it has no native kernels."""
    path = find(f"lib/libgradcomm_{device}.so")
    if path is None:
        return not_built
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    found = getattr(torch.ops.gradcomm, f"{device}_version")()
    if found != _VERSION:
        raise ImportError(
            f"gradcomm: {path} is of version {found}, this package needs {_VERSION}: "
            "reinstall gradcomm (pip install --force-reinstall --no-deps gradcomm)"
        )
    return None


#: None when the native CPU kernels are loaded, else the reason why not.
missing: str | None = _load(
    "cpu", "the native library was not built (no C++ compiler, or not installed)"
)
if missing is not None:
    logger.warning("gradcomm: running on the slow PyTorch reference: %s", missing)

#: The same of the CUDA kernels. Their library asks torch for its streams: only a CUDA torch has those.
cuda_missing: str | None = (
    "this torch is built without CUDA"
    if torch.version.cuda is None
    else _load("cuda", "the CUDA library was not built (no nvcc when gradcomm was installed)")
)


def cpu_executor() -> str:
    """What runs the CPU operators: ``avx512``, ``avx2``, ``baseline``, or ``reference``."""
    return "reference" if missing is not None else str(torch.ops.gradcomm.cpu_isa())
