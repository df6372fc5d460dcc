"""Collectives over an MPI communicator, straight from tensors' memory. Shared by the transport and the
torch.distributed backend.

Every call is a non-blocking one that is polled: so a call can time out, and a thread that waits leaves
its core to backward. Only for a GPU's memory they are blocking ones, since several CUDA-aware libraries
do not survive others; a polled barrier before each keeps the timeout.

Reductions are done here, not by MPI: an all-reduce is an all-to-all of chunks, a sum in rank order by
each chunk's owner, and an all-gather. So every rank ends with the same bits (``MPI_Allreduce`` does not
promise that), 16-bit floats are summed in float32, and each rank sends 2 (P - 1) / P of the tensor, as a
ring does.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from .mpi_load import load
from .mpi_threads import call

#: Bytes that MPI is given as a plain count at most. Counts of MPI 3 have 31 bits; smaller pieces also
#: bound the scratch memory of a reduction.
PIECE = 1 << 28

#: torch's own default.
TIMEOUT = timedelta(minutes=30)

#: Polls before a waiting thread begins to sleep between polls, and for how long it sleeps (seconds).
#: Large messages lose nothing by it; small ones pay some 60 µs where the peers are late.
_SPINS, _NAP = 50, 20e-6

_TAG = 7

#: Requests that timed out, and their tensors: MPI may write there until the process ends, whoever has
#: dropped the tensors meanwhile.
_abandoned: list[Any] = []


class Calls:
    """Blocking collectives over ``comm``, which nothing else may use. All ranks call the same in order.

    Tensors are contiguous, of any dtype, and on the CPU; with ``blocking``, where a CUDA-aware MPI can
    read them. After a call that timed out, every further one raises at once, since ranks no longer agree
    on what comes next.
    """

    def __init__(self, comm: Any, timeout: timedelta = TIMEOUT, blocking: bool = False) -> None:
        self.mpi = load()
        self.comm = comm
        self.rank, self.size = call(lambda: (int(comm.Get_rank()), int(comm.Get_size())))
        self.timeout = timeout
        self._blocking = blocking
        self._broken: str | None = None  # why ranks no longer agree

    def free(self) -> None:
        """Frees the communicator, unless a call is still under way in it."""
        if self._broken is None and not self.mpi.Is_finalized():
            call(self.comm.Free)

    # ---- moving bytes -----------------------------------------------------------------------

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        """Row r of ``rows`` goes to rank r; row r of ``out`` is what rank r sent. Any shape whose
        elements divide by the number of ranks."""
        outs, ins = out.view(self.size, -1), rows.view(self.size, -1)
        if _bytes(rows) > PIECE:
            self.direct(list(enumerate(ins)), list(enumerate(outs)), "all_to_all")
        else:
            specs = self._spec(rows, self.size), self._spec(out, self.size)
            self._collective("alltoall", specs, "all_to_all", (out, rows))

    def all_gather(self, rows: Tensor) -> None:
        """``rows``: ``[size, …]`` with this rank's row filled in; fills in all others."""
        if _bytes(rows) > PIECE:
            mine = rows[self.rank]
            others = [r for r in range(self.size) if r != self.rank]
            self.direct([(r, mine) for r in others], [(r, rows[r]) for r in others], "all_gather")
        else:
            specs = self.mpi.IN_PLACE, self._spec(rows, self.size)
            self._collective("allgather", specs, "all_gather", (rows,))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        flat = tensor.view(-1)
        for piece in flat.split(_piece(flat)) if flat.numel() else ():
            self._collective("bcast", (self.message(piece), root), "broadcast", (piece,))

    def barrier(self, what: str = "barrier") -> None:
        self.wait([call(self.comm.Ibarrier)], what, None)

    def direct(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], what: str
    ) -> None:
        """Sends and receives between pairs of ranks, (peer, tensor) each; what a rank sends to itself is
        copied. Peers must agree on sizes."""
        here = [t for peer, t in sends if peer == self.rank]
        for (_, into), source in zip((p for p in receives if p[0] == self.rank), here, strict=True):
            into.view(-1).copy_(source.view(-1))
        arriving = [(self.message(t), peer, _TAG) for peer, t in receives if peer != self.rank]
        leaving = [(self.message(t), peer, _TAG) for peer, t in sends if peer != self.rank]
        if self._blocking:
            self._pairwise(leaving, arriving, what, [t for _, t in sends])
            return
        requests = [call(self.comm.Irecv, *message) for message in arriving]
        requests += [call(self.comm.Isend, *message) for message in leaving]
        self.wait(requests, what, (sends, receives))

    def _pairwise(self, leaving: list[Any], arriving: list[Any], what: str, held: list[Tensor]) -> None:
        """One message to and one from each other rank, by blocking calls."""
        _stream_done(held[0])
        self.barrier(what)
        to, source = ({message[1]: message for message in way} for way in (leaving, arriving))
        for distance in range(1, self.size):
            after, before = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            call(self.comm.Sendrecv, *to[after], *source[before])

    def all_gather_object(self, item: Any) -> list[Any]:
        """Small Python objects, pickled."""
        mine = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = mine.numel()
        self.all_gather(sizes)
        rows = torch.zeros((self.size, int(sizes.max())), dtype=torch.uint8)
        rows[self.rank, : mine.numel()] = mine
        self.all_gather(rows)
        pickles = zip(rows.numpy(), sizes.tolist(), strict=True)
        return [pickle.loads(row[:length].tobytes()) for row, length in pickles]

    # ---- reducing ---------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """``tensor`` is reduced over ranks in place; every rank ends with the same bits."""
        flat = tensor.view(-1)
        if self.size == 1 or flat.numel() == 0:
            return
        for piece in flat.split(_piece(flat)):
            self._all_reduce_piece(piece, op)

    def _all_reduce_piece(self, flat: Tensor, op: str) -> None:
        n, ranks, width = flat.numel(), self.size, flat.element_size()
        chunk = -(-n // ranks)
        ends = [min(n, r * chunk) for r in range(ranks + 1)]
        counts = [(b - a) * width for a, b in itertools.pairwise(ends)]
        starts = [a * width for a in ends[:-1]]
        mine = ends[self.rank + 1] - ends[self.rank]
        received = torch.empty((ranks, mine), dtype=flat.dtype, device=flat.device)
        byte = self.mpi.BYTE
        spread = [self._buffer(flat), counts, starts, byte]
        each = mine * width
        landing = [self._buffer(received), [each] * ranks, [r * each for r in range(ranks)], byte]
        self._collective("alltoallv", (spread, landing), "all_reduce", (flat, received))
        flat[ends[self.rank] : ends[self.rank + 1]] = reduced(received, op)
        self._collective("allgatherv", (self.mpi.IN_PLACE, spread), "all_reduce", (flat,))

    def all_reduce_sparse(self, tensor: Tensor) -> None:
        """The sum, in place, of a sparse tensor: all ranks add the same entries in the same order."""
        own = tensor.coalesce()
        entries = self.all_gather_object((own.indices(), own.values()))
        total = torch.sparse_coo_tensor(
            torch.cat([i for i, _ in entries], 1),
            torch.cat([v for _, v in entries]),
            tensor.shape,
            check_invariants=False,
        )
        tensor.copy_(total.coalesce())

    def reduce_scatter(self, out: Tensor, rows: Tensor, op: str = "sum") -> None:
        """``out`` is this rank's row of the reduction of ``rows`` over ranks."""
        received = torch.empty_like(rows).view(self.size, -1)
        self.all_to_all(received, rows)
        out.view(-1).copy_(reduced(received, op))

    # ---- waiting ----------------------------------------------------------------------------

    def _collective(
        self, name: str, arguments: tuple[Any, ...], what: str, held: tuple[Tensor, ...]
    ) -> None:
        """MPI's collective ``name``, blocking or polled. ``held``: the tensors that it uses."""
        if self._blocking:
            _stream_done(held[0])
            self.barrier(what)
            call(getattr(self.comm, name.capitalize()), *arguments)
        else:
            self.wait([call(getattr(self.comm, f"I{name}"), *arguments)], what, held)

    def wait(
        self,
        requests: list[Any],
        what: str,
        held: Any,
        timeout: timedelta | None = None,
        statuses: list[Any] | None = None,
    ) -> None:
        """Polls until all requests are done. ``held``: the tensors in use, kept alive if that fails.

        Raises TimeoutError; RuntimeError when an earlier call timed out.
        """
        if self._broken is not None:
            raise RuntimeError(
                f"gradcomm: {what} over MPI after a call that did not end: {self._broken}"
            )
        limit = (timeout or self.timeout).total_seconds()
        spins, start = 0, time.monotonic()
        while not call(self.mpi.Request.Testall, requests, statuses):
            spins += 1
            time.sleep(0 if spins < _SPINS else _NAP)
            if spins % 256 == 0 and time.monotonic() - start > limit:
                message = (
                    f"gradcomm: {what} over MPI did not end within {limit:g} s on rank {self.rank} of "
                    f"{self.size}: another rank has not called it, or is gone"
                )
                self._broken = message
                _abandoned.append((self.comm, requests, held))
                raise TimeoutError(message)

    def wait_one(
        self, request: Any, what: str, held: Any, status: Any, timeout: timedelta | None = None
    ) -> None:
        """``wait`` for one request, whose ``status`` is filled in."""
        self.wait([request], what, held, timeout, [status])

    def message(self, tensor: Tensor) -> list[Any]:
        """The tensor's memory as one MPI message of bytes, however large."""
        nbytes = _bytes(tensor)
        if nbytes <= PIECE:
            return self._spec(tensor, 1)
        count, rest = divmod(nbytes, PIECE)
        return [self._buffer(tensor), 1, call(_large, self.mpi, PIECE, count, rest)]

    def _buffer(self, tensor: Tensor) -> Any:
        return self.mpi.buffer.fromaddress(tensor.data_ptr(), _bytes(tensor))

    def _spec(self, tensor: Tensor, rows: int) -> list[Any]:
        """An MPI message of bytes: ``rows`` equal parts of the tensor."""
        return [self._buffer(tensor), _bytes(tensor) // rows, self.mpi.BYTE]


@functools.cache
def _large(mpi: Any, piece: int, count: int, rest: int) -> Any:
    """An MPI type of ``count * piece + rest`` bytes, since counts of MPI 3 have 31 bits."""
    whole = mpi.BYTE.Create_contiguous(piece)
    made = mpi.Datatype.Create_struct([count, rest], [0, count * piece], [whole, mpi.BYTE])
    return made.Commit()


def reduced(rows: Tensor, op: str) -> Tensor:
    """``rows``: ``[ranks, n]``, any dtype -> ``[n]`` in the same dtype. May overwrite ``rows``.

    In rank order; 16-bit floats in float32, rounded once. ``op``: a key of ``OPS`` or ``"avg"``.
    """
    half = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].float() if half else rows[0]
    step = OPS["sum" if op == "avg" else op]
    for row in rows[1:]:
        step(total, row.float() if half and op != "sum" else row)
    if op == "avg":
        total.div_(rows.size(0))  # integers: torch's own error says that they have no mean
    return total.to(rows.dtype)


def _minimum(total: Tensor, row: Tensor) -> None:
    torch.minimum(total, row, out=total)


def _maximum(total: Tensor, row: Tensor) -> None:
    torch.maximum(total, row, out=total)


#: Each folds the second tensor into the first.
OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "min": _minimum,
    "max": _maximum,
    "band": Tensor.bitwise_and_,
    "bor": Tensor.bitwise_or_,
    "bxor": Tensor.bitwise_xor_,
}


def _stream_done(tensor: Tensor) -> None:
    """MPI knows no stream: what was enqueued before it must be done, in this stream alone."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _piece(tensor: Tensor) -> int:
    """Elements of one piece."""
    return max(1, PIECE // tensor.element_size())
