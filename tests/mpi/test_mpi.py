"""MPI as transport and as torch's backend. Each world is started once and runs all checks."""

from __future__ import annotations

import functools

import pytest

from . import backend_checks, jobs
from .checks import CHECKS

assert backend_checks  # its checks are in CHECKS by its import

pytestmark = pytest.mark.skipif(jobs.missing() is not None, reason=str(jobs.missing()))


@functools.cache
def _job(world: int) -> jobs.Job:
    return jobs.run("tests.mpi.checks:run_all", world, timeout=120)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, world: int) -> None:
    job = _job(world)
    done = job.results.get(0, [])
    assert len(job.results) == world and name in done, job.output
