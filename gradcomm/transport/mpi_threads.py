"""From which threads MPI is called, by the level of thread support that it granted.

==========================  =======================================================================
MPI_THREAD_MULTIPLE         from every thread
MPI_THREAD_SERIALIZED       from every thread, one at a time by a lock
FUNNELED, SINGLE            from the one thread that started MPI: one of gradcomm's own, to which all
                            others hand their calls
==========================  =======================================================================

Every MPI call of this package goes through ``call``. Those that wait are polled, so that no thread keeps
the others out.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger("gradcomm")

T = TypeVar("T")


class _OwnThread:
    """The thread that starts MPI; runs what others hand it, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="gradcomm-mpi-calls", daemon=True)
        self._thread.start()

    def begin(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((function, future))
        return future

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        if threading.current_thread() is self._thread:
            return function(*arguments)
        return self.begin(lambda: function(*arguments)).result()

    def _loop(self) -> None:
        while True:
            function, future = self._queue.get()
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits must hear of it
                future.set_exception(error)


def _directly(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


_lock = threading.RLock()


def _locked(function: Callable[..., T], *arguments: Any) -> T:
    with _lock:
        return function(*arguments)


_own: _OwnThread | None = None
_way: Callable[..., Any] = _directly


def call(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, which calls MPI, in a thread that may. Returns when it has returned."""
    result: T = _way(function, *arguments)
    return result


def start(initialize: Callable[[], T]) -> T:
    """Runs what initializes MPI, in a thread to which calls can be handed later."""
    global _own
    if _own is None:
        _own = _OwnThread()
    return _own.call(initialize)


def settle(mpi: Any) -> str | None:
    """Chooses the way of ``call`` by what MPI granted; says so if that is not the best. Returns what is
    wrong if MPI can be called from one thread only, and that one is not gradcomm's."""
    global _way
    level = mpi.Query_thread()
    if level >= mpi.THREAD_MULTIPLE:
        return None
    if level == mpi.THREAD_SERIALIZED:
        if _way is not _locked:
            logger.warning(
                "gradcomm: MPI grants MPI_THREAD_SERIALIZED: gradcomm's threads call it one at a time; "
                "make no MPI call of your own beside a backward or an asynchronous collective"
            )
        _way = _locked
        return None
    name = "FUNNELED" if level == mpi.THREAD_FUNNELED else "SINGLE"
    if _own is None or not _own.call(mpi.Is_thread_main):
        return name
    if _way != _own.call:
        logger.warning(
            f"gradcomm: MPI grants MPI_THREAD_{name}: all its calls go through one thread, which costs "
            "time; make no MPI call of your own. A library with MPI_THREAD_MULTIPLE has neither limit"
        )
    _way = _own.call
    return None


def finalize_where_started(mpi: Any) -> None:
    """MPI wants to be finalized by the thread that initialized it; mpi4py does it in the main one."""

    def finish() -> None:
        if not mpi.Is_finalized():
            mpi.Finalize()

    if _own is not None:
        atexit.register(_own.call, finish)


def abort(mpi: Any, code: int) -> None:
    """Ends the MPI job, even where the thread that should do it is stuck in a call."""
    if _own is not None and _way == _own.call:
        with contextlib.suppress(Exception):
            _own.begin(lambda: mpi.COMM_WORLD.Abort(code)).result(timeout=5)
    mpi.COMM_WORLD.Abort(code)
