"""An MPI communicator as transport: payloads over the cluster's own MPI, beside any torch group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

from gradcomm.stats import Traffic

from .mpi_calls import TIMEOUT, Calls
from .mpi_load import abort_on_error, load


class MpiTransport:
    """Blocking collectives over an ``mpi4py`` communicator. CPU tensors of any dtype, contiguous.

    The communicator is duplicated, so that nothing else meets these calls; that is collective over it.
    From then on an exception that ends a process ends the MPI job.

    Args:
        comm: an intracommunicator that this rank is in.
        timeout: a call that takes longer raises TimeoutError.

    Raises MpiUnavailableError (``load``), TypeError and ValueError for what is no communicator.
    """

    def __init__(self, comm: Any, timeout: timedelta = TIMEOUT) -> None:
        check_comm(comm)
        abort_on_error()
        self._calls = Calls(comm.Dup(), timeout)
        self.rank, self.size = self._calls.rank, self._calls.size
        self.traffic = Traffic()

    def all_reduce(self, tensor: Tensor) -> None:
        _on_cpu(tensor)
        if tensor.is_sparse:
            self._calls.all_reduce_sparse(tensor)
        elif tensor.is_contiguous():
            self._calls.all_reduce(tensor)
        else:
            packed = tensor.contiguous()
            self._calls.all_reduce(packed)
            tensor.copy_(packed)
        data = tensor._values() if tensor.is_sparse else tensor
        moved = 2 * data.numel() * data.element_size() * (self.size - 1) // self.size
        self.traffic.add(moved, moved)

    def all_gather(self, rows: Tensor) -> None:
        _on_cpu(rows)
        self._calls.all_gather(rows)
        moved = (self.size - 1) * (rows.numel() // self.size) * rows.element_size()
        self.traffic.add(moved, moved)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        _on_cpu(rows)
        self._calls.all_to_all(out, rows)
        moved = rows.numel() // self.size * (self.size - 1) * rows.element_size()
        self.traffic.add(moved, moved)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self._calls.all_gather_object(item)

    def split(self, members: list[list[int]]) -> MpiTransport:
        color = next(i for i, m in enumerate(members) if self.rank in m)
        part = self._calls.comm.Split(color, members[color].index(self.rank))
        made = MpiTransport(part, self._calls.timeout)
        part.Free()  # the transport has a duplicate
        return made

    def close(self) -> None:
        self._calls.free()


def check_comm(comm: Any) -> None:
    """Raises TypeError or ValueError unless this rank can use ``comm`` as an intracommunicator."""
    mpi = load()
    if not isinstance(comm, mpi.Comm):
        raise TypeError(
            f"gradcomm: transport={comm!r}; give an mpi4py communicator, MPI.COMM_WORLD say, or an "
            "object with the methods of gradcomm.transport.Transport"
        )
    if comm == mpi.COMM_NULL:
        raise ValueError(
            f"gradcomm: transport=MPI.COMM_NULL: MPI rank {mpi.COMM_WORLD.rank} of "
            f"{mpi.COMM_WORLD.size} is not in the communicator; only its members may register"
        )
    if comm.Is_inter():
        raise ValueError("gradcomm: transport is an intercommunicator; give an intracommunicator")


def _on_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"gradcomm: a tensor on {tensor.device}: MPI carries CPU tensors only")
