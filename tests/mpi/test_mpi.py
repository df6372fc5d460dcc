"""MPI as transport and as torch's backend. Each world is started once and runs all checks."""

from __future__ import annotations

import functools

import pytest

from . import jobs
from .checks import all_checks

LIBRARIES = [pytest.param(name, marks=jobs.needs(name)) for name in jobs.LIBRARIES]


@functools.cache
def _job(library: str, world: int) -> jobs.Job:
    return jobs.run("tests.mpi.checks:run_all", world, library, timeout=180, mpi=library)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", all_checks())
def test_check(name: str, world: int, library: str) -> None:
    job = _job(library, world)
    done = job.results.get(0, [])
    assert len(job.results) == world and name in done, job.output


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_fewer_threads(level: str, library: str) -> None:
    """An MPI that may be called by one thread at a time, or by one alone."""
    only = ["pairs", "groups", "asynchronous_calls_run_in_order", "odd_and_sparse_parameters"]
    job = jobs.run("tests.mpi.checks:run_all", 2, library, level, only, timeout=120, mpi=library)
    assert job.results == {0: only, 1: only}, job.output
    assert f"MPI grants MPI_THREAD_{level.upper()}" in job.output
