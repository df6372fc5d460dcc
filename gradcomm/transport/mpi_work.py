"""Work objects of the ``mpi4py`` backend, and the thread that runs them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mpi_calls import Calls
from .mpi_threads import call


class QueuedWork(dist.Work):
    """A collective in the progress thread's queue."""

    def __init__(self, what: str, outputs: list[Any]) -> None:
        super().__init__()
        self.what, self.outputs = what, outputs
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._trigger: torch.futures.Future[None] = torch.futures.Future()
        # A callback that raises is the one way to make a future fail for C++, which is who waits in DDP.
        self._future = self._trigger.then(self._outcome)

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()
        self._trigger.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises what the collective raised, or TimeoutError after ``timeout`` (0: no limit here; the
        group's timeout ends the collective itself)."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise TimeoutError(f"gradcomm: {self.what} over MPI did not end within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> list[Any]:
        return self.outputs

    def _outcome(self, _: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self.outputs


class PairWork(dist.Work):
    """A send or receive that MPI has already begun; whoever waits polls it.

    Not in the queue: two ranks that each receive first and send second must not wait for each other.
    """

    def __init__(
        self,
        calls: Calls,
        request: Any,
        what: str,
        tensor: Tensor,
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._calls, self._request, self._what, self._tensor = calls, request, what, tensor
        self._then = then  # once, when the bytes are there
        self._lock = threading.Lock()
        self._status = calls.mpi.Status()
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            if not self._done:
                self._calls.wait_one(self._request, self._what, self._tensor, self._status, timeout)
                self._end()
        return True

    def is_completed(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            if not self._done and call(self._request.Test, self._status):
                self._end()
            return self._done
        finally:
            self._lock.release()

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        work = QueuedWork(self._what, [self._tensor])
        threading.Thread(target=_run, args=(work, self.wait), daemon=True).start()
        return work.get_future()

    def result(self) -> list[Tensor]:
        return [self._tensor]

    def _source_rank(self) -> int:
        return int(self._status.Get_source())

    source_rank = _source_rank

    def _end(self) -> None:
        self._done = True
        if self._then is not None:
            self._then()


class Progress:
    """A thread that runs collectives first in, first out, while the caller goes on."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[QueuedWork, Callable[[], None]] | None]
        self._queue = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None

    def submit(self, what: str, outputs: list[Any], run: Callable[[], None]) -> QueuedWork:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="gradcomm-mpi", daemon=True)
            self._thread.start()
        work = QueuedWork(what, outputs)
        self._queue.put((work, run))
        return work

    def close(self) -> None:
        """Ends the thread once it has run what was submitted."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread would start with as many as the machine has
        while (item := self._queue.get()) is not None:
            work, run = item
            _run(work, run)


@torch.no_grad()
def _run(work: QueuedWork, run: Callable[[], Any]) -> None:
    error: BaseException | None = None
    try:
        run()
    except BaseException as problem:  # whatever it is, who waits must hear of it
        error = problem
    work.finish(error)
