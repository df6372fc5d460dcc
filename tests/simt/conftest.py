"""Builds the emulator, and lets its tests use the cases of those of the operators."""

from __future__ import annotations

import ctypes
import pathlib
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "ops"))

import machine

from gradcomm.ops import nvrtc


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return machine.build(tmp_path_factory.mktemp("simt"), "simt.cpp", "entry.cpp")


@pytest.fixture
def jit(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> object:
    """The operators of run-time compilation, their launches going to the emulator: over the tensors' own
    memory, one order of lanes."""
    library.simt_launch.restype = ctypes.c_char_p

    def launch(
        source: str,
        kernel: str,
        device: int,
        grid: int,
        threads: int,
        shared: int,
        argument: ctypes.Structure,
    ) -> None:
        function = ctypes.cast(getattr(library, kernel), ctypes.c_void_p)
        fault = library.simt_launch(function, grid, threads, shared, ctypes.byref(argument))
        assert fault is None, fault

    monkeypatch.setattr(nvrtc.compiler, "launch", launch)
    monkeypatch.setattr(nvrtc.compiler, "processors", lambda device: 1)
    return types.SimpleNamespace(**nvrtc.OPERATORS)
