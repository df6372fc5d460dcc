"""What ptxas says about each kernel: registers, stack, spills, shared memory.

    report.py collect FOLDER COMMAND…    runs a compiler, keeps what ptxas says in FOLDER (a launcher)
    report.py check FOLDER REPORT        writes the table to REPORT; fails on a spill or a stack

CMakeLists.txt uses both; the report is ``ptxas.txt`` in the build folder (GRADCOMM_PTXAS_REPORT).
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

_KERNEL = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def collect(folder: pathlib.Path, command: list[str]) -> int:
    done = subprocess.run(command, capture_output=True, text=True)
    said, others = [], []
    for line in (done.stdout + done.stderr).splitlines(keepends=True):
        of_ptxas = line.startswith("ptxas info") or " bytes stack frame" in line
        (said if of_ptxas else others).append(line)
    sys.stderr.write("".join(others))
    if said:
        source = next(word for word in command if word.endswith(".cu"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{pathlib.Path(source).stem}.txt").write_text("".join(said))
    return done.returncode


def rows(text: str) -> list[dict[str, str]]:
    return [m.groupdict() for m in _KERNEL.finditer(text)]


def check(folder: pathlib.Path, report: pathlib.Path) -> int:
    found = [row for file in sorted(folder.glob("*.txt")) for row in rows(file.read_text())]
    found.sort(key=lambda row: (row["kernel"], row["arch"]))
    lines = [f"{'kernel':50} {'arch':6} {'registers':>9} {'stack':>6} {'spills':>7}  (bytes)"]
    bad = []
    for row in found:
        spills = int(row["stores"]) + int(row["loads"])
        lines.append(
            f"{row['kernel']:50} {row['arch']:6} {row['registers']:>9} {row['stack']:>6} {spills:>7}"
        )
        if spills or int(row["stack"]):
            bad.append(f"{row['kernel']} for {row['arch']} spills {spills} bytes, stack {row['stack']}")
    report.write_text("\n".join(lines) + "\n")
    if not found:
        bad.append(f"no kernel is reported in {folder}")
    for line in bad:
        print(f"ptxas report: {line}", file=sys.stderr)
    return 1 if bad else 0


def main(arguments: list[str]) -> int:
    if len(arguments) >= 3 and arguments[0] == "collect":
        return collect(pathlib.Path(arguments[1]), arguments[2:])
    if len(arguments) == 3 and arguments[0] == "check":
        return check(pathlib.Path(arguments[1]), pathlib.Path(arguments[2]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
