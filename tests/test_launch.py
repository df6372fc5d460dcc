"""Every launcher's variables, as plain dicts."""

from __future__ import annotations

import pytest
import torch

from gradcomm.launch import LaunchError, World, first_host, read, rendezvous

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
    for environ in ({}, SLURM | {"SLURM_STEP_ID": "4294967291"}):
        world = read(environ)
        assert world == World(0, 0, 1, 1, torch.device("cpu"), "none")
        assert rendezvous(environ, world) is None


def test_devices() -> None:
    assert read(OPENMPI, gpus=2).device == torch.device("cuda", 1)
    assert read(OPENMPI, gpus=1).device == torch.device("cuda", 0)  # each rank sees its own
    with pytest.raises(LaunchError, match="local rank 5, but 2 GPUs"):
        read(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "5"}, gpus=2)


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
    ],
)
def test_half_set_environments_are_told(environ: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        rendezvous(environ, read(environ))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3,5]", "n3"), ("gpu[03-05,9],login", "gpu03"), ("r[1-2]c,x", "r1c")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
