"""The demo's data: the same everywhere, and nothing held out is trained on."""

from __future__ import annotations

import pathlib

import pytest
import torch

from bench import textdata


def test_sources_come_in_an_order_of_their_own(tmp_path: pathlib.Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "site-packages/x.py", "note.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    found = [p.relative_to(tmp_path).as_posix() for p in textdata.sources(tmp_path)]
    assert found == ["a.py", "a/z.py", "b.py"]


def test_a_new_file_moves_no_other() -> None:
    files = [pathlib.Path(f"module{i}.py") for i in range(500)]
    train, held_out = textdata.split(files)
    assert sorted(train + held_out) == sorted(files)
    assert 5 < len(held_out) < 60
    more, _ = textdata.split([*files, pathlib.Path("new.py")])
    assert set(train) <= set(more)


def test_the_standard_library_is_enough() -> None:
    train, held_out = textdata.load()
    assert train.dtype == torch.uint8
    assert train.numel() > 2_000_000
    assert held_out.numel() > 50_000


def test_the_end_of_a_text_is_held_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    train, held_out = textdata.load(str(path))
    assert torch.cat([train, held_out]).tolist() == list(range(200))
    assert held_out.numel() == 10


def test_too_little_text_is_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"few")
    with pytest.raises(ValueError, match="--text"):
        textdata.load(str(path))
    with pytest.raises(ValueError, match="too short"):
        textdata.sample(torch.zeros(8, dtype=torch.uint8), 1, 8, torch.Generator())


def test_windows_are_of_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = textdata.sample(text, 5, 9, torch.Generator().manual_seed(0))
    assert windows.shape == (5, 10)
    assert bool((windows.diff(dim=1) == 1).all())
