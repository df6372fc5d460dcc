"""The comparison with the reference catches a mistake put into the real kernels."""

from __future__ import annotations

import pathlib
import shutil

import machine
import pytest
import torch
from compare import check_encode

from gradcomm.ops import OneBitFormat

ROOT = pathlib.Path(__file__).parents[2]
MUTANTS = {
    "barrier removed": (
        "blocks.cuh",
        "read_tile<Type>(t, r, e, p);\n    __syncwarp();",
        "read_tile<Type>(t, r, e, p);",
    ),
    "wrong mask": (
        "onebit.cuh",
        "__shfl_xor_sync(kAllLanes, sum, width)",
        "__shfl_xor_sync(0x7fffffffu, sum, width)",
    ),
    "off by one": ("warp.cuh", "i < t.block;", "i <= t.block;"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_caught(mutant: str, tmp_path: pathlib.Path) -> None:
    name, right, wrong = MUTANTS[mutant]
    for folder in ("csrc", "tests/simt"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    file = tmp_path / "csrc/cuda" / name
    text = file.read_text()
    assert text.count(right) == 1, "the mutant no longer fits its kernel"
    file.write_text(text.replace(right, wrong))
    library = machine.build(
        tmp_path, "simt.cpp", "entry.cpp", here=tmp_path / "tests/simt", optimize="-O0"
    )
    run = {
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
    with pytest.raises(AssertionError):
        check_encode(machine.Machine(library), OneBitFormat(512), run)
