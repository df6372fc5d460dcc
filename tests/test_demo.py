"""The demo, whole and small; and its ranks, of which none is left when one fails."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from bench import accuracy, report
from bench import ranks as bench_ranks
from bench.entry import read
from bench.study import Study
from gradcomm import Dense, OneBit, Quantize

ROOT = pathlib.Path(__file__).parent.parent


def test_demo_trains_and_reports(tmp_path: pathlib.Path) -> None:
    out, png = tmp_path / "demo.json", tmp_path / "demo.png"
    command = [sys.executable, "-m", "bench.demo", "--codecs", "none", "onebit", "--steps", "24"]
    command += ["--width", "64", "--depth", "1", "--context", "32", "--batch", "4", "--lr", "0.01"]
    command += ["--json", str(out), "--png", str(png), "--text", str(ROOT / "LICENSE")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {r["codec"]: r for r in json.loads(out.read_text())["results"]}
    assert list(results) == ["none", "onebit"]
    for r in results.values():
        losses = [point["loss"] for point in r["curve"]]
        assert all(map(math.isfinite, losses))
        assert losses[-1] < losses[0] - 0.5
        assert r["identical"]
        assert r["codec"] in done.stdout
    assert results["none"]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert results["onebit"]["ratio"] > 5
    assert png.stat().st_size > 1000


def test_unknown_codec_is_told_before_anything_starts(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "bench.demo", "--codecs", "nonesuch", "--json", str(tmp_path / "j")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "nonesuch" in done.stderr


def _one_fails(rank: int, tell: Callable[..., None]) -> None:
    if rank == 1:
        raise ArithmeticError("rank one has had enough")
    dist.barrier()


def _one_dies(rank: int, tell: Callable[..., None]) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def _none_moves(rank: int, tell: Callable[..., None]) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "silence", "told"),
    [
        (_one_fails, 60, r"rank 1 failed(.|\n)*ArithmeticError: rank one has had enough"),
        (_one_dies, 60, r"rank 1 died \(exit code 7\)"),
        (_none_moves, 8, r"no rank has made progress"),
    ],
)
def test_a_failing_rank_ends_all(work: Callable[..., None], silence: float, told: str) -> None:
    before = set(multiprocessing.active_children())
    start = time.monotonic()
    with pytest.raises(bench_ranks.RankError, match=told):
        list(bench_ranks.run(work, 2, silence=silence))
    assert time.monotonic() - start < 45
    assert set(multiprocessing.active_children()) == before


def _tells(rank: int, tell: Callable[..., None], word: str) -> None:
    tell(word, rank)


def test_what_ranks_tell_arrives() -> None:
    assert sorted(bench_ranks.run(_tells, 2, "here")) == [("here", 0), ("here", 1)]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1230, "1.23 kB"), (10.1e6, "10.1 MB"), (5e9, "5 GB")],
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert report.size(count) == text


@pytest.mark.parametrize(
    ("entry", "rule", "options"),
    [
        ("onebit", OneBit(), {}),
        ("onebit:block=128 momentum=0.9 plain=['a*']", OneBit(128), {"momentum": 0.9, "plain": ["a*"]}),
        ("int8 10%>onebit 180>none", {0: Quantize(), 20: OneBit(), 180: Dense()}, {}),
    ],
)
def test_an_entry_is_a_codec_a_schedule_and_options(entry: str, rule: Any, options: Any) -> None:
    assert read(entry, 200) == (rule, options)


@pytest.mark.parametrize("entry", ["", "onebit 0.9", "onebit 10>", "onebit 10>huge"])
def test_a_bad_entry_is_refused(entry: str) -> None:
    with pytest.raises(ValueError):
        read(entry, 200)


def test_accuracy_compares_codecs_over_seeds(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "accuracy.json"
    command = [sys.executable, "-m", "bench.accuracy", "--tasks", "mnist1d", "--seeds", "2"]
    command += ["--codecs", "int8", "--steps", "40", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 4
    assert (
        subprocess.run(command, cwd=ROOT, timeout=60, check=False, capture_output=True).returncode == 0
    )
    assert json.loads(out.read_text())["runs"] == runs  # what is there is not made again
    study = Study("", "mnist1d", ("int8",), seeds=2, steps=40)
    fp16, int8 = accuracy.summary(study, runs)
    assert (fp16["codec"], int8["codec"]) == ("fp16", "int8")
    assert fp16["identical"] and int8["identical"]
    assert fp16["ratio"] == pytest.approx(2.0, rel=0.5)
    assert int8["ratio"] > 1.2 * fp16["ratio"]  # it is compressed at all
    assert fp16["change_percent"] == 0 and fp16["holds"]
