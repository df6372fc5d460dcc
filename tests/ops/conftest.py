"""Says what the operators run on, and has their work split between threads."""

from __future__ import annotations

import torch

from gradcomm.ops import native

torch.set_num_threads(2)


def pytest_report_header() -> str:
    why = f" ({native.missing})" if native.missing else ""
    return f"gradcomm: CPU operators run on {native.cpu_executor()}{why}"
