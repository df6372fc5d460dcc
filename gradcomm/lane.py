"""Where and in what order exchanges run.

On CPU a lane is one worker thread with a process group of its own, first in, first out: every rank
issues the same collectives in the same order, whatever the order of callbacks or the length of
backward. A job that fails fails all that come after it, since the ranks no longer agree.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class LaneError(RuntimeError):
    """An exchange failed; ``__cause__`` is the error itself, with its traceback in the lane."""


class Lane:
    """One worker thread. ``submit`` returns at once; ``drain`` waits for what was submitted."""

    def __init__(self, name: str = "gradcomm-lane") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Tensor, str, _Future] | None]
        self._jobs = queue.SimpleQueue()
        self._pending: list[_Future] = []
        self._error: LaneError | None = None
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], result: Tensor, what: str) -> _Future:
        """Runs ``job``, which writes to ``result``, after all jobs before it.

        The future always completes with ``result``, since DDP waits for it: whether the job failed is
        for ``drain`` to say. ``what`` names the job in an error.
        """
        future: _Future = torch.futures.Future()
        self._pending.append(future)
        self._jobs.put((job, result, what, future))
        return future

    def drain(self) -> None:
        """Waits for all that was submitted; raises LaneError if any of it failed."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """What is done inside comes after all that was submitted before, and before all that will be."""
        self.drain()
        yield

    def close(self) -> None:
        """Ends the thread once it has done what was submitted."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread would start with as many as the machine has
        while (item := self._jobs.get()) is not None:
            job, result, what, future = item
            if self._error is None:
                try:
                    job()
                except BaseException as cause:  # whatever it is, backward must hear of it
                    self._error = LaneError(f"gradcomm: {what}: {type(cause).__name__}: {cause}")
                    self._error.__cause__ = cause
            future.set_result(result)


_Future = torch.futures.Future[Tensor]
