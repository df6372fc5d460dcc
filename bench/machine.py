"""What a result was measured on."""

from __future__ import annotations

import os
import pathlib
import platform


def cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe() -> dict[str, object]:
    """Processor, its cores, torch, and the instruction set of our kernels."""
    import torch

    from gradcomm import ops

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "isa": ops.cpu_executor(),
    }
