"""Which codec for which parameter, and so which parts a bucket falls into."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcomm.codec.base import Codec
from gradcomm.codec.dense import Dense
from gradcomm.part import Part, Slice

#: Parameters smaller than this go plain: their records would be mostly padding and headers, and they
#: are where a lost bit costs most.
MIN_NUMEL = 2048

#: ``plain=``: a predicate on (name, parameter), or parameters or their names (``fnmatch`` patterns).
PlainRule = Callable[[str, Tensor], bool] | Iterable[str | Tensor] | None


@dataclasses.dataclass
class Parameter:
    """A parameter of the model as the memory knows it."""

    key: int
    name: str
    tensor: Tensor
    plain: bool


class Plan:
    """``codec`` for what can be compressed, plain for the rest."""

    def __init__(self, codec: Codec, exchange: str, plain: PlainRule, min_numel: int) -> None:
        self.codec = codec
        self.exchange = exchange
        self.dense = Dense()
        self._min_numel = min_numel
        self._predicate, self._names, self._ids = _rule(plain)
        self._matched: set[str] = set()

    def is_plain(self, name: str, tensor: Tensor) -> bool:
        """Whether a parameter is sent plain for all of training."""
        named = [pattern for pattern in self._names if fnmatch.fnmatchcase(name, pattern)]
        self._matched.update(named)
        if isinstance(self.codec, Dense) or not self.codec.takes(tensor.shape, tensor.dtype):
            return True
        if tensor.dim() < 2 or tensor.numel() < self._min_numel or id(tensor) in self._ids:
            return True
        return bool(named) or self._predicate(name, tensor)

    def check_used(self) -> None:
        """Raises when a name in ``plain`` matches no parameter: most likely it is misspelt."""
        unused = [n for n in self._names if n not in self._matched]
        if unused:
            raise ValueError(
                f"gradcomm: plain={unused!r} matches no parameter; "
                "use names of named_parameters() of the module inside DDP, or fnmatch patterns"
            )

    def parts(self, slices: list[Slice], plain: list[bool]) -> list[Part]:
        """The parts of a bucket: the compressed one, and the plain one, where there are any."""
        chosen = [(self.codec, self.exchange, False), (self.dense, "reduce", True)]
        parts = []
        for codec, exchange, want in chosen:
            mine = [s for s, p in zip(slices, plain, strict=True) if p == want and s.numel]
            if mine:
                parts.append(Part(codec, exchange, mine, whole=len(mine) == len(slices)))
        return parts


def _rule(plain: PlainRule) -> tuple[Callable[[str, Tensor], bool], list[str], set[int]]:
    if plain is None:
        return (lambda name, tensor: False), [], set()
    if callable(plain):
        return plain, [], set()
    if isinstance(plain, str | Tensor):
        raise TypeError(f"gradcomm: plain={plain!r}; give a list of names or parameters, or a predicate")
    names, ids = [], set()
    for item in plain:
        if isinstance(item, str):
            names.append(item)
        elif isinstance(item, torch.Tensor):
            ids.add(id(item))
        else:
            raise TypeError(f"gradcomm: plain={item!r} is neither a parameter nor a name")
    return (lambda name, tensor: False), names, ids
