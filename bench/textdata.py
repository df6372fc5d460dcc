"""Text to train on without a download: the bytes of Python's own standard library, or of a file."""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig

import torch
from torch import Tensor

#: One file in so many is held out; of a single text, the last such part.
HELD_OUT = 20


def load(path: str | None = None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, each uint8 ``[n]``: of the text file at ``path``, or of
    the standard library's sources. The same on every machine with the same files.

    Raises ValueError when there is too little text.
    """
    if path is not None:
        text = pathlib.Path(path).read_bytes()
        cut = len(text) - len(text) // HELD_OUT
        train, held_out = text[:cut], text[cut:]
    else:
        files = sources(pathlib.Path(sysconfig.get_path("stdlib")))
        train, held_out = (b"".join(f.read_bytes() for f in part) for part in split(files))
    if not train or not held_out:
        raise ValueError(f"no text to train on in {path or 'the standard library'}; give --text FILE")
    return tuple(torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (train, held_out))


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
    """The ``.py`` files under a folder, without installed packages, in an order that does not depend on
    the file system."""
    installed = {"site-packages", "dist-packages"}
    found = (p for p in folder.rglob("*.py") if p.is_file() and installed.isdisjoint(p.parts))
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def split(files: list[pathlib.Path]) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Files to train on and files held out. By a hash of the name: neighbours, which are alike (the
    tables of ``encodings``, say), fall on both sides, and a new file moves no other."""
    held_out = {f for f in files if hashlib.sha256(f.name.encode()).digest()[0] % HELD_OUT == 0}
    return [f for f in files if f not in held_out], [f for f in files if f in held_out]


def sample(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """``count`` random windows, int64 ``[count, context + 1]``: the last byte of each is only a target.

    Raises ValueError when the text is shorter than a window.
    """
    if text.numel() <= context:
        raise ValueError(f"a text of {text.numel()} bytes is too short for windows of {context + 1}")
    starts = torch.randint(text.numel() - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
