"""The tests of the hook, as they are written for Gloo, on ranks of mpirun.

Each rank runs pytest, and the pool of ranks that tests ask for is these ranks themselves.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradcomm
from tests.ranks import RankError, Ranks


class _Passed:
    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.tests.append(report.nodeid)


def run_all(carrier: str, files: list[str]) -> list[str]:
    """The tests that passed, on this rank. ``carrier``: ``"backend"``, MPI carries everything, or
    ``"transport"``, the payloads beside Gloo. Tests of another number of ranks are skipped."""
    gradcomm.launch.init("mpi4py" if carrier == "backend" else "gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(Ranks, "__init__", lambda self: None)
    patch.setattr(Ranks, "close", lambda self: None)
    patch.setattr(Ranks, "run", _run)
    if carrier == "transport":
        from mpi4py import MPI

        made = gradcomm.CommState.__init__

        def with_transport(self: gradcomm.CommState, *arguments: Any, **options: Any) -> None:
            # Another group than the world's would want another communicator.
            own = options.get("process_group") in (None, dist.group.WORLD)
            made(self, *arguments, **({"transport": MPI.COMM_WORLD} if own else {}) | options)

        patch.setattr(gradcomm.CommState, "__init__", with_transport)
    passed = _Passed()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files], plugins=[passed])
    patch.undo()
    if code != 0:
        raise SystemExit(f"pytest ended with {code}")
    dist.destroy_process_group()
    return passed.tests


def _run(
    self: Ranks,
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 0,
    **options: Any,
) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if ranks != world:
        pytest.skip(f"for {ranks} ranks; these are {world}")
    reply: tuple[str, ...] | tuple[str, Any]
    try:
        reply = ("ok", function(rank, ranks, *arguments, **options))
    except Exception as error:
        reply = ("error", type(error).__name__, str(error), traceback.format_exc())
    replies: list[Any] = [None] * world
    dist.all_gather_object(replies, reply)
    failed = {r: reply for r, reply in enumerate(replies) if reply[0] == "error"}
    if failed:
        text = "\n".join(f"rank {r}: {reply[3]}" for r, reply in failed.items())
        raise RankError(text, {r: (reply[1], reply[2]) for r, reply in failed.items()})
    return [reply[1] for reply in replies]
