"""Loads the native CPU kernels, when they were built, over the reference."""

from __future__ import annotations

import importlib.metadata
import logging
import pathlib

import torch

logger = logging.getLogger("gradcomm")

_NAME = "libgradcomm_cpu.so"
_VERSION = 3  # kVersion in csrc/cpu/bindings.cpp


def _find() -> pathlib.Path | None:
    """The library beside the package, or in the installed distribution when the package is imported
    from its source folder (an editable install, or the repository's root as working directory)."""
    beside = pathlib.Path(__file__).parent.parent / "lib" / _NAME
    if beside.exists():
        return beside
    try:
        installed = importlib.metadata.distribution("gradcomm").locate_file(f"gradcomm/lib/{_NAME}")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = pathlib.Path(str(installed))
    return path if path.exists() else None


def _load() -> str | None:
    """Loads the library; returns None, or why there are no native kernels."""
    path = _find()
    if path is None:
        return "the native library was not built (no C++ compiler, or not installed)"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    found = torch.ops.gradcomm.cpu_version()
    if found != _VERSION:
        raise ImportError(
            f"gradcomm: {path} is of version {found}, this package needs {_VERSION}: "
            "reinstall gradcomm (pip install --force-reinstall --no-deps gradcomm)"
        )
    return None


#: None when the native CPU kernels are loaded, else the reason why not.
missing: str | None = _load()
if missing is not None:
    logger.warning("gradcomm: running on the slow PyTorch reference: %s", missing)


def cpu_executor() -> str:
    """What runs the CPU operators: ``avx512``, ``avx2``, ``baseline``, or ``reference``."""
    return "reference" if missing is not None else str(torch.ops.gradcomm.cpu_isa())
