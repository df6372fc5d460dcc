"""Builds the emulator, and lets its tests use the cases of those of the operators."""

from __future__ import annotations

import ctypes
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "ops"))

import machine


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return machine.build(tmp_path_factory.mktemp("simt"), "simt.cpp", "entry.cpp")
