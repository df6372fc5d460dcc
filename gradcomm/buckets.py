"""Buckets as DDP lays them out: which parameters, which parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from gradcomm.memory import Memory, dense
from gradcomm.part import Part, Slice
from gradcomm.plan import Parameter, Plan

#: A bucket's parameters, by key, in order: what tells one layout from another.
BucketKey = tuple[int, ...]


#: Buckets of over half as much again are cut, between parameters, into buckets of about so many bytes:
#: while one is on the wire, the next is encoded. Less would spend more on calls than it hides.
CUT_BYTES = 8 << 20


class Buckets:
    """The parameters that were seen, and the parts of the buckets of the present layout."""

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._plan, self._memory = plan, memory
        self._by_id: dict[int, Parameter] = {}
        self._parts: dict[BucketKey, tuple[list[Part], list[Part]]] = {}
        self._warm: set[BucketKey] = set()  # buckets that were last exchanged plain, for warm-up
        self.layout: list[BucketKey] = []  # the buckets of a step, in the order of their exchange

    @property
    def parameters(self) -> list[Parameter]:
        """By key."""
        return list(self._by_id.values())

    def add(self, tensor: Tensor, name: str | None = None) -> Parameter:
        """The parameter that a tensor is; a new one gets the next key, and a name if it has none."""
        found = self._by_id.get(id(tensor))
        if found is None:
            key = len(self._by_id)
            name = f"parameter {key}" if name is None else name
            found = Parameter(key, name, tensor, self._plan.is_plain(name, tensor))
            self._by_id[id(tensor)] = found
        return found

    def cut(self, keys: BucketKey, buffer: Tensor) -> list[tuple[BucketKey, Tensor]]:
        """A bucket as several, the same on every rank; one that came of a cut is not cut again."""
        parameters = self.parameters
        numels = [parameters[key].tensor.numel() for key in keys]
        least = max(1, CUT_BYTES // buffer.element_size())
        if buffer.is_sparse or buffer.numel() != sum(numels) or buffer.numel() <= 1.5 * least:
            return [(keys, buffer)]
        ends, size, left = [], 0, buffer.numel()
        for i, numel in enumerate(numels):
            size, left = size + numel, left - numel
            if size >= least and left >= least / 2:
                ends.append(i + 1)
                size = 0
        bounds = list(itertools.pairwise([0, *ends, len(keys)]))
        views = buffer.split([sum(numels[a:b]) for a, b in bounds])
        return [(keys[a:b], view) for (a, b), view in zip(bounds, views, strict=True)]

    def stale(self, keys: BucketKey, warm: bool) -> list[BucketKey]:
        """The buckets, of this layout or an older one, whose parts ``parts`` would now drop. What a lane
        still does with them must be over first."""
        if keys in self._parts:
            return [keys] if keys in self._warm and not warm else []
        return [old for old in self._parts if not set(old).isdisjoint(keys)]

    def parts(self, keys: BucketKey, buffer: Tensor, warm: bool, spend: bool = False) -> list[Part]:
        """The parts of a bucket; all of it as one plain part in steps of warm-up. Parts of older buckets
        with the same parameters go, and the memory takes over what they held. ``spend``: the memory also
        takes over, by parameter, what the parts of this bucket hold, the owner's residual with it."""
        for old in self.stale(keys, warm):
            if old == keys:
                self._drop(self._parts[keys][1])
            else:
                self._drop(itertools.chain(*self._parts.pop(old)))
                self._warm.discard(old)
        if keys not in self._parts:
            self._parts[keys] = self._make(keys, buffer)
            if keys not in self.layout:
                self.layout = [old for old in self.layout if set(old).isdisjoint(keys)] + [keys]
        compressed, plain = self._parts[keys]
        if spend:
            self._drop(compressed)
        if warm and compressed is not plain:
            self._warm.add(keys)
        else:
            self._warm.discard(keys)
        return plain if warm else compressed

    def change(self, plan: Plan) -> None:
        """Another plan from here on. The memory keeps what the parts held."""
        self._drop(part for both in self._parts.values() for parts in both for part in parts)
        self._plan = plan
        self.clear()
        for p in self._by_id.values():
            p.plain = plan.is_plain(p.name, p.tensor)

    def clear(self) -> None:
        """Forgets the parts, not the parameters."""
        self._parts.clear()
        self._warm.clear()

    def _drop(self, parts: Iterable[Part]) -> None:
        for part in dict.fromkeys(parts):
            self._memory.drop(part)

    def _make(self, keys: BucketKey, buffer: Tensor) -> tuple[list[Part], list[Part]]:
        parameters = self.parameters
        slices, offset = [], 0
        for key in keys:
            p = parameters[key].tensor
            # Where it is dense DDP gives the bucket's view of a parameter the parameter's own strides.
            slices.append(Slice(key, offset, p.numel(), p.shape, p.stride(), dense(p)))
            offset += p.numel()
        plan = self._plan
        whole = [Part(plan.dense, "reduce", slices, whole=True)]
        can = not buffer.is_sparse and buffer.numel() == offset
        if not can or not plan.codec.takes(torch.Size([offset]), buffer.dtype):
            return whole, whole
        return plan.parts(slices, [parameters[key].plain for key in keys]), whole
