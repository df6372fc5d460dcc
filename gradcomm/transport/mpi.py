"""An MPI communicator as transport: payloads over the cluster's own MPI, beside any torch group."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

from torch import Tensor

from gradcomm.stats import Traffic

from .mpi_calls import TIMEOUT, Calls
from .mpi_load import abort_on_error, load
from .mpi_threads import call


class MpiTransport:
    """Blocking collectives over an ``mpi4py`` communicator. Tensors are contiguous, of any dtype, and on
    the CPU, or on a GPU if ``cuda_aware`` is true; else ``Staged(MpiTransport(comm), device)`` helps.

    The communicator is duplicated, so that nothing else meets these calls; that is collective over it.
    From then on an exception that ends a process ends the MPI job.

    Args:
        comm: an intracommunicator that this rank is in.
        timeout: a call that takes longer raises TimeoutError.
        cuda_aware: whether the library may be given pointers to a GPU's memory. By default it is asked
            (``is_cuda_aware``), and must say so on every rank.

    Raises MpiUnavailableError (``load``), TypeError and ValueError for what is no communicator.
    """

    def __init__(self, comm: Any, timeout: timedelta = TIMEOUT, cuda_aware: bool | None = None) -> None:
        check_comm(comm)
        abort_on_error()
        self._calls = Calls(call(comm.Dup), timeout)
        self.rank, self.size = self._calls.rank, self._calls.size
        self.traffic = Traffic()
        aware = is_cuda_aware() if cuda_aware is None else cuda_aware
        self.cuda_aware = all(self._calls.all_gather_object(aware))
        # Of its own, since blocking collectives and others must not meet.
        self._cuda = Calls(call(comm.Dup), timeout, blocking=True) if self.cuda_aware else None

    def all_reduce(self, tensor: Tensor) -> None:
        calls = self._for(tensor)
        if tensor.is_sparse:
            calls.all_reduce_sparse(tensor)
        elif tensor.is_contiguous():
            calls.all_reduce(tensor)
        else:
            packed = tensor.contiguous()
            calls.all_reduce(packed)
            tensor.copy_(packed)
        data = tensor._values() if tensor.is_sparse else tensor
        moved = 2 * data.numel() * data.element_size() * (self.size - 1) // self.size
        self.traffic.add(moved, moved)

    def all_gather(self, rows: Tensor) -> None:
        self._for(rows).all_gather(rows)
        moved = (self.size - 1) * (rows.numel() // self.size) * rows.element_size()
        self.traffic.add(moved, moved)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        self._for(rows).all_to_all(out, rows)
        moved = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self.traffic.add(moved, moved)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self._calls.all_gather_object(item)

    def split(self, members: list[list[int]]) -> MpiTransport:
        color = next(i for i, m in enumerate(members) if self.rank in m)
        key = members[color].index(self.rank)
        part = call(lambda: self._calls.comm.Split(color, key))
        made = MpiTransport(part, self._calls.timeout, self.cuda_aware)
        call(part.Free)  # the transport has a duplicate
        return made

    def host(self) -> str:
        """Names the ranks with which this one shares memory, by the first of them. Collective."""
        mpi = load()

        def first() -> int:
            shared = self._calls.comm.Split_type(mpi.COMM_TYPE_SHARED, self.rank)
            rank: int = shared.bcast(self.rank, 0)
            shared.Free()
            return rank

        return f"host of rank {call(first)}"

    def close(self) -> None:
        self._calls.free()
        if self._cuda is not None:
            self._cuda.free()

    def _for(self, tensor: Tensor) -> Calls:
        if tensor.device.type == "cpu":
            return self._calls
        if tensor.is_cuda and self._cuda is not None:
            return self._cuda
        raise ValueError(
            f"gradcomm: a tensor on {tensor.device}, but this MPI says that it is not CUDA-aware: wrap "
            "the transport, Staged(MpiTransport(comm), device), or pass cuda_aware=True if it is"
        )


def is_cuda_aware() -> bool:
    """Whether the MPI library says that it reads and writes a GPU's memory.

    It is asked by ``MPIX_Query_cuda_support`` (Open MPI, MPICH and those made from it), found in the
    library that mpi4py is linked with; else by the info ``mpi_memory_alloc_kinds`` of MPI 4.1.
    """
    mpi = load()
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(call(query))

    def kinds() -> str:
        return str(mpi.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or "")

    return any(kind.split(":")[0] == "cuda" for kind in call(kinds).split(","))


def check_comm(comm: Any) -> None:
    """Raises TypeError or ValueError unless this rank can use ``comm`` as an intracommunicator."""
    mpi = load()
    if not isinstance(comm, mpi.Comm):
        raise TypeError(
            f"gradcomm: transport={comm!r}; give an mpi4py communicator, MPI.COMM_WORLD say, or an "
            "object with the methods of gradcomm.transport.Transport"
        )
    if comm == mpi.COMM_NULL:
        rank, size = call(lambda: (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size))
        raise ValueError(
            f"gradcomm: transport=MPI.COMM_NULL: MPI rank {rank} of {size} is not in the communicator; "
            "only its members may register"
        )
    if call(comm.Is_inter):
        raise ValueError("gradcomm: transport is an intercommunicator; give an intracommunicator")
