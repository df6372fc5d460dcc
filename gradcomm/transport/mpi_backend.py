"""``backend="mpi4py"``: a torch process group over MPI, for torch builds that come without one.

Collectives run in order in a thread of the group, so that DDP's backward goes on meanwhile; sends and
receives begin at once. Method names and arguments are those by which ``torch.distributed`` calls a
process group; each exists under torch's old and new name where it was renamed.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from .mpi_calls import Calls, reduced
from .mpi_monitor import monitored_barrier
from .mpi_tensors import back, flat_of, op_of, require_sum, split_rows
from .mpi_threads import call
from .mpi_work import PairWork, Progress, QueuedWork

#: Torch's stubs give each collective overloads for C++ callers, which a subclass never sees.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group over ``comm``, which becomes its own. Tensors on the CPU, of any dtype and
    strides; 16-bit floats are reduced in float32; every rank ends with the same bits."""

    def __init__(self, comm: Any, timeout: timedelta, store: Any) -> None:
        self._calls = Calls(comm, timeout)
        self._pairs = Calls(call(comm.Dup), timeout)  # so that no tag of a user meets a collective
        super().__init__(self._calls.rank, self._calls.size)
        self._progress = Progress()
        self._store, self._monitored = store, 0
        self._name, self._desc = "", "undefined"
        self.options = SimpleNamespace(_timeout=timeout)

    # ---- what torch asks a group about itself -------------------------------------------------

    def getBackendName(self) -> str:
        return "mpi4py"

    name = getBackendName

    # The base class keeps names in C++ backends, of which this group has none.

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"gradcomm: backend mpi4py carries CPU tensors, not those on {device}")
        return self

    def _set_default_backend(self, backend: Any) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        self._calls.timeout = self._pairs.timeout = self.options._timeout = timeout

    def _start_coalescing(self, device: Any) -> None:
        pass  # collectives are in order anyway

    def _end_coalescing(self, device: Any) -> QueuedWork:
        return self._progress.submit("coalesced calls", [], lambda: None)

    def shutdown(self) -> None:
        self._progress.close()
        self._pairs.free()
        self._calls.free()

    def abort(self) -> None:
        """Nothing to do: pending calls end by their timeout, and the process by MPI_Abort."""

    # ---- one tensor on every rank ------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> QueuedWork:
        """One tensor alone, which has a first dimension too, is what DDP's ``join`` gives."""
        op = op_of(opts)
        if isinstance(tensors, Tensor):
            tensors = [tensors]

        def run() -> None:
            for tensor in tensors:
                if tensor.is_sparse:
                    require_sum(op)
                    self._calls.all_reduce_sparse(tensor)
                    continue
                flat = flat_of(tensor)
                self._calls.all_reduce(flat, op)
                back(tensor, flat)

        return self._submit("all_reduce", tensors, run)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> QueuedWork:
        op, root = op_of(opts), opts.rootRank

        def run() -> None:
            for tensor in tensors:
                flat = flat_of(tensor)
                # Only the root's tensor may change; the sum is the one all_reduce makes.
                result = flat if self.rank() == root else flat.clone()
                self._calls.all_reduce(result, op)
                if self.rank() == root:
                    back(tensor, result)

        return self._submit("reduce", tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> QueuedWork:
        root = opts.rootRank

        def run() -> None:
            for tensor in tensors:
                flat = flat_of(tensor)
                self._calls.broadcast(flat, root)
                if self.rank() != root:
                    back(tensor, flat)

        return self._submit("broadcast", tensors, run)

    def barrier(self, opts: Any = None) -> QueuedWork:
        return self._submit("barrier", [], self._calls.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """``mpi_monitor.monitored_barrier``. torch's function of this name takes Gloo's groups only, so
        call the group's own."""
        self._monitored += 1
        store = PrefixStore(f"monitored barrier {self._monitored}", self._store)
        monitored_barrier(
            store, self.rank(), self.size(), timeout or self.options._timeout, wait_all_ranks
        )

    # ---- gathering ---------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> QueuedWork:
        def run() -> None:
            rows = flat_of(output).view(self.size(), -1)
            rows[self.rank()] = input.detach().reshape(-1)
            self._calls.all_gather(rows)
            back(output, rows)

        return self._submit("all_gather_single", [output], run)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1] if works else self._end_coalescing(None)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        def run() -> None:
            for parts, mine in zip(outputs, inputs, strict=True):
                source, flats = flat_of(mine), [flat_of(part) for part in parts]
                everyone = range(self.size())
                self._calls.direct([(r, source) for r in everyone], list(enumerate(flats)), "all_gather")
                for part, flat in zip(parts, flats, strict=True):
                    back(part, flat)

        return self._submit("all_gather", outputs, run)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        # Here outputs come by rank, and there by input.
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> QueuedWork:
        root = opts.rootRank

        def run() -> None:
            parts = outputs[0] if self.rank() == root else []
            flats = [flat_of(part) for part in parts]
            self._calls.direct([(root, flat_of(inputs[0]))], list(enumerate(flats)), "gather")
            for part, flat in zip(parts, flats, strict=True):
                back(part, flat)

        return self._submit("gather", outputs, run)

    # ---- scattering --------------------------------------------------------------------------

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> QueuedWork:
        root = opts.rootRank

        def run() -> None:
            parts = [flat_of(part) for part in inputs[0]] if self.rank() == root else []
            flat = flat_of(outputs[0])
            self._calls.direct(list(enumerate(parts)), [(root, flat)], "scatter")
            back(outputs[0], flat)

        return self._submit("scatter", outputs, run)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> QueuedWork:
        op = op_of(opts)

        def run() -> None:
            flat = flat_of(output)
            self._calls.reduce_scatter(flat, flat_of(input).view(self.size(), -1), op)
            back(output, flat)

        return self._submit("reduce_scatter_single", [output], run)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> QueuedWork:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1] if works else self._end_coalescing(None)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> QueuedWork:
        op = op_of(opts)

        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                # Rows may be of another length for every owner.
                received = torch.empty((self.size(), output.numel()), dtype=output.dtype)
                sends = [(r, flat_of(part)) for r, part in enumerate(parts)]
                self._calls.direct(sends, list(enumerate(received)), "reduce_scatter")
                back(output, reduced(received, op))

        return self._submit("reduce_scatter", outputs, run)

    # ---- everyone to everyone ----------------------------------------------------------------

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        opts: Any = None,
    ) -> QueuedWork:
        """Splits count rows of the first dimension; none: equal parts."""

        def run() -> None:
            flat, source = flat_of(output), flat_of(input)
            if not output_splits and not input_splits:
                self._calls.all_to_all(flat, source)
            else:
                sends = split_rows(source, input.size(0), input_splits, self.size())
                receives = split_rows(flat, output.size(0), output_splits, self.size())
                self._calls.direct(list(enumerate(sends)), list(enumerate(receives)), "all_to_all")
            back(output, flat)

        return self._submit("all_to_all_single", [output], run)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> QueuedWork:
        def run() -> None:
            flats = [flat_of(o) for o in outputs]
            sends = [(r, flat_of(i)) for r, i in enumerate(inputs)]
            self._calls.direct(sends, list(enumerate(flats)), "all_to_all")
            for output, flat in zip(outputs, flats, strict=True):
                back(output, flat)

        return self._submit("all_to_all", outputs, run)

    # ---- pairs -------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> PairWork:
        flat = flat_of(tensors[0])
        request = call(self._pairs.comm.Isend, self._pairs.message(flat), dst, tag)
        return PairWork(self._pairs, request, f"send to rank {dst}", flat)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> PairWork:
        tensor = tensors[0]
        flat = flat_of(tensor)
        request = call(self._pairs.comm.Irecv, self._pairs.message(flat), src, tag)
        name = "any rank" if src == self._pairs.mpi.ANY_SOURCE else f"rank {src}"
        return PairWork(self._pairs, request, f"receive from {name}", flat, lambda: back(tensor, flat))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PairWork:
        return self.recv(tensors, self._pairs.mpi.ANY_SOURCE, tag)

    def _submit(self, what: str, outputs: list[Any], run: Any) -> QueuedWork:
        return self._progress.submit(what, outputs, run)
