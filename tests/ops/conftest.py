"""Makes ``cases`` importable, and says what the operators run on."""

from __future__ import annotations

import pathlib
import sys

import torch

from gradcomm.ops import native

sys.path.insert(0, str(pathlib.Path(__file__).parent))
torch.set_num_threads(2)  # more than one, so that work is split


def pytest_report_header() -> str:
    return f"gradcomm: CPU operators run on {native.cpu_executor()}" + (
        f" ({native.missing})" if native.missing else ""
    )
