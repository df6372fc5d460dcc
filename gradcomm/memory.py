"""What error feedback remembers, by parameter.

A kernel wants the residuals of a part as one float32 tensor in block space; a user, a checkpoint and
DDP's changing buckets want them by parameter. Both are had at once: for each slot ("residual", …) the
memory keeps one flat tensor for each part, and for each parameter a view of its elements in it. When
DDP lays out its buckets anew, a new flat tensor takes over what the views hold.

The owner's residual of the shard exchange belongs to a chunk, not to a whole parameter. When a part
goes, its owner's residual, which is of the mean, moves to this rank's own residual, times the number
of ranks: nothing is lost, and nothing has to be sent. One that was loaded waits, by parameter, until a
part asks for its chunk.

With ``residual="int8"`` this rank's own residual of a part rests in 8 bits (``gradcomm.rest``) between
exchanges; whoever changes it otherwise finds it in float32 again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gradcomm import rest
from gradcomm.part import Piece

if TYPE_CHECKING:
    from gradcomm.codec.base import Scratch
    from gradcomm.part import Part


#: Residuals of means, by exchange: ``owner``, of the mean of all ranks; ``host``, of a host's.
OWNERS: dict[str, tuple[str, ...]] = {"shard": ("owner",), "hierarchy": ("owner", "host")}
_KINDS = OWNERS["hierarchy"]


@dataclasses.dataclass
class _Owned:
    """A residual of the mean of ``share`` ranks, worth as much as ``share`` times it in one rank's own:
    elements [first, first + numel) of block space."""

    first: int
    residual: Tensor
    share: int


class Memory:
    """Slots of float32 state by parameter, on ``device``. ``ranks``: how many share the owner's
    residuals. ``residual``: how a rank's own rests between exchanges."""

    def __init__(
        self,
        ranks: int,
        device: torch.device | None = None,
        residual: Literal["float32", "int8"] = "float32",
    ) -> None:
        self.ranks, self.device, self._rests = ranks, device, residual == "int8"
        self._packed: dict[Part, Tensor] = {}
        self._views: dict[str, dict[int, Tensor]] = {}
        self._flat: dict[tuple[str, Part], Tensor] = {}
        self._owned: dict[tuple[Part, str], _Owned] = {}
        #: What was loaded of them, by kind and parameter, with its share, until a part asks for it.
        self._loaded: dict[tuple[str, int], tuple[Tensor, int]] = {}

    @contextlib.contextmanager
    def residual(self, part: Part, scratch: Scratch, key: int) -> Iterator[Tensor]:
        """This rank's residual of a part, as ``flat`` has it, to be changed inside of ``with``. ``key``:
        of the random numbers by which it is rounded, if it rests in 8 bits."""
        if not self._rests or isinstance(part, Piece):
            yield self.flat("residual", part)
            return
        layout, packed = part.layout, self._packed.get(part)
        flat = scratch.get(
            "residual",
            (layout.blocks * layout.block,),
            torch.float32,
            self.device or torch.device("cpu"),
        )
        if packed is None:
            flat.zero_()
        else:
            rest.unpack(packed, flat)
        self.adopt("residual", part, flat, layout.places())
        try:
            yield flat
        finally:
            self._packed[part] = rest.pack(flat, key, part.keys[0] << 40)
            self._flat.pop(("residual", part))
            for of in part.keys:
                self._views["residual"].pop(of)

    def _wake(self, keys: Collection[int]) -> None:
        """What rests of these parameters, and of those in a part with them, is float32 from now on."""
        for part in [part for part in self._packed if not set(part.keys).isdisjoint(keys)]:
            flat = self._unpacked(part, self._packed.pop(part))
            self.adopt("residual", part, flat, part.layout.places())

    def _unpacked(self, part: Part, packed: Tensor) -> Tensor:
        flat = torch.empty(part.layout.blocks * part.layout.block, device=self.device)
        rest.unpack(packed, flat)
        return flat

    def _all_views(self) -> dict[str, dict[int, Tensor]]:
        """By slot and parameter; of what rests, copies."""
        views = {slot: dict(held) for slot, held in self._views.items()}
        for part, packed in self._packed.items():
            found = zip(part.keys, part.by_segment(self._unpacked(part, packed)), strict=True)
            views.setdefault("residual", {}).update(found)
        return views

    def flat(self, slot: str, part: Part) -> Tensor:
        """The slot of all parameters of a part: float32, flat, in block space. Zero where a
        parameter had nothing yet. For a piece: that of the mean which it holds."""
        if isinstance(part, Piece):
            return self._owned_residual(part.part, "host", part.first, part.blocks, part.share)
        if slot == "residual":
            self._wake(part.keys)
        found = self._flat.get((slot, part))
        if found is not None:
            return found
        layout = part.layout
        flat = torch.zeros(layout.blocks * layout.block, device=self.device)
        self.adopt(slot, part, flat, layout.places())
        return flat

    def shared(self, slot: str, part: Part, empty: float) -> Tensor:
        """A slot that all ranks hold alike, in block space; of a piece, its stretch of it. ``empty``
        where nothing was held yet, and in the padding of blocks."""
        whole = part.part if isinstance(part, Piece) else part
        known = self._flat.get((slot, whole)) is not None
        flat = self.flat(slot, whole)
        if not known:
            flat.masked_fill_(flat == 0.0, empty)
        if isinstance(part, Piece):
            block = part.layout.block
            flat = flat[part.first * block : (part.first + part.blocks) * block]
        return flat

    def flat_or_none(self, slot: str, part: Part) -> Tensor | None:
        """The slot's flat tensor, where the part has one already."""
        return self._flat.get((slot, part))

    def adopt(self, slot: str, part: Part, flat: Tensor, places: list[tuple[int, int]]) -> None:
        """Makes ``flat`` the storage of a slot: ``places`` are each parameter's first element and
        element count in it. What the parameters held before is copied in."""
        views = self._views.setdefault(slot, {})
        for key, (first, numel) in zip(part.keys, places, strict=True):
            view = flat[first : first + numel]
            held = views.get(key)
            if held is not None:
                if held.numel() != numel:
                    raise ValueError(
                        f"gradcomm: the {slot} of parameter {key} has {held.numel()} elements, "
                        f"its gradient has {numel}; was a state loaded from another model?"
                    )
                view.copy_(held)
            views[key] = view
        self._flat[slot, part] = flat

    def owner(self, part: Part, first_block: int, blocks: int) -> Tensor:
        """The owner's residual of its chunk: float32 ``[blocks * block]``."""
        if isinstance(part, Piece):
            first_block += part.first
            part = part.part
        return self._owned_residual(part, "owner", first_block, blocks, self.ranks)

    def _owned_residual(self, part: Part, of: str, first_block: int, blocks: int, share: int) -> Tensor:
        owned = self._owned.get((part, of))
        if owned is None:
            block = part.layout.block
            zeros = torch.zeros(blocks * block, device=self.device)
            owned = _Owned(first_block * block, zeros, share)
            self._owned[part, of] = owned
            for key, inside, piece in _pieces(part, owned):
                if (of, key) in self._loaded:
                    loaded, _ = self._loaded[of, key]
                    piece.copy_(loaded[inside])
                    loaded[inside] = 0.0
            for key in part.keys:
                self._settle(of, key)  # what another chunk of the saved layout held
        return owned.residual

    def take(self, slot: str, part: Part) -> dict[int, Tensor]:
        """What a slot holds of a part's parameters, by key, and no longer holds from now on."""
        if slot == "residual":
            self._wake(part.keys)
        views = self._views.get(slot, {})
        self._flat.pop((slot, part), None)
        return {key: views.pop(key) for key in part.keys if key in views}

    def drop(self, part: Part) -> None:
        """Forgets the layout of a part, whose parameters move to other parts; keeps what they hold."""
        self._wake(part.keys)
        numels = {s.key: s.numel for s in part.slices}
        for of in _KINDS:
            owned = self._owned.pop((part, of), None)
            if owned is not None:
                for key, inside, piece in _pieces(part, owned):
                    self._own(key, numels[key])[inside].add_(piece, alpha=owned.share)
        for slot_part in [sp for sp in self._flat if sp[1] is part]:
            del self._flat[slot_part]

    def settle(self, kept: Collection[str] = ()) -> None:
        """Moves what was loaded of owners' residuals, less the kinds ``kept``, to this rank's own."""
        for of, key in list(self._loaded):
            if of not in kept:
                self._settle(of, key)

    def _settle(self, of: str, key: int) -> None:
        loaded, share = self._loaded.pop((of, key), (None, 0))
        if loaded is not None and bool(loaded.any()):
            self._own(key, loaded.numel()).add_(loaded, alpha=share)

    def _own(self, key: int, numel: int) -> Tensor:
        self._wake([key])
        residual = self._views.setdefault("residual", {})
        return residual.setdefault(key, torch.zeros(numel, device=self.device))

    def held(self, slot: str, key: int) -> Tensor | None:
        """What a parameter holds, itself; None where it holds nothing."""
        if slot == "residual":
            self._wake([key])
        return self._views.get(slot, {}).get(key)

    def forget(self, slot: str) -> None:
        self._views.pop(slot, None)
        for slot_part in [sp for sp in self._flat if sp[0] == slot]:
            del self._flat[slot_part]

    def all(self, slot: str) -> list[Tensor]:
        """What every parameter holds, by key."""
        return [held for _, held in sorted(self._views.get(slot, {}).items())]

    def reorder(self, key: int, tensor: Tensor, by_index: bool) -> None:
        """Puts the residual of a dense parameter, in no part at present, in the order of its indices, or
        back in that of its memory."""
        held = self.held("residual", key)
        if held is None or tensor.is_contiguous() or not dense(tensor):
            return
        if by_index:
            moved = held.as_strided(tensor.shape, tensor.stride()).reshape(-1)
        else:
            moved = torch.empty_like(held)
            moved.as_strided(tensor.shape, tensor.stride()).copy_(held.view(tensor.shape))
        self._views["residual"][key] = moved

    def scale(self, ratio: float | Tensor) -> None:
        """Multiplies all that is in the gradient's unit, in place."""
        self._wake([key for part in self._packed for key in part.keys])
        for slot in ("residual", "momentum", "rms"):
            for view in self._views.get(slot, {}).values():
                view.mul_(ratio)
        for owned in self._owned.values():
            owned.residual.mul_(ratio)
        for loaded, _ in self._loaded.values():
            loaded.mul_(ratio)

    def norm(self) -> float:
        """Euclidean norm of this rank's residuals, the owner's not included."""
        views = self._all_views().get("residual", {}).values()
        return math.sqrt(sum(float(v.double().square().sum()) for v in views))

    def bytes(self) -> int:
        flats = [*self._flat.values(), *(o.residual for o in self._owned.values())]
        flats += [*self._packed.values(), *(loaded for loaded, _ in self._loaded.values())]
        return sum(f.numel() * f.element_size() for f in flats)

    def state(self) -> tuple[dict[str, dict[int, Tensor]], dict[str, int]]:
        """Copies, flat, by slot and by parameter; residuals of means as slots ``owner`` and ``host``,
        zero where another rank holds them. And the shares of these."""
        slots = {s: {k: v.clone() for k, v in views.items()} for s, views in self._all_views().items()}
        shares: dict[str, int] = {}
        for (of, key), (loaded, share) in self._loaded.items():
            slots.setdefault(of, {})[key], shares[of] = loaded.clone(), share
        for (part, of), owned in self._owned.items():
            numels = {s.key: s.numel for s in part.slices}
            shares[of] = owned.share
            for key, inside, piece in _pieces(part, owned):
                held = slots.setdefault(of, {})
                whole = held.setdefault(key, torch.zeros(numels[key], device=self.device))
                whole[inside] = piece
        return slots, shares

    def load(self, slots: dict[str, dict[int, Tensor]], shares: dict[str, int]) -> None:
        """Takes copies of what ``state`` returned, in place of all that is held."""
        self._flat.clear()
        self._packed.clear()
        self._owned.clear()
        self._loaded.clear()
        self._views = {
            slot: {k: t.to(self.device, torch.float32, copy=True) for k, t in held.items()}
            for slot, held in slots.items()
        }
        for of in _KINDS:
            for key, tensor in self._views.pop(of, {}).items():
                self._loaded[of, key] = tensor, shares[of]


def _pieces(part: Part, owned: _Owned) -> Iterator[tuple[int, slice, Tensor]]:
    """An owner's chunk by parameter: key, which of its elements, their residuals (a view)."""
    end = owned.first + owned.residual.numel()
    for key, (first, numel) in zip(part.keys, part.layout.places(), strict=True):
        low, high = max(first, owned.first), min(first + numel, end)
        if low < high:
            piece = owned.residual[low - owned.first : high - owned.first]
            yield key, slice(low - first, high - first), piece


def dense(tensor: Tensor) -> bool:
    """Whether a tensor is non-overlapping and dense, in some order of its dimensions."""
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((st, si) for st, si in dims if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
