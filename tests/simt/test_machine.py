"""The emulator lets a right kernel pass and says what is wrong with each of the others."""

from __future__ import annotations

import ctypes
import re

import machine
import pytest
import torch

RIGHT, NO_BARRIER, SUM, WRONG_MASK, OFF_BY_ONE, EXITS, DIVERGES, BRANCH = range(8)


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = machine.build(tmp_path_factory.mktemp("faulty"), "simt.cpp", "faulty.cpp")
    library.simt_faulty.restype = ctypes.c_char_p
    library.simt_faulty.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return library


def run(library: ctypes.CDLL, which: int, order: int) -> tuple[str, torch.Tensor]:
    given, out = torch.arange(64.0), torch.full((64,), -1.0)
    fault = library.simt_faulty(which, order, given.data_ptr(), out.data_ptr())
    return "" if fault is None else fault.decode(), out


orders = pytest.mark.parametrize("order", range(3), ids=machine.ORDERS)


@orders
def test_right_kernels_run_in_every_order(faulty: ctypes.CDLL, order: int) -> None:
    fault, out = run(faulty, RIGHT, order)
    assert fault == "" and torch.equal(out, torch.arange(64.0).roll(-1))
    fault, out = run(faulty, SUM, order)
    assert fault == "" and torch.equal(out.view(2, 32)[:, 0], torch.arange(64.0).view(2, 32).sum(1))


def test_a_missing_barrier_shows_in_the_bytes(faulty: ctypes.CDLL) -> None:
    results = [run(faulty, NO_BARRIER, order)[1] for order in range(3)]
    assert not torch.equal(results[0], results[1])
    assert results[0].isnan().any()  # the poison of shared memory


@orders
@pytest.mark.parametrize(
    ("which", "says"),
    [
        (WRONG_MASK, "is not in its own mask|reads a lane that is not in the mask"),
        (OFF_BY_ONE, "wrote outside its shared memory"),
        (EXITS, "has exited, others wait for it"),
        (DIVERGES, "came to .* where .* came to"),
        (BRANCH, "has exited, others wait for it"),
    ],
)
def test_mistakes_are_named(faulty: ctypes.CDLL, which: int, says: str, order: int) -> None:
    fault, _ = run(faulty, which, order)
    assert re.search(says, fault), fault
