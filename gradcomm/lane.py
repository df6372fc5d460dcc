"""Where and in what order exchanges run: beside backward, first in, first begun.

``ThreadLane``: a transport that makes its caller wait (Gloo, MPI) is called by worker threads: by one,
or by two, which take jobs in turn, each with a transport of its own. Of several one computes while the
others are on the wire: so encoding a bucket overlaps the wire of the one before, and nothing else can
differ from one worker's run.
``StreamLane``: one that enqueues (NCCL) is called in the hook itself, and nothing waits on the host.

Either way every rank issues the same collectives in the same order, whatever the order of callbacks
or the length of backward, on a process group of the lane's own. On a GPU a job runs under the lane's
side stream, behind an event of the stream that filled the bucket; the future makes the stream of
whoever waits for it wait for the side stream. A job that fails fails all that come after it on its way,
and after the step on both, since the ranks no longer agree.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradcomm.streams import Event, Streams

_Future = torch.futures.Future[Tensor]
#: Called with the way that it is to take, by number, and what it calls when the next job may begin.
_Job = Callable[[int, Callable[[], None]], None]


class LaneError(RuntimeError):
    """An exchange failed; ``__cause__`` is the error itself, with its traceback in the lane."""


class _Track:
    """The side stream, and what failed. It does not know the lane: a thread that holds it does not keep
    the lane alive.

    A job that failed stops its own way at once, and the other way only when the lane is drained, which
    is at the same job on every rank: before, a rank may have begun a job that another would skip.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.side = streams.new()
        self.error: LaneError | None = None  # that the lane has ended with
        self.failed: dict[int, tuple[int, LaneError]] = {}  # by way: number of the job, and its error

    def run(
        self,
        job: Callable[[], None],
        result: Tensor,
        what: str,
        ready: Event,
        done: _Done,
        way: int = 0,
        number: int = 0,
    ) -> None:
        """Runs a job behind ``ready`` and says that it is done, whatever the job does."""
        with self.streams.use(self.side):
            if self.error is None and way not in self.failed:
                try:
                    self.streams.wait(ready)
                    self.streams.hold(result)
                    job()
                except BaseException as cause:  # whatever it is, backward must hear of it
                    error = LaneError(f"gradcomm: {what}: {type(cause).__name__}: {cause}")
                    error.__cause__ = cause
                    self.failed[way] = number, error
            done(result)


class _Done:
    """Completes a future with the last of ``count`` jobs."""

    def __init__(self, future: _Future, count: int) -> None:
        self._future, self._left, self._lock = future, count, threading.Lock()

    def __call__(self, result: Tensor) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._future.set_result(result)


class Lane(abc.ABC):
    """``submit`` returns at once; ``drain`` waits for what was submitted.

    Dropped without ``close``, a lane ends by itself.
    """

    def __init__(self, streams: Streams) -> None:
        self._track = _Track(streams)
        self._streams = streams

    @abc.abstractmethod
    def submit(
        self, jobs: Sequence[_Job], result: Tensor, what: str, turn: int = 0, alone: bool = False
    ) -> _Future:
        """Runs jobs, which write to ``result``, each when all before it have begun (``alone``: when all
        that were submitted before have ended), and after what the current stream was given so far.
        ``turn``: the number of the first in the step, the same on every rank, which gives the way that
        it takes.

        The future always completes with ``result``, since DDP waits for it: whether a job failed is
        for ``drain`` to say. ``what`` names the jobs in an error.
        """

    def drain(self) -> None:
        """Waits for all that was submitted: the thread for a thread, the current stream for a stream.
        Raises LaneError if any of it failed."""
        self._wait()
        track = self._track
        if track.error is None and track.failed:
            _, track.error = min(track.failed.values(), key=lambda failed: failed[0])
        if track.error is not None:
            raise track.error

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """Between two jobs, and like one: on the lane's stream, after what was submitted and what the
        current stream was given. For whoever changes what jobs use, memory that they freed included.

        Raises LaneError as ``drain`` does."""
        self.drain()
        ready = self._streams.record()
        with self._streams.use(self._track.side):
            self._streams.wait(ready)
            yield

    @abc.abstractmethod
    def close(self) -> None:
        """Does what was submitted, and ends. Nothing can be submitted after it."""

    @abc.abstractmethod
    def _wait(self) -> None:
        """``drain``, without the error."""


def make_lane(streams: Streams, enqueues: bool, baton: Baton | None = None) -> Lane:
    """The lane for a transport; ``enqueues``: its calls do not make the caller wait. ``baton``: it has
    two ways, and both put this one aside while they wait."""
    return StreamLane(streams) if enqueues else ThreadLane(streams, baton)


class StreamLane(Lane):
    """Jobs are enqueued on a side stream by the thread that submits them, which never waits."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self._last: Event | None = None

    def submit(
        self, jobs: Sequence[_Job], result: Tensor, what: str, turn: int = 0, alone: bool = False
    ) -> _Future:
        future = self._streams.future()
        done, ready = _Done(future, len(jobs)), self._streams.record()
        for job in jobs:
            self._track.run(functools.partial(job, 0, _nothing), result, what, ready, done)
        with self._streams.use(self._track.side):
            self._last = self._streams.record()
        return future

    def _wait(self) -> None:
        if self._last is not None:
            self._streams.wait(self._last)

    def close(self) -> None:
        if self._last is not None:
            self._last.synchronize()  # what a communicator still does must be over before it is freed


def _nothing() -> None:
    pass


class Baton:
    """Held by the worker that computes, and put aside while it waits for the wire."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, others may have it. For who does not hold it: nothing."""
        if self._holder != threading.get_ident():
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class _Order:
    """Jobs begin one after another, whichever worker they are with."""

    def __init__(self) -> None:
        self._begun = 0
        self._changed = threading.Condition()

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._begun >= number)

    def begun(self, number: int) -> None:
        with self._changed:
            self._begun = max(self._begun, number + 1)
            self._changed.notify_all()


class ThreadLane(Lane):
    """A worker thread, or with a baton two, which wait where the transport does."""

    def __init__(
        self, streams: Streams, baton: Baton | None = None, name: str = "gradcomm-lane"
    ) -> None:
        super().__init__(streams)
        self._queues: list[_Queue] = [queue.SimpleQueue() for _ in range(1 if baton is None else 2)]
        self._count = 0
        self._pending: list[_Future] = []
        self._process = os.getpid()
        order, baton = _Order(), Baton() if baton is None else baton
        self._threads = []
        for way, jobs in enumerate(self._queues):
            work = (way, self._track, jobs, order, baton, torch.get_num_threads())
            thread = threading.Thread(target=_work, args=work, name=f"{name}-{way}", daemon=True)
            thread.start()
            self._threads.append(thread)
        # A lane that is collected ends; put may be called in any thread, even from within itself.
        self._end = weakref.finalize(self, _stop, self._queues)
        self._end.atexit = False
        _open.add(self)

    def submit(
        self, jobs: Sequence[_Job], result: Tensor, what: str, turn: int = 0, alone: bool = False
    ) -> _Future:
        if self._process != os.getpid():
            raise LaneError(
                f"gradcomm: {what}: this process was forked after registering, and the thread that "
                "exchanges gradients stayed behind; train in processes that are spawned, or register "
                "after the fork"
            )
        future = self._streams.future()
        before = list(self._pending) if alone else []
        self._pending.append(future)
        done, ready = _Done(future, len(jobs)), self._streams.record()
        for i, job in enumerate(jobs):
            way = (turn + i) % len(self._queues)
            self._queues[way].put((self._count, before, job, result, what, ready, done))
            self._count += 1
        return future

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()

    def close(self) -> None:
        self.end(None)

    def end(self, timeout: float | None) -> None:
        """``close``, which gives up after so many seconds."""
        self._end()
        for thread in self._threads:
            thread.join(timeout)


_Queue = queue.SimpleQueue[tuple[int, list[_Future], _Job, Tensor, str, Event, _Done] | None]


def _stop(queues: list[_Queue]) -> None:
    for jobs in queues:
        jobs.put(None)


def _work(way: int, track: _Track, jobs: _Queue, order: _Order, baton: Baton, threads: int) -> None:
    torch.set_num_threads(threads)  # a new thread would start with as many as the machine has
    while (item := jobs.get()) is not None:
        number, before, job, result, what, ready, done = item
        for earlier in before:
            earlier.wait()
        order.wait(number)
        begun = functools.partial(order.begun, number)
        with baton:
            here = functools.partial(job, way, begun)
            track.run(here, result, what, ready, done, way, number)
        begun()  # a job that failed may not have said so
        del item, before, job, here, result, done  # or the last bucket would live on until the next


#: Lanes that have a thread.
_open: weakref.WeakSet[ThreadLane] = weakref.WeakSet()

#: How long an interpreter that ends waits for the thread of a lane that was not closed (seconds).
_PATIENCE = 2.0


@atexit.register
def _end_all() -> None:
    """A thread must not run on while the interpreter under it goes; one that waits for a rank that is
    gone is left."""
    for lane in list(_open):
        lane.end(_PATIENCE)
