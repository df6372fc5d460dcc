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


@pytest.mark.parametrize(
    ("library", "level"),
    [
        pytest.param("any", "funneled", marks=jobs.needs()),
        pytest.param("MPICH", "serialized", marks=jobs.needs("MPICH")),
    ],
)
def test_fewer_threads(level: str, library: str) -> None:
    """An MPI that may be called by one thread at a time, or by one alone."""
    only = ["pairs", "groups", "asynchronous_calls_run_in_order", "odd_and_sparse_parameters"]
    job = jobs.run("tests.mpi.checks:run_all", 2, library, level, only, timeout=120, mpi=library)
    assert job.results == {0: only, 1: only}, job.output
    assert f"MPI grants MPI_THREAD_{level.upper()}" in job.output


@jobs.needs()
@pytest.mark.parametrize(
    ("world", "carrier", "files", "at_least"),
    [
        (2, "backend", ["hook", "parameters", "register"], 75),
        (2, "transport", ["hook", "parameters", "register"], 75),
        (4, "backend", ["hook"], 9),
    ],
)
def test_the_hooks_own_tests(world: int, carrier: str, files: list[str], at_least: int) -> None:
    paths = [f"tests/test_{file}.py" for file in files]
    job = jobs.run("tests.mpi.hook_suite:run_all", world, carrier, paths, timeout=180)
    assert len(job.results) == world, job.output
    assert all(len(passed) >= at_least for passed in job.results.values()), job.results
