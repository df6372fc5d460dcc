"""One line to start a rank, whoever started the process.

world = gradcomm.launch.init()          # under torchrun, mpirun or srun alike, or alone
model.to(world.device)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as rendezvous_at

from gradcomm.transport.mpi_load import MpiUnavailableError, abort_on_error

#: Of each launcher: the variables of rank, world size, local rank and local world size.
_LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None),
}
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_START = f"start with mpirun, srun or torchrun, or set {', '.join(_TORCH)}, MASTER_ADDR and MASTER_PORT"
#: From here on Slurm's step numbers are of no srun: the batch script, the shell of salloc; one process.
_NO_STEP = 0xFFFFFFF0


class LaunchError(RuntimeError):
    """The environment does not say who this rank is; the message names the variables."""


@dataclasses.dataclass(frozen=True)
class World:
    """Who this process is: ``rank`` of ``world_size``, ``local_rank`` of ``local_world_size`` on this
    host, its ``device``, and the ``launcher``: torchrun, Open MPI, PMI, Slurm or none."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    launcher: str


def init(backend: str | None = None, timeout: timedelta | None = None) -> World:
    """``init_process_group`` from what the launcher says. Collective.

    Args:
        backend: torch's name, or ``"mpi4py"``, which keeps the rank on the CPU; by default nccl where
            there is a GPU, else gloo.
        timeout: of the process group, and for ranks to meet; by default torch's.

    Sets the CUDA device of this rank. The ranks meet at MASTER_ADDR and MASTER_PORT if those are set,
    else at an address agreed over MPI, else at the first host of the Slurm job.

    Raises LaunchError for an environment that is half set or contradicts itself, on every rank when
    ranks name different backends, and where they do not meet within the timeout.
    """
    world = read(os.environ, 0 if backend == "mpi4py" else torch.cuda.device_count())
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # before MPI starts: it may look for the current device
    if backend is None:
        backend = "nccl" if world.device.type == "cuda" else "gloo"
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    method = rendezvous(os.environ, world)
    store: Store = HashStore()
    if method is not None:
        # torchrun's store outlives a restart, and with it where the ranks of the last attempt were.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {world.world_size}"
        store = PrefixStore(f"default_pg, attempt {attempt}", _meet(method, world, options))
        _agree(store, world, backend)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, **options
    )
    return world


def _meet(method: str, world: World, options: dict[str, Any]) -> Store:
    """The store of all ranks."""
    if method == "mpi://":
        try:
            abort_on_error()
        except MpiUnavailableError as error:
            raise LaunchError(
                f"{error}. Or set MASTER_ADDR and MASTER_PORT to where rank 0 runs; that needs no MPI"
            ) from error
    try:
        store: Store = next(rendezvous_at(method, world.rank, world.world_size, **options))[0]
    except dist.DistError as error:
        raise LaunchError(
            f"gradcomm: rank {world.rank} of {world.world_size} cannot meet the others at {method}: "
            f"{error}. Has one failed, or were fewer started? Else set MASTER_ADDR and MASTER_PORT to "
            "where rank 0 runs and to a port that is free there"
        ) from error
    if options:
        store.set_timeout(options["timeout"])
    return store


def _agree(store: Store, world: World, backend: str) -> None:
    """Ranks of different backends would wait for each other for ever."""
    store.set(f"backend of rank {world.rank}", backend)
    verdict = ""
    if world.rank == 0:
        for rank in range(1, world.world_size):
            theirs = store.get(f"backend of rank {rank}").decode()
            if theirs != backend and not verdict:
                verdict = f"rank {rank} has backend {theirs!r}, rank 0 {backend!r}; give all the same"
        store.set("backends", verdict)
    else:
        verdict = store.get("backends").decode()
    if verdict:
        store.set(f"heard by rank {world.rank}", "")
        if world.rank == 0:  # which serves the store: it stays until all know
            with contextlib.suppress(dist.DistError):
                everyone = [f"heard by rank {rank}" for rank in range(world.world_size)]
                store.wait(everyone, timedelta(seconds=10))
        raise LaunchError(f"gradcomm: {verdict}")


def read(environ: Mapping[str, str], gpus: int = 0) -> World:
    """This rank as the variables describe it, on a host with so many GPUs."""
    places: dict[str, tuple[int, int, int, int]] = {}
    half: list[str] = []  # what is wrong with those that are not whole
    for name in _LAUNCHERS:
        try:
            place = _place(environ, name)
        except LaunchError as error:  # srun sets some of PMI's; then it is Slurm that knows the rest
            half.append(str(error))
        else:
            places |= {} if place is None else {name: place}
    launcher = next(iter(places), "none")
    rank, size, local_rank, local_size = places.get(launcher, (0, 1, 0, 1))
    torchrun = "TORCHELASTIC_RUN_ID" in environ
    if torchrun or (launcher == "none" and ("RANK" in environ or "WORLD_SIZE" in environ)):
        # Under torchrun whoever started torchrun, once a host, say, does not matter.
        missing = [v for v in (*_TORCH[:3], "MASTER_ADDR", "MASTER_PORT") if v not in environ]
        if missing:
            there = [v for v in (*_TORCH, "MASTER_ADDR", "MASTER_PORT") if v in environ]
            raise LaunchError(
                f"gradcomm: {', '.join(there)} set, but not {', '.join(missing)}; start with torchrun, "
                "mpirun or srun, or set all of them"
            )
        rank, size, local_rank = (_number(environ, v) for v in _TORCH[:3])
        local_size = _number(environ, _TORCH[3]) if _TORCH[3] in environ else local_rank + 1
        launcher = "torchrun" if torchrun else "environment"
    elif half and launcher == "none":
        raise LaunchError(half[0])
    elif "PMIX_RANK" in environ and launcher == "none":
        raise LaunchError(
            "gradcomm: PMIX_RANK set, but no variable of Open MPI or Slurm that tells the number of "
            f"ranks; {_START}"
        )
    else:
        for variable, found in (("WORLD_SIZE", size), ("RANK", rank)):
            if variable in environ and _number(environ, variable) != found:
                raise LaunchError(
                    f"gradcomm: {variable}={environ[variable]}, but {launcher} says {found}: "
                    f"{_variables(launcher)}; unset {variable}, or start as many processes as it says"
                )
    if not 0 <= rank < size:
        raise LaunchError(f"gradcomm: rank {rank} of {size} ranks, by {launcher}")
    if not 0 <= local_rank < local_size:
        raise LaunchError(f"gradcomm: local rank {local_rank} of {local_size} here, by {launcher}")
    device = torch.device("cpu")
    if gpus:
        if local_rank >= gpus and gpus > 1:
            raise LaunchError(
                f"gradcomm: local rank {local_rank}, but {gpus} GPUs here; start one process a GPU"
            )
        # One visible GPU and several ranks: the launcher gave each rank its own.
        device = torch.device("cuda", local_rank if gpus > 1 else 0)
    return World(rank, local_rank, size, local_size, device, launcher)


def rendezvous(environ: Mapping[str, str], world: World) -> str | None:
    """torch's ``init_method``; None where there is nobody to meet. Raises LaunchError."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address and port:
        if not 0 < _number(environ, "MASTER_PORT") < 1 << 16:
            raise LaunchError(f"gradcomm: MASTER_PORT={port} is no port; use one from 1 to 65535")
        return "env://"
    if address or port:
        one, other = ("MASTER_ADDR", "MASTER_PORT") if address else ("MASTER_PORT", "MASTER_ADDR")
        raise LaunchError(f"gradcomm: {one} set, but not {other}; set both or neither")
    if world.launcher in ("Open MPI", "PMI"):
        return "mpi://"
    if world.launcher == "Slurm" and world.world_size > 1:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise LaunchError(
                "gradcomm: SLURM_PROCID set, but neither SLURM_STEP_NODELIST nor MASTER_ADDR; set "
                "MASTER_ADDR and MASTER_PORT to where rank 0 runs"
            )
        # Steps of one job, and jobs that share a host, should not meet at each other's port.
        number = _number(environ, "SLURM_JOB_ID") * 17 + _number(environ, "SLURM_STEP_ID")
        return f"tcp://{first_host(nodes)}:{15000 + number % 15000}"
    return None


def first_host(nodes: str) -> str:
    """Of a Slurm node list: ``gpu[03-05,9],login`` -> ``gpu03``, ``r[1-2]n[5-6]`` -> ``r1n5``."""
    first = re.match(r"(?:[^\[\],]|\[\w[^\]]*\])+(?=,|$)", nodes)  # up to a comma outside of brackets
    if first is None:
        raise LaunchError(f"gradcomm: no host in the Slurm node list {nodes!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _place(environ: Mapping[str, str], launcher: str) -> tuple[int, int, int, int] | None:
    rank, size, local_rank, local_size = _LAUNCHERS[launcher]
    if rank not in environ:
        return None
    if launcher == "Slurm":
        if "SLURM_STEP_ID" not in environ or _number(environ, "SLURM_STEP_ID") >= _NO_STEP:
            return None  # in the batch script, not in srun
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else size
    if launcher == "PMI" and local_rank not in environ:  # HPE's PALS
        local_rank, local_size = "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"
    missing = [v for v in (size, local_rank) if v not in environ]
    if missing:
        raise LaunchError(f"gradcomm: {rank} set, but not {', '.join(missing)}; {_START}")
    here = _number(environ, local_rank)
    known = local_size is not None and local_size in environ
    if launcher == "Slurm":
        local = _slurm_local_size(environ, here)
    else:
        local = _number(environ, str(local_size)) if known else here + 1
    return _number(environ, rank), _number(environ, size), here, local


def _slurm_local_size(environ: Mapping[str, str], local_rank: int) -> int:
    """SLURM_STEP_TASKS_PER_NODE is ``2(x3),1``: two tasks on each of three nodes, one on the next."""
    node = int(environ.get("SLURM_NODEID", "0"))
    for count, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return local_rank + 1


def _number(environ: Mapping[str, str], variable: str) -> int:
    try:
        return int(environ[variable])
    except (KeyError, ValueError):
        raise LaunchError(f"gradcomm: {variable}={environ.get(variable)!r} is not a number") from None


def _variables(launcher: str) -> str:
    return ", ".join(v for v in _LAUNCHERS.get(launcher, ()) if v)
