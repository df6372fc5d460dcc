"""The first step after a load, in the layout of the checkpoint.

A new DDP model begins with another bucket layout than the one it goes on with. What is sent would be the
same to the eye, not to the bit: sums over ranks, owners of chunks and clipping go by bucket. So buckets
of that step are held until all have come, and exchanged as the checkpoint had them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gradcomm.buckets import BucketKey
from gradcomm.streams import Streams


@dataclasses.dataclass
class Held:
    """A bucket of DDP's that waits."""

    keys: BucketKey
    numels: list[int]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    #: Pieces of other buckets that are to be copied here once these are exchanged: offset, piece.
    pieces: list[tuple[int, Tensor]] = dataclasses.field(default_factory=list)

    def fill(self, *_: object) -> None:
        """Takes the means from the buckets in which this one's parameters were exchanged."""
        for offset, piece in self.pieces:
            self.buffer[offset : offset + piece.numel()].copy_(piece)

    def complete(self, done: torch.futures.Future[Tensor]) -> None:
        self.future.set_result(done.value())


class Replay:
    """Holds buckets of one step until ``parameters`` parameters have come."""

    def __init__(self, parameters: int) -> None:
        self.held: list[Held] = []
        self._missing = parameters

    def hold(self, keys: BucketKey, numels: list[int], buffer: Tensor) -> torch.futures.Future[Tensor]:
        future = Streams(buffer.device).future()
        self.held.append(Held(keys, numels, buffer, future))
        self._missing -= len(keys)
        return future

    @property
    def complete(self) -> bool:
        return self._missing <= 0


def regroup(all_held: list[Held], layout: list[BucketKey]) -> list[tuple[BucketKey, Tensor]]:
    """What is held, as the buckets of ``layout``, in its order; as it is where that cannot be."""
    place: dict[int, tuple[Held, int, int]] = {}
    for held in all_held:
        offset = 0
        for key, numel in zip(held.keys, held.numels, strict=True):
            place[key] = held, offset, numel
            offset += numel
    wanted = [key for keys in layout for key in keys]
    whole = {held.keys: held for held in all_held}
    split = [keys for keys in layout if keys not in whole]
    can = sorted(wanted) == sorted(place) and all(_alike([place[k][0] for k in b]) for b in split)
    if not can:
        return [(held.keys, held.buffer) for held in all_held]
    buckets = []
    for keys in layout:
        if keys in whole:
            buckets.append((keys, whole[keys].buffer))
            continue
        places = [place[key] for key in keys]
        buffer = torch.cat([held.buffer[at : at + numel] for held, at, numel in places])
        pieces = buffer.split([numel for _, _, numel in places])
        for (held, at, _), piece in zip(places, pieces, strict=True):
            held.pieces.append((at, piece))
        buckets.append((keys, buffer))
    return buckets


def _alike(held: list[Held]) -> bool:
    """Whether parts of these buckets can be in one."""
    first = held[0].buffer
    return all(not h.buffer.is_sparse and h.buffer.dtype == first.dtype for h in held)
