"""Every launcher's variables, as plain dicts."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradcomm import launch
from gradcomm.launch import LaunchError, World, first_host, read, rendezvous

from .ranks import Ranks

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "here", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3",
}  # fmt: skip
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07,09-12]",
    "SLURM_JOB_ID": "1000", "SLURM_STEP_ID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launcher", "method"),
    [
        (TORCHRUN, "torchrun", "env://"),
        (OPENMPI, "Open MPI", "mpi://"),
        (PMI, "PMI", "mpi://"),
        (SLURM, "Slurm", "tcp://gpu07:17000"),
        (OPENMPI | {"MASTER_ADDR": "here", "MASTER_PORT": "1"}, "Open MPI", "env://"),
        # srun --mpi=pmi2 sets PMI's rank and size alone; srun -n 4 in a job of 8 tasks counts its own.
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "Slurm", "tcp://gpu07:17000"),
        (SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, "Slurm", "tcp://gpu07:17000"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, "PMI", "mpi://"),
        # torchrun on each host of an mpirun or srun: torchrun knows best.
        (TORCHRUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
                     "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "torchrun", "env://"),
        # mpirun in a batch script of Slurm, whose own variables are of one process.
        (OPENMPI | SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, "Open MPI", "mpi://"),
        ({k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHE")}, "environment", "env://"),
    ],
)  # fmt: skip
def test_launchers(environ: dict[str, str], launcher: str, method: str) -> None:
    world = read(environ)
    assert world == World(3, 1, 4, 2, torch.device("cpu"), launcher)
    assert rendezvous(environ, world) == method


def test_alone() -> None:
    # In a batch script, and in the shell of salloc.
    for step in ("4294967291", "4294967290"):
        environ = SLURM | {"SLURM_STEP_ID": step}
        assert read(environ) == read({})
    for environ in ({}, SLURM | {"SLURM_STEP_ID": "4294967291"}):
        world = read(environ)
        assert world == World(0, 0, 1, 1, torch.device("cpu"), "none")
        assert rendezvous(environ, world) is None


def test_devices() -> None:
    assert read(OPENMPI, gpus=2).device == torch.device("cuda", 1)
    assert read(OPENMPI, gpus=1).device == torch.device("cuda", 0)  # each rank sees its own
    with pytest.raises(LaunchError, match="local rank 5, but 2 GPUs"):
        read(OPENMPI | {f"OMPI_COMM_WORLD_LOCAL_{v}": n for v, n in (("RANK", "5"), ("SIZE", "8"))}, 2)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "1"}, "RANK set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set, but not RANK"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "but not MASTER_PORT"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a number"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4 ranks"),
        (OPENMPI | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but Open MPI says 4"),
        (OPENMPI | {"RANK": "0", "WORLD_SIZE": "4"}, "RANK=0, but Open MPI says 3"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK set, but not OMPI_COMM_WORLD_SIZE"),
        (OPENMPI | {"MASTER_ADDR": "here"}, "MASTER_ADDR set, but not MASTER_PORT"),
        ({k: v for k, v in SLURM.items() if "NODELIST" not in k}, "neither SLURM_STEP_NODELIST"),
        (SLURM | {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x' is not a number"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[1-"}, r"no host in the Slurm node list 'gpu\[1-'"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK set, but not MPI_LOCALRANKID|PMI_LOCAL_RANK"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK set, but no variable"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "local rank -1 of 2"),
        (TORCHRUN | {"RANK": ""}, "RANK='' is not a number"),
        (TORCHRUN | {"MASTER_PORT": "ssh"}, "MASTER_PORT='ssh' is not a number"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
    ],
)
def test_half_set_environments_are_told(environ: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        rendezvous(environ, read(environ))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3,5]", "n3"),
        ("gpu[03-05,9],login", "gpu03"),
        ("r[1-2]c,x", "r1c"),
        ("r[1-2]n[05-6],x", "r1n05"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def _two(rank: int, ranks: int, port: int, backends: list[str], come: bool) -> str:
    """What ``init`` says on this rank, in a world of its own beside that of the test."""
    names = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ.update(names | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    try:
        if not come and rank:
            time.sleep(3)
            return "late"
        dist.destroy_process_group()
        launch.init(backends[rank], timeout=timedelta(seconds=1 if not come else 30))
        return f"{dist.get_backend()} {dist.get_rank()} of {dist.get_world_size()}"
    except LaunchError as error:
        return str(error)
    finally:
        for name in (*names, "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        if not dist.is_initialized():  # the test's own is destroyed by whoever called this
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def test_ranks_meet_and_compare_backends(ranks: Ranks) -> None:
    assert ranks.run(_two, 2, _free_port(), ["gloo", "gloo"], True) == ["gloo 0 of 2", "gloo 1 of 2"]
    for said in ranks.run(_two, 2, _free_port(), ["gloo", "nccl"], True):
        assert "rank 1 has backend 'nccl', rank 0 'gloo'; give all the same" in said


def test_a_rank_that_does_not_come_is_told(ranks: Ranks) -> None:
    first, _ = ranks.run(_two, 2, _free_port(), ["gloo", "gloo"], False)
    assert "rank 0 of 2 cannot meet the others" in first and "1/2 clients joined" in first


def test_a_port_that_is_taken_is_told(ranks: Ranks) -> None:
    with socket.create_server(("", 0)) as other:
        (said,) = ranks.run(_two, 1, other.getsockname()[1], ["gloo"], True)
    assert "rank 0 of 1 cannot meet the others at env://" in said and "MASTER_PORT" in said
