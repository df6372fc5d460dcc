"""A short soak: ranks identical through every kind of event, threads flat."""

from __future__ import annotations

import pathlib
import subprocess
import sys


def test_a_short_soak() -> None:
    script = pathlib.Path(__file__).parent.parent / "bench" / "soak.py"
    command = [sys.executable, str(script), "--steps", "100", "--samples", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "identical throughout" in done.stdout
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("| 0 |", "| 1 |"))]
    assert len(rows) == 2
    for row in rows:
        early, most, end = map(int, row[5].split())
        assert early == most == end
