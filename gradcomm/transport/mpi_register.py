"""Makes ``init_process_group("mpi4py")`` known to torch, without importing mpi4py before it is used."""

from __future__ import annotations

import importlib
import os
import re
import socket
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from .hosts import this_host
from .mpi_calls import TIMEOUT
from .mpi_load import abort_on_error, load
from .mpi_threads import call

#: Set by Open MPI, by MPICH and Intel MPI (PMI) and by PMIx launchers for every process they start.
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def register() -> None:
    """Registers the backend ``mpi4py`` and the rendezvous ``mpi://``; done by importing gradcomm.

    ``env://``, torch's default, becomes ``mpi://`` in processes that an MPI launcher started without
    any of torch's own variables, where it could only fail.
    """
    if "mpi4py" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("mpi4py", _create, extended_api=True, devices=["cpu"])
    # By name, since the function of the same name hides the module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if "mpi" not in handlers:
        handlers["mpi"], torch_env = _mpi_handler, handlers["env"]

        def env_or_mpi(url: str, timeout: timedelta = TIMEOUT, **kwargs: Any) -> Any:
            use_mpi = "rank=" not in url and "world_size=" not in url and _only_mpi_knows(os.environ)
            return (_mpi_handler if use_mpi else torch_env)(url, timeout=timeout, **kwargs)

        handlers["env"] = env_or_mpi


def _only_mpi_knows(environ: Any) -> bool:
    by_mpi = any(v in environ for v in LAUNCHER_VARIABLES)
    return by_mpi and not any(v in environ for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def mpi_store(timeout: timedelta = TIMEOUT) -> tuple[Store, int, int]:
    """A TCPStore shared by all of MPI.COMM_WORLD, this rank, and the number of ranks.

    Rank 0 serves it on a free port and tells the others by a broadcast. Collective.
    """
    world = load().COMM_WORLD
    rank, size = call(lambda: (world.Get_rank(), world.Get_size()))
    one_host = len(set(call(world.allgather, this_host()))) == 1
    store, address = None, None
    if rank == 0:
        host = "127.0.0.1" if one_host else _own_address()
        store = TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        address = (host, store.port)
    host, port = call(world.bcast, address, 0)
    if store is None:
        store = TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    return store, rank, size


def _own_address() -> str:
    """By which other hosts reach this one: the address of its name, or its name where that is its
    loopback only."""
    name = socket.getfqdn()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return name
    return name if address.startswith("127.") else address


def _mpi_handler(url: str, timeout: timedelta = TIMEOUT, **_: Any) -> Iterator[tuple[Any, int, int]]:
    store, rank, size = mpi_store(timeout)
    for name, given in re.findall(r"(rank|world_size)=(\d+)", url):
        found = rank if name == "rank" else size
        if int(given) != found:
            library = re.split(r"[,\n]", call(load().Get_library_version))[0]
            raise ValueError(
                f"gradcomm: mpi:// rendezvous: {name}={given}, but MPI says {found}: was this process "
                f"started by the mpirun of another MPI than mpi4py's, which is {library}?"
            )
    yield store, rank, size
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _create(options: Any, _: Any = None) -> dist.ProcessGroup:
    """A group of the ranks that call this with stores that share ``options.store``'s keys.

    Torch's ranks find each other's MPI ranks through the store, so the group is right in whatever order
    torch numbered them, beside another default backend, and when only its members call (which is what
    ``use_local_synchronization`` means).
    """
    mpi = load()
    abort_on_error()
    world = mpi.COMM_WORLD
    mpi_rank, mpi_size = call(lambda: (world.rank, world.size))
    rank, size = options.group_rank, options.group_size
    if not options.global_ranks_in_group and mpi_size != size:
        raise RuntimeError(
            f"gradcomm: MPI started {mpi_size} processes, but torch's world size is {size}; start all "
            f"of them by one mpirun or srun: mpirun -np {size} python …"
        )
    options.store.set(f"mpi rank of {rank}", str(mpi_rank))
    mpi_ranks = [int(options.store.get(f"mpi rank of {r}")) for r in range(size)]
    if len(set(mpi_ranks)) != size:
        twice = next(r for r in mpi_ranks if mpi_ranks.count(r) > 1)
        both = [r for r in range(size) if mpi_ranks[r] == twice]
        raise RuntimeError(
            f"gradcomm: torch's ranks {both} are all MPI rank {twice} of {mpi_size}: they were not "
            "started by one mpirun or srun"
        )
    # Members of several groups may make them at the same time in several threads.
    tag = zlib.crc32(str(options.group_id).encode()) & 0x7FFF
    comm = call(lambda: world.Create_group(world.Get_group().Incl(mpi_ranks), tag))

    from .mpi_backend import MpiProcessGroup  # after load(), which says what is missing

    return MpiProcessGroup(comm, options.timeout, options.store)
