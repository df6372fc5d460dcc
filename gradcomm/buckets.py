"""Buckets as DDP lays them out: which parameters, which parts."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gradcomm.memory import Memory
from gradcomm.part import Part, Slice
from gradcomm.plan import Parameter, Plan

#: A bucket's parameters, by key, in order: what tells one layout from another.
BucketKey = tuple[int, ...]


class Buckets:
    """The parameters that were seen, and the parts of the buckets of the present layout."""

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._plan, self._memory = plan, memory
        self._by_id: dict[int, Parameter] = {}
        self._parts: dict[BucketKey, tuple[list[Part], list[Part]]] = {}
        self._warm: set[BucketKey] = set()  # buckets that were last exchanged plain, for warm-up

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

    def stale(self, keys: BucketKey, warm: bool) -> list[BucketKey]:
        """The buckets, of this layout or an older one, whose parts ``parts`` would now drop. What a lane
        still does with them must be over first."""
        if keys in self._parts:
            return [keys] if keys in self._warm and not warm else []
        return [old for old in self._parts if not set(old).isdisjoint(keys)]

    def parts(self, keys: BucketKey, buffer: Tensor, warm: bool) -> list[Part]:
        """The parts of a bucket; all of it as one plain part in steps of warm-up. Parts of older buckets
        with the same parameters go, and the memory takes over what they held."""
        for old in self.stale(keys, warm):
            if old == keys:
                self._drop(self._parts[keys][1])
            else:
                self._drop(itertools.chain(*self._parts.pop(old)))
                self._warm.discard(old)
        if keys not in self._parts:
            self._parts[keys] = self._make(keys, buffer)
        compressed, plain = self._parts[keys]
        if warm and compressed is not plain:
            self._warm.add(keys)
        else:
            self._warm.discard(keys)
        return plain if warm else compressed

    def release(self) -> None:
        """Forgets the layout; the memory keeps what its parts held, by parameter."""
        for compressed, plain in self._parts.values():
            self._drop([*compressed, *plain])
        self.clear()

    def clear(self) -> None:
        """Forgets the layout, not the parameters."""
        self._parts.clear()
        self._warm.clear()

    def _drop(self, parts: itertools.chain[Part] | list[Part]) -> None:
        for part in dict.fromkeys(parts):
            self._memory.drop(part)

    def _make(self, keys: BucketKey, buffer: Tensor) -> tuple[list[Part], list[Part]]:
        parameters = self.parameters
        slices, offset = [], 0
        for key in keys:
            p = parameters[key].tensor
            slices.append(Slice(key, offset, p.numel(), p.shape, p.stride(), _dense(p)))
            offset += p.numel()
        plan = self._plan
        whole = [Part(plan.dense, "reduce", slices, whole=True)]
        can = not buffer.is_sparse and buffer.numel() == offset
        if not can or not plan.codec.takes(torch.Size([offset]), buffer.dtype):
            return whole, whole
        return plan.parts(slices, [parameters[key].plain for key in keys]), whole


def _dense(p: Tensor) -> bool:
    """Whether DDP gives the bucket's view of this parameter the parameter's own strides."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(p.stride(), p.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
