"""Device tensors over a transport that carries host memory: Gloo, or an MPI that is not CUDA-aware.

A payload travels in pieces through two pinned buffers: while one piece is on the wire, the next is
copied from the device and the last one back to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gradcomm.stats import Traffic

from .hosts import host_of

if TYPE_CHECKING:
    from . import Transport

#: Bytes of a piece, all ranks' rows together. Large enough that copies run at the bus's rate, small
#: enough that the first piece leaves soon and that four of them may stay pinned.
PIECE = 1 << 22


class Copies(Protocol):
    """Copies between device and host in one stream: they run in the order in which they began."""

    def needed(self, tensor: Tensor) -> bool:
        """Whether the transport beneath cannot read the tensor where it lies."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory that the copies can use, uint8."""

    def begin(self, to: Tensor, source: Tensor) -> None:
        """``to.copy_(source)``, perhaps not done when this returns."""

    def mark(self) -> Callable[[], None]:
        """A function that waits until all that has begun so far is done."""


class CudaCopies:
    """In the device's current stream: after whatever wrote the payload, before whatever reads it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def needed(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # the waiting thread leaves its core to others
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


class Staged:
    """``inner``, a transport of CPU tensors, for those on ``device``; CPU tensors pass straight through.

    Blocks the calling thread, not the device: nothing waits for more than the stream's own work, and
    when a call returns, its results are in the stream's order, perhaps not written yet. One thread may
    call at a time. ``traffic`` is ``inner``'s, and ``close`` closes it.

    ``piece``: bytes that are staged at a time, of all ranks' rows together; the same on every rank.
    ``copies``: how; by default ``CudaCopies``.
    """

    def __init__(
        self,
        inner: Transport,
        device: torch.device,
        piece: int = PIECE,
        copies: Copies | None = None,
    ) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._device, self._piece = device, piece
        self._copies: Copies = CudaCopies(device) if copies is None else copies
        self._slots = [_Slot(self._copies), _Slot(self._copies)]
        self._stored: Callable[[], None] = lambda: None  # waits for the last call's copies to the device

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self.inner.traffic = traffic

    def all_reduce(self, tensor: Tensor) -> None:
        if not self._copies.needed(tensor):
            self.inner.all_reduce(tensor)
            return
        if tensor.is_sparse:  # of another size on every rank: in one piece
            here = tensor.cpu()
            self.inner.all_reduce(here)
            tensor.copy_(here)
            return
        packed = tensor.contiguous()
        flat = packed.view(1, -1)

        def wire(host: Tensor, _: Tensor) -> None:
            self.inner.all_reduce(host.view(-1).view(tensor.dtype))

        data, width = _bytes(flat), tensor.element_size()
        self._run(data, data, [0], [0], wire, width, in_place=True)
        if packed.data_ptr() != tensor.data_ptr():
            self._copies.begin(tensor, packed)

    def all_gather(self, rows: Tensor) -> None:
        if not self._copies.needed(rows):
            self.inner.all_gather(rows)
            return
        data = _bytes(rows.view(self.size, -1))
        others = [r for r in range(self.size) if r != self.rank]

        def wire(host: Tensor, _: Tensor) -> None:
            self.inner.all_gather(host)

        self._run(data, data, [self.rank], others, wire, in_place=True)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        if not self._copies.needed(rows):
            self.inner.all_to_all(out, rows)
            return
        everyone = list(range(self.size))

        def wire(host: Tensor, landed: Tensor) -> None:
            self.inner.all_to_all(landed, host)

        into, source = _bytes(out.view(self.size, -1)), _bytes(rows.view(self.size, -1))
        self._run(into, source, everyone, everyone, wire)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self.inner.all_gather_object(item)

    def split(self, members: list[list[int]]) -> Staged:
        return Staged(self.inner.split(members), self._device, self._piece, self._copies)

    def host(self) -> str:
        return host_of(self.inner)

    def close(self) -> None:
        for slot in self._slots:
            slot.free()
        self.inner.close()

    def _run(
        self,
        out: Tensor,
        source: Tensor,
        fetched: list[int],
        stored: list[int],
        wire: Callable[[Tensor, Tensor], None],
        width: int = 1,
        in_place: bool = False,
    ) -> None:
        """``wire(host, landed)`` for each piece of the columns of ``source``, ``[rows, bytes]`` on the
        device: the ``fetched`` rows of it are in ``host``; the ``stored`` rows of ``landed``, which is
        ``host`` itself if ``in_place``, go to ``out``. No element of ``width`` bytes is cut."""
        rows, columns = source.shape
        step = max(width, self._piece // rows // width * width)
        pieces = [(first, min(first + step, columns)) for first in range(0, columns, step)]
        if not pieces:
            return
        self._stored()  # that call may have been made in another stream

        def fetch(index: int) -> None:
            first, end = pieces[index]
            slot = self._slots[index % 2]
            slot.take(rows, end - first, in_place)
            for row in fetched:
                self._copies.begin(slot.host[row], source[row, first:end])
            # Also covers what is still read from the slot: those copies began earlier.
            slot.done = self._copies.mark()

        fetch(0)
        for index, (first, end) in enumerate(pieces):
            if index + 1 < len(pieces):
                fetch(index + 1)
            slot = self._slots[index % 2]
            slot.done()
            wire(slot.host, slot.landed)
            for row in stored:
                self._copies.begin(out[row, first:end], slot.landed[row])
        self._stored = self._copies.mark()


class _Slot:
    """One of the two buffers. ``done()`` waits for the copies to it."""

    host: Tensor
    landed: Tensor
    _buffer: Tensor

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.free()

    def take(self, rows: int, columns: int, in_place: bool) -> None:
        """Makes ``host`` and ``landed`` ``[rows, columns]``, with nothing in them."""
        size = rows * columns
        needed = size if in_place else 2 * size
        if self._buffer.numel() < needed:
            self._buffer = self._copies.buffer(needed)
        self.host = self._buffer[:size].view(rows, columns)
        self.landed = self.host if in_place else self._buffer[size:needed].view(rows, columns)

    def free(self) -> None:
        self.done: Callable[[], None] = lambda: None
        self._buffer = self.host = self.landed = torch.empty(0, dtype=torch.uint8)


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)
