"""Codecs by name: ``"topk:density=0.01"`` for ``TopK(density=0.01)``."""

from __future__ import annotations

import ast
from typing import Any

from .auto import Auto
from .base import Codec, own_first
from .cast import Cast
from .dense import Dense
from .onebit import OneBit
from .powersgd import PowerSGD
from .quantize import Quantize
from .topk import TopK
from .twobit import TwoBit

#: Name in a string → class and the options that the name stands for.
NAMES: dict[str, tuple[type[Codec], dict[str, Any]]] = {
    "none": (Dense, {}),
    "fp16": (Cast, {"dtype": "float16"}),
    "bf16": (Cast, {"dtype": "bfloat16"}),
    "int8": (Quantize, {"bits": 8}),
    "int4": (Quantize, {"bits": 4}),
    "int2": (Quantize, {"bits": 2}),
    "twobit": (TwoBit, {}),
    "onebit": (OneBit, {}),
    "topk": (TopK, {}),
    "auto": (Auto, {}),
    "powersgd": (PowerSGD, {}),
}

#: What ``Codec.spec`` says besides.
_CLASSES: dict[str, tuple[type[Codec], dict[str, Any]]] = {
    "cast": (Cast, {}),
    "quantize": (Quantize, {}),
}


def parse(text: str) -> Codec:
    """The codec that a string names: ``name`` or ``name:option=value,option=value``.

    Raises ValueError for an unknown name, an unknown option or a bad value.
    """
    name, _, rest = text.partition(":")
    found = NAMES.get(name) or _CLASSES.get(name)
    if found is None:
        raise ValueError(f"gradcomm: unknown codec {name!r}; use one of {', '.join(NAMES)}")
    cls, preset = found
    known = [f.name for f in own_first(cls)]
    options = dict(preset)
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or key not in known:
            raise ValueError(
                f"gradcomm: codec {text!r}: unknown option {item!r}; {name} takes "
                f"{', '.join(f'{k}=…' for k in known) or 'no options'}"
            )
        options[key] = _value(value.strip())
    return cls(**options)


def _value(text: str) -> Any:
    """A number, True, False or None where it reads as one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
