"""The comparison with the reference catches a mistake put into the real kernels."""

from __future__ import annotations

import ctypes
import pathlib
import shutil

import machine
import pytest
import torch
from compare import check_encode

from gradcomm.ops import INT8, OneBitFormat, TopKSparseFormat

ROOT = pathlib.Path(__file__).parents[2]
RUN = {
    "sizes": [(1, 0)],
    "gaps": [0],
    "chunks": 1,
    "dtype": torch.float32,
    "special": "plain",
    "gain": None,
    "feedback": True,
    "steps": 1,
    "key": 0,
    "seed": 1,
}


def onebit(simt: machine.Machine) -> None:
    check_encode(simt, OneBitFormat(512), RUN)


def sparse(simt: machine.Machine) -> None:
    check_encode(simt, TopKSparseFormat(512, 3, 300, INT8), {**RUN, "sizes": [(3, 0)]})


#: The check that finds it, the file, what stands there, the mistake.
MUTANTS = {
    "barrier removed": (
        onebit,
        "blocks.cuh",
        "read_tile<Type>(t, r, e, p);\n    __syncwarp();",
        "read_tile<Type>(t, r, e, p);",
    ),
    "wrong mask": (
        onebit,
        "onebit.cuh",
        "__shfl_xor_sync(kAllLanes, sum, width)",
        "__shfl_xor_sync(0x7fffffffu, sum, width)",
    ),
    "off by one": (onebit, "warp.cuh", "i < t.block;", "i <= t.block;"),
    "sparse: barrier removed": (
        sparse,
        "sparse_select.cuh",
        "bins[i] = 0;\n  __syncthreads();\n}",
        "bins[i] = 0;\n}",
    ),
    "sparse: off by one": (
        sparse,
        "sparse_reader.cuh",
        "(1u << lane_of_thread()) - 1u",
        "(2u << lane_of_thread()) - 1u",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_caught(mutant: str, tmp_path: pathlib.Path) -> None:
    check, name, right, wrong = MUTANTS[mutant]
    for folder in ("csrc", "tests/simt"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    file = tmp_path / "csrc/cuda" / name
    text = file.read_text()
    assert text.count(right) == 1, "the mutant no longer fits its kernel"
    file.write_text(text.replace(right, wrong))
    library = machine.build(
        tmp_path, "simt.cpp", "entry.cpp", here=tmp_path / "tests/simt", optimize="-O0"
    )
    with pytest.raises(AssertionError):
        check(machine.Machine(library))


def test_the_checks_pass_without_a_mistake(library: ctypes.CDLL) -> None:
    for check in (onebit, sparse):
        check(machine.Machine(library))
