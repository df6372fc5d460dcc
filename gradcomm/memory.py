"""What error feedback remembers, by parameter.

A kernel wants the residuals of a part as one float32 tensor in block space; a user, a checkpoint and
DDP's changing buckets want them by parameter. Both are had at once: for each slot ("residual", …) the
memory keeps one flat tensor for each part, and for each parameter a view of its elements in it. When
DDP lays out its buckets anew, a new flat tensor takes over what the views hold.

The owner's residual of the shard exchange belongs to a chunk, not to a whole parameter. When a part
goes, its owner's residual, which is of the mean, moves to this rank's own residual, times the number
of ranks: nothing is lost, and nothing has to be sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcomm.part import Piece

if TYPE_CHECKING:
    from gradcomm.part import Part


@dataclasses.dataclass
class _Owned:
    """A residual of the mean of ``share`` ranks, worth as much as ``share`` times it in one rank's own:
    elements [first, first + numel) of block space."""

    first: int
    residual: Tensor
    share: int


class Memory:
    """Slots of float32 state by parameter, on ``device``. ``ranks``: how many share the owner's
    residuals."""

    def __init__(self, ranks: int, device: torch.device | None = None) -> None:
        self.ranks, self.device = ranks, device
        self._views: dict[str, dict[int, Tensor]] = {}
        self._flat: dict[tuple[str, Part], Tensor] = {}
        self._owned: dict[tuple[Part, str], _Owned] = {}

    def flat(self, slot: str, part: Part) -> Tensor:
        """The slot of all parameters of a part: float32, flat, in block space. Zero where a
        parameter had nothing yet. For a piece: that of the mean which it holds."""
        if isinstance(part, Piece):
            return self._owned_residual(part.part, "host", part.first, part.blocks, part.share)
        found = self._flat.get((slot, part))
        if found is not None:
            return found
        layout = part.layout
        flat = torch.zeros(layout.blocks * layout.block, device=self.device)
        self.adopt(slot, part, flat, layout.places())
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
        return owned.residual

    def take(self, slot: str, part: Part) -> dict[int, Tensor]:
        """What a slot holds of a part's parameters, by key, and no longer holds from now on."""
        views = self._views.get(slot, {})
        self._flat.pop((slot, part), None)
        return {key: views.pop(key) for key in part.keys if key in views}

    def drop(self, part: Part) -> None:
        """Forgets the layout of a part, whose parameters move to other parts; keeps what they hold."""
        for of in ("owner", "host"):
            owned = self._owned.pop((part, of), None)
            if owned is None:
                continue
            residual = self._views.setdefault("residual", {})
            end = owned.first + owned.residual.numel()
            for key, (first, numel) in zip(part.keys, part.layout.places(), strict=True):
                low, high = max(first, owned.first), min(first + numel, end)
                if low < high:
                    share = owned.residual[low - owned.first : high - owned.first]
                    held = residual.setdefault(key, torch.zeros(numel, device=self.device))
                    held[low - first : high - first].add_(share, alpha=owned.share)
        for slot_part in [sp for sp in self._flat if sp[1] is part]:
            del self._flat[slot_part]

    def norm(self) -> float:
        """Euclidean norm of this rank's residuals, the owner's not included."""
        views = self._views.get("residual", {}).values()
        return math.sqrt(sum(float(v.double().square().sum()) for v in views))

    def bytes(self) -> int:
        flats = [f for f in self._flat.values()] + [o.residual for o in self._owned.values()]
        return sum(f.numel() * f.element_size() for f in flats)

    def slots(self) -> Iterator[tuple[str, dict[int, Tensor]]]:
        yield from self._views.items()

    def state(self, names: dict[int, str]) -> dict[str, Any]:
        """A copy, by slot and by parameter name; the owner's chunks as pieces of parameters."""
        owned = []
        for (part, _), o in self._owned.items():
            end = o.first + o.residual.numel()
            for key, (first, numel) in zip(part.keys, part.layout.places(), strict=True):
                low, high = max(first, o.first), min(first + numel, end)
                if low < high:
                    piece = o.residual[low - o.first : high - o.first].clone()
                    owned.append(
                        {
                            "name": names[key],
                            "first": low - first,
                            "residual": piece,
                            "share": o.share,
                            "numel": numel,
                        }
                    )
        slots = {
            slot: {names[key]: view.clone() for key, view in views.items()}
            for slot, views in self._views.items()
        }
        return {"slots": slots, "owned": owned}

    def load(self, state: dict[str, Any], keys: dict[str, int]) -> None:
        """Takes what ``state`` returned, in place of all that is held."""
        self._flat.clear()
        self._owned.clear()
        self._views = {
            slot: {
                keys[name]: held.to(device=self.device, dtype=torch.float32, copy=True)
                for name, held in by_name.items()
            }
            for slot, by_name in state["slots"].items()
        }
        residual = self._views.setdefault("residual", {}) if state["owned"] else {}
        for piece in state["owned"]:
            first, share = piece["first"], piece["residual"]
            zeros = torch.zeros(piece["numel"], device=self.device)
            held = residual.setdefault(keys[piece["name"]], zeros)
            held[first : first + share.numel()].add_(share.to(self.device), alpha=piece["share"])
