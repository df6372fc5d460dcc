"""What a codec is: it turns the gradients of a part of a bucket into payloads, and back.

Two kinds. A *record* codec packs every block into a record of fixed size; its payloads can be
gathered or sharded. A *linear* codec yields tensors that may be summed across ranks; an all-reduce
carries them. A codec knows nothing of who carries its payloads, of DDP, or of time: no collectives,
futures or streams here.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from gradcomm import ops

if TYPE_CHECKING:
    from gradcomm.memory import Memory
    from gradcomm.part import Part

#: A step far into training, past all ramps, between two refreshes.
STEADY = 2**31 - 1

#: Gradient dtypes that codecs have kernels for; all others go plain.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a codec needs beside its equations to train well unasked (see bench/accuracy).

    Every field is a default of ``register``'s option of the same name.
    """

    warmup_steps: int = 0
    clip_norm: float | Literal["auto"] | None = None
    error_feedback: bool = False


@dataclasses.dataclass
class Turn:
    """One exchange of one part: what a codec may need to know of it.

    ``step`` counts from the first step that was compressed. ``key``: of this rank's random numbers.
    ``gain``: one float32 to multiply the gradient by, or None. ``momentum``: this rank's momentum of
    the part, float32 in block space, which the bucket holds in place of the gradient; or None.
    ``unused``: which of the part's parameters have no gradient on this rank in this step. They send
    zeros and keep what they remember: where no rank uses a parameter, DDP takes no result for it.
    """

    step: int
    key: int
    gain: Tensor | None
    ranks: int
    rank: int
    memory: Memory
    error_feedback: bool | Literal["worker"]
    scratch: Scratch
    momentum: Tensor | None = None
    unused: tuple[int, ...] = ()


class SetAside:
    """Parts of a memory are zero until ``put_back``, or inside of ``with``; then as they were before."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self._kept = [(piece, piece.clone()) for piece in pieces]
        for piece in pieces:
            piece.zero_()

    def put_back(self) -> None:
        for piece, kept in self._kept:
            piece.copy_(kept)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.put_back()


class Scratch:
    """Buffers that are kept from step to step. Exchanges of a lane run one after another, so all of
    its buckets share them; they grow to the largest and are never given back."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of this shape; what it holds is left over from its last use."""
        numel = 1
        for n in shape:
            numel *= n
        found = self._buffers.get((name, dtype, device))
        if found is None or found.numel() < numel:
            found = torch.empty(numel, dtype=dtype, device=device)
            self._buffers[name, dtype, device] = found
        return found[:numel].view(shape)

    def bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """Options of one codec. Immutable, comparable, the same on every rank."""

    name: ClassVar[str]
    #: Exchanges that can carry it: any of ``reduce``, ``gather``, ``shard``, ``hierarchy``.
    exchanges: ClassVar[tuple[str, ...]]
    #: Whether the residual lies in the order of the parameter's indices, not of its memory.
    by_index: ClassVar[bool] = False
    #: Whether a large bucket goes in pieces, so that encoding one overlaps the wire of another.
    in_pieces: ClassVar[bool] = True

    @property
    def recipe(self) -> Recipe:
        return Recipe()

    @property
    def block(self) -> int:
        """Elements in a block of block space."""
        return 1

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a parameter of this shape and dtype can be compressed; if not, it goes plain."""
        return dtype in KERNEL_DTYPES and shape.numel() > 0

    def order(self, shapes: list[torch.Size]) -> list[int]:
        """In which order the parameters of a part shall lie in block space."""
        return list(range(len(shapes)))

    def own_slots(self, shape: torch.Size) -> dict[str, int]:
        """What the codec keeps in the memory beside the residual, for a parameter of this shape: the
        slot and its element count."""
        return {}

    def spec(self) -> str:
        """The codec as a string that ``gradcomm.codec.parse`` reads: its name and its options."""
        options = ",".join(f"{f.name}={getattr(self, f.name)}" for f in own_first(type(self)))
        return f"{self.name}:{options}" if options else self.name

    def rounds(self, part: Part, bucket: Tensor, turn: Turn) -> Generator[Tensor, None, None]:
        """For the reduce exchange: yields tensors, each to be summed over ranks in place before the
        next is asked for, then writes the mean into ``bucket``."""
        raise NotImplementedError(f"gradcomm: {self.name} has no linear payload")


def own_first(codec: type[Codec]) -> list[dataclasses.Field[Any]]:
    """A codec's options: its own, then those that it shares with others."""
    return sorted(dataclasses.fields(codec), key=lambda f: bool(f.kw_only))


class RecordCodec(Codec):
    """A codec whose payload is records of blocks."""

    exchanges: ClassVar[tuple[str, ...]] = ("gather", "shard", "hierarchy")

    @abc.abstractmethod
    def format(self, chunk_blocks: int, step: int) -> ops.Format:
        """The wire format of a chunk of this many blocks at this step."""

    def unit(self, part: Part, turn: Turn) -> Tensor | None:
        """What elements are divided by before encoding and multiplied by after decoding: float32 in
        block space, the same on every rank, nowhere 0; may lack padding at the end. None: by nothing."""
        return None

    def payload_bytes(self, numel: int, chunks: int = 1, step: int = STEADY) -> int:
        """Bytes of the payload of one tensor of ``numel`` elements, cut into ``chunks`` chunks."""
        layout = ops.Layout.of([(0, numel)] if numel else [], self.block)
        chunk_blocks = layout.padded(chunks) // chunks
        return chunks * self.chunk_bytes(chunk_blocks, step)

    def chunk_bytes(self, chunk_blocks: int, step: int) -> int:
        format = self.format(chunk_blocks, step)
        return chunk_blocks // format.span * format.record_bytes

    def encode(self, part: Part, bucket: Tensor, payload: Tensor, turn: Turn) -> None:
        """Packs the part's elements of ``bucket`` into ``payload``, uint8 ``[chunks, chunk bytes]``;
        with error feedback, what the payload does not hold stays in the memory's residual."""
        format = self.format(part.chunk_blocks(payload.size(0)), turn.step)
        unit = self.unit(part, turn)
        with (
            _remembered(part, turn) as residual,
            SetAside(part.places_in(residual, turn.unused) + part.places_in(turn.momentum, turn.unused)),
            _in_unit(residual, unit),
        ):
            if unit is not None:
                for g, u in zip(part.elements(bucket), part.by_segment(unit), strict=True):
                    g.div_(u)
            ops.encode(bucket, part.layout.table, format.ints(), residual, payload, turn.gain, turn.key)
            if turn.momentum is not None:
                self.forget_sent(part, payload, format, turn.momentum)

    def forget_sent(self, part: Part, payload: Tensor, format: ops.Format, momentum: Tensor) -> None:
        """What a codec does to the momentum, in place, after it sent ``payload``: nothing, if it sends
        something of every element."""

    def decode_mean(self, part: Part, payloads: Tensor, bucket: Tensor, turn: Turn) -> None:
        """Writes the mean over ranks of ``payloads``, uint8 ``[ranks, chunks, chunk bytes]``, into
        the part's elements of ``bucket``."""
        format = self.format(part.chunk_blocks(payloads.size(1)), turn.step)
        ops.decode_mean(payloads, part.layout.table, format.ints(), 0, bucket)
        unit = self.unit(part, turn)
        if unit is not None:
            for mean, u in zip(part.elements(bucket), part.by_segment(unit), strict=True):
                mean.mul_(u)

    def reduce_encode(self, part: Part, payloads: Tensor, payload: Tensor, turn: Turn) -> None:
        """The owner's stage of the shard exchange: the mean of its chunk's payloads, uint8
        ``[ranks, 1, chunk bytes]``, plus the owner's residual, packed into ``payload``."""
        chunk_blocks = part.chunk_blocks(turn.ranks)
        begin = turn.rank * chunk_blocks
        format = self.format(chunk_blocks, turn.step)
        residual = turn.memory.owner(part, begin, chunk_blocks) if turn.error_feedback is True else None
        # Another key than the workers': their draws and the owner's must not be the same.
        key = turn.key ^ 0x5DEECE66D
        unit = self.unit(part, turn)
        if unit is not None:
            unit = unit[begin * self.block : (begin + chunk_blocks) * self.block]
        unused = self._owner_unused(part, payloads, format, begin, residual, turn.unused)
        with SetAside(unused), _in_unit(residual, unit):
            ops.reduce_encode(payloads, part.layout.table, format.ints(), begin, residual, payload, key)

    def _owner_unused(
        self,
        part: Part,
        payloads: Tensor,
        format: ops.Format,
        begin: int,
        residual: Tensor | None,
        unused: tuple[int, ...],
    ) -> list[Tensor]:
        """The owner's residual of the parameters that no rank used: not this one, and the mean of what
        all sent is zero."""
        if residual is None or not unused:
            return []
        bucket = torch.zeros(part.end, device=residual.device)
        ops.decode_mean(payloads, part.layout.table, format.ints(), begin, bucket)
        slices = [(i, part.slices[i]) for i in unused]
        zero = tuple(i for i, s in slices if not bool(bucket[s.offset : s.offset + s.numel].any()))
        return part.places_in(residual, zero, begin * self.block)


def _remembered(part: Part, turn: Turn) -> AbstractContextManager[Tensor | None]:
    """This rank's residual of the part; None without error feedback."""
    if not turn.error_feedback:
        return contextlib.nullcontext()
    return turn.memory.residual(part, turn.scratch, turn.key)


@contextlib.contextmanager
def _in_unit(residual: Tensor | None, unit: Tensor | None) -> Iterator[None]:
    """Inside, the residual is in units of ``unit``; elsewhere in the gradient's, so whatever else reads
    it, a flush or a checkpoint, need not know. What it has past the unit's end is padding."""
    if residual is None or unit is None:
        yield
        return
    mine = residual[: unit.numel()]
    mine.div_(unit)
    try:
        yield
    finally:
        mine.mul_(unit)
