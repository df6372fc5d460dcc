"""What goes wrong ends the job within its time, with the error of the rank that failed."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.transport.mpi_load import MpiUnavailableError, load
from tests.models import small_model, train
from tests.ranks import RankError, Ranks

from . import faults, jobs

mpi = jobs.needs()


@mpi
@pytest.mark.parametrize("fault", ["raise", "kill"])
@pytest.mark.parametrize(("backend", "over_mpi"), [("mpi4py", False), ("gloo", True)])
def test_a_rank_that_fails_ends_the_job(backend: str, over_mpi: bool, fault: str) -> None:
    begin = time.monotonic()
    job = jobs.run("tests.mpi.faults:train_and_fail", 2, backend, over_mpi, fault, timeout=60)
    assert time.monotonic() - begin < 55 and job.returncode != 0 and not job.results
    if fault == "raise":
        assert "ArithmeticError: a fault put in by the test" in job.output
        assert "MPI rank 1 failed and ends the job" in job.output
    else:  # mpirun names the peer: Open MPI by its rank, MPICH by its process
        assert "signal 9" in job.output and ("rank 1" in job.output or "PID" in job.output)


@mpi
def test_a_late_rank_is_a_timeout() -> None:
    job = jobs.run("tests.mpi.faults:late_rank", 2)
    first, second = job.results[0]
    assert first.startswith("TimeoutError") and "all_reduce over MPI did not end within 0.5 s" in first
    assert second.startswith("RuntimeError") and "after a call that did not end" in second


@mpi
def test_another_world_size_than_mpiruns() -> None:
    job = jobs.run("tests.mpi.faults:start", 2, environ={"WORLD_SIZE": "3"})
    assert job.returncode != 0
    assert re.search("WORLD_SIZE=3, but (Open MPI|PMI) says 2", job.output)


@mpi
def test_worlds_and_backends_that_do_not_fit() -> None:
    job = jobs.run("tests.mpi.faults:misfits", 2)
    assert len(job.results) == 2, job.output
    for large, alone, mixed in job.results.values():
        assert (
            "MPI started 2 processes, but torch's world size is 3" in large and "mpirun -np 3" in large
        )
        assert "MPI started 2 processes, but torch's world size is 1" in alone
        assert "rank 1 has backend 'mpi4py', rank 0 'gloo'; give all the same" in mixed


@jobs.needs("MPICH")
def test_mpirun_of_another_mpi_than_mpi4pys() -> None:
    open_mpi = jobs.library()
    assert open_mpi is not None and open_mpi.libmpi is not None
    environ = {"MPI4PY_LIBMPI": open_mpi.libmpi}
    job = jobs.run("tests.mpi.faults:start", 2, mpi="MPICH", environ=environ)
    assert job.returncode != 0
    found = "world_size=2, but MPI says 1: was this process started by the mpirun of another MPI"
    assert found in job.output and "which is Open MPI v" in job.output, job.output


@mpi
def test_torchs_own_call_needs_no_address() -> None:
    job = jobs.run("tests.mpi.faults:no_torch_variables", 2)
    assert job.results == {0: (0, 2, 2.0), 1: (1, 2, 2.0)}, job.output


def test_missing_mpi4py_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MpiUnavailableError, match=r"pip install gradcomm\[mpi\]"):
        load()
    with pytest.raises(MpiUnavailableError, match=r"pip install gradcomm\[mpi\]"):
        dist.init_process_group("mpi4py", store=dist.HashStore(), rank=0, world_size=1)


def test_mpirun_without_mpi4py_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(gradcomm.launch.LaunchError, match=r"gradcomm\[mpi\].*Or set MASTER_ADDR"):
        gradcomm.launch.init()


def test_mpi_without_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Funneled:
        THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)

        @staticmethod
        def Is_initialized() -> bool:
            return True

        @staticmethod
        def Is_thread_main() -> bool:
            return False  # in a thread of gradcomm's: another one started MPI

        @staticmethod
        def Query_thread() -> int:
            return 1

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", Funneled)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mpi4py", Funneled)  # type: ignore[arg-type]
    with pytest.raises(MpiUnavailableError, match=r"MPI_THREAD_FUNNELED.*MPI_THREAD_MULTIPLE"):
        load()


def test_importing_gradcomm_starts_no_mpi(ranks: Ranks) -> None:
    assert not any(ranks.run(_has_mpi, 1))


def _has_mpi(rank: int, world: int) -> bool:
    return any(name.startswith("mpi4py") for name in sys.modules)


def _killed_peer(rank: int, world: int) -> str:
    ddp: nn.Module = DDP(small_model(), bucket_cap_mb=0.03)
    state = gradcomm.register(ddp, "onebit", warmup_steps=0, min_numel=100)
    train(ddp, rank, steps=2)
    if rank == 1:
        faults.os.kill(faults.os.getpid(), faults.signal.SIGKILL)
    try:
        train(ddp, rank, steps=1)
    except gradcomm.LaneError as error:
        raise RuntimeError(f"as LaneError: {error}") from None
    finally:
        state.close()
    return ""


def test_over_gloo_a_killed_peer_is_a_lane_error(ranks: Ranks) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(_killed_peer, 2, timeout=60)
    errors: Any = caught.value.errors
    assert time.monotonic() - begin < 55
    assert "as LaneError: gradcomm: step 2, bucket 0" in errors[0][1], errors
    assert "peer" in errors[0][1].lower(), errors
