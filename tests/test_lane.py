"""The lane: in what order its jobs, streams and events come, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.lane import Baton, LaneError, StreamLane, ThreadLane, make_lane
from gradcomm.stats import Meter, Traffic
from gradcomm.streams import Streams
from gradcomm.transport.group import GroupTransport
from gradcomm.verify import digest

from .ranks import Ranks

LANES = pytest.mark.parametrize("enqueues", [True, False], ids=["stream", "thread"])


class Recorder:
    """Stands for ``torch.cuda``: streams, events and what they were told, in order, in ``log``."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self._local = threading.local()
        recorder = self

        class Stream:
            def __init__(self, device: torch.device | None = None, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                recorder.log.append((self.name, "waits for", event.name))

        class Event:
            made = 0

            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                Event.made += 1
                self.name, self.timing = f"event {Event.made}", enable_timing

            def record(self, stream: Any) -> None:
                recorder.log.append((stream.name, "records", self.name))

            def synchronize(self) -> None:
                recorder.log.append(("host", "waits for", self.name))

            def query(self) -> bool:
                return False

            def elapsed_time(self, end: Any) -> float:
                assert self.timing and end.timing
                return 3.0

        self.Stream, self.Event = Stream, Event
        self.main = Stream(name="main")

    def current_stream(self, device: torch.device) -> Any:
        return getattr(self._local, "stream", self.main)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._local.stream = self.current_stream(torch.device("cuda", 0)), stream
        yield
        self._local.stream = before

    def synchronize(self, device: Any = None) -> None:
        raise AssertionError("the whole device was waited for")


class Bucket:
    """Stands for a bucket on a GPU."""

    is_sparse = False

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record_stream(self, stream: Any) -> None:
        self._recorder.log.append((stream.name, "holds", "bucket"))


def _recorded(recorder: Recorder) -> Streams:
    """Those of a GPU that is not there."""
    streams = Streams(torch.device("cpu"))
    streams.device, streams.on_cpu, streams._module = torch.device("cuda", 0), False, recorder

    class Future:
        def __init__(self) -> None:
            self._come = threading.Event()

        def set_result(self, result: Any) -> None:
            recorder.log.append((streams.current().name, "completes", "future"))
            self._come.set()

        def wait(self) -> None:
            self._come.wait(10)
            recorder.log.append((streams.current().name, "waits for", "future"))

    streams.future = Future  # type: ignore[assignment, method-assign]
    return streams


def test_what_is_enqueued_runs_behind_the_bucket_and_before_who_waits() -> None:
    recorder = Recorder()
    streams = _recorded(recorder)
    lane = make_lane(streams, enqueues=True)
    lane.submit(
        [lambda *_: recorder.log.append((streams.current().name, "runs", "job"))],
        Bucket(recorder),  # type: ignore[arg-type]
        "a job",
    )
    submitted = [
        ("main", "records", "event 1"),
        ("side", "waits for", "event 1"),
        ("side", "holds", "bucket"),
        ("side", "runs", "job"),
        ("side", "completes", "future"),
        ("side", "records", "event 2"),
    ]
    assert recorder.log == submitted
    recorder.log.clear()
    with lane.between():
        recorder.log.append((streams.current().name, "runs", "between"))
    between = [
        ("main", "waits for", "event 2"),
        ("main", "records", "event 3"),
        ("side", "waits for", "event 3"),
        ("side", "runs", "between"),
    ]
    assert recorder.log == between
    recorder.log.clear()
    lane.close()
    assert recorder.log == [("host", "waits for", "event 2")]  # now alone, before the transport goes


def test_what_a_thread_runs_is_behind_the_bucket_and_before_who_waits() -> None:
    recorder = Recorder()
    streams = _recorded(recorder)
    lane = make_lane(streams, enqueues=False)
    begin = threading.Event()

    def job(*_: object) -> None:
        begin.wait(10)
        recorder.log.append((streams.current().name, "runs", "job"))

    lane.submit([job], Bucket(recorder), "a job")  # type: ignore[arg-type]
    begin.set()
    with lane.between():
        recorder.log.append((streams.current().name, "runs", "between"))
    lane.close()
    assert recorder.log == [
        ("main", "records", "event 1"),
        ("side", "waits for", "event 1"),
        ("side", "holds", "bucket"),
        ("side", "runs", "job"),
        ("side", "completes", "future"),
        ("main", "waits for", "future"),
        ("main", "records", "event 2"),
        ("side", "waits for", "event 2"),
        ("side", "runs", "between"),
    ]


def test_on_a_gpu_nothing_is_waited_for_until_stats_are_asked_for() -> None:
    recorder = Recorder()
    meter = Meter(_recorded(recorder))
    for _ in range(300):  # more than are kept unread
        with meter.clock("wire"):
            pass
        with meter.wait():
            pass
    assert not [entry for entry in recorder.log if entry[0] == "host"]
    report = meter.report(100, Traffic())
    assert report["wire_ms"] == pytest.approx(9.0) and report["wait_ms"] == pytest.approx(9.0)
    assert report["encode_ms"] == 0


@LANES
def test_an_error_fails_all_that_comes_after_it(enqueues: bool) -> None:
    lane = make_lane(Streams(torch.device("cpu")), enqueues)
    done: list[int] = []

    def fail(*_: object) -> None:
        raise ArithmeticError("put in by the test")

    results = [torch.ones(1) * i for i in range(3)]
    jobs: list[Callable[..., None]] = [lambda *_: done.append(0), fail, lambda *_: done.append(2)]
    futures = [
        lane.submit([job], result, f"job {i}")
        for i, (job, result) in enumerate(zip(jobs, results, strict=True))
    ]
    for _ in range(2):  # and it is told again
        with pytest.raises(LaneError, match="job 1: ArithmeticError: put in by the test") as caught:
            lane.drain()
        assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(LaneError), lane.between():
        done.append(3)
    assert done == [0]
    assert all(f.wait() is r for f, r in zip(futures, results, strict=True))  # DDP waits for them
    lane.close()


def test_a_lane_that_is_dropped_ends_its_thread() -> None:
    lane = ThreadLane(Streams(torch.device("cpu")))
    done: list[int] = []
    lane.submit([lambda *_: done.append(1)], torch.zeros(1), "a job")
    (thread,), gone = lane._threads, weakref.ref(lane)
    del lane
    gc.collect()
    thread.join(10)
    assert gone() is None and not thread.is_alive()
    assert done == [1]  # what was submitted is done


@LANES
def test_no_bucket_is_kept(enqueues: bool) -> None:
    lane = make_lane(Streams(torch.device("cpu")), enqueues)
    bucket = torch.zeros(1)
    gone = weakref.ref(bucket)
    lane.submit([lambda *_: None], bucket, "a job")
    lane.drain()
    del bucket
    lane.submit([lambda *_: None], torch.zeros(1), "another")  # so that a thread is past the first
    lane.drain()
    gc.collect()
    assert gone() is None
    lane.close()


def test_of_two_ways_one_computes_while_the_other_is_on_the_wire() -> None:
    baton = Baton()
    lane = make_lane(Streams(torch.device("cpu")), False, baton)
    log: list[str] = []
    overtaken = threading.Event()

    def first(way: int, begun: Callable[[], None]) -> None:
        log.append(f"first begins on {way}")
        begun()
        with baton.aside():
            assert overtaken.wait(10)
        log.append("first ends")

    def other(way: int, begun: Callable[[], None]) -> None:
        log.append(f"other on {way}")
        overtaken.set()

    lane.submit([first], torch.zeros(1), "first")
    lane.submit([other], torch.zeros(1), "other", 1)
    lane.submit([lambda *_: log.append("alone")], torch.zeros(1), "after all", 1, alone=True)
    lane.drain()
    lane.close()
    assert log == ["first begins on 0", "other on 1", "first ends", "alone"]


def test_a_job_begins_only_when_the_one_before_has() -> None:
    lane = make_lane(Streams(torch.device("cpu")), False, Baton())
    go, log = threading.Event(), []

    def slow(*_: object) -> None:  # says nothing of having begun
        assert go.wait(10)
        log.append("slow")

    lane.submit([slow], torch.zeros(1), "slow")
    lane.submit([lambda *_: log.append("quick")], torch.zeros(1), "quick", 1)
    go.set()
    lane.drain()
    lane.close()
    assert log == ["slow", "quick"]


def test_what_fails_stops_its_own_way_and_after_the_step_both() -> None:
    lane = make_lane(Streams(torch.device("cpu")), False, Baton())
    done: list[int] = []

    def fail(*_: object) -> None:
        raise ArithmeticError("put in by the test")

    for number in range(6):
        job = fail if number in (2, 3) else lambda *_, number=number: done.append(number)
        lane.submit([job], torch.zeros(1), f"job {number}", number if number < 5 else 1)
    with pytest.raises(LaneError, match="job 2: ArithmeticError"):  # the first, whichever was told first
        lane.drain()
    assert done == [0, 1]
    lane.submit([lambda *_: done.append(6)], torch.zeros(1), "job 6", 1)
    with pytest.raises(LaneError, match="job 2"):
        lane.drain()
    assert done == [0, 1]
    lane.close()

    lane = make_lane(Streams(torch.device("cpu")), False, Baton())
    lane.submit([fail], torch.zeros(1), "job 0", 0)
    lane.submit([lambda *_: done.append(7)], torch.zeros(1), "job 1", 1)  # other ranks may have begun it
    with pytest.raises(LaneError, match="job 0"):
        lane.drain()
    assert done == [0, 1, 7]
    lane.close()


def test_only_who_holds_the_baton_puts_it_aside() -> None:
    baton = Baton()
    with baton.aside():
        pass
    with baton:
        with baton.aside(), baton:
            pass
        held = threading.Event()
        other = threading.Thread(target=lambda: (baton.__enter__(), held.set(), baton.__exit__()))
        other.start()
        assert not held.wait(0.05)
    assert held.wait(10)
    other.join()


def _trained(rank: int, ranks: int, codec: str, two: bool) -> tuple[str, int, int]:
    """A hash of all means of a few steps; threads of the lane; calls of the transport."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.03)
    group = GroupTransport(dist.new_group(), torch.device("cpu"))
    state = gradcomm.register(
        ddp, codec, warmup_steps=1, min_numel=16, measure_every=2, transport=None if two else group
    )
    generator = torch.Generator().manual_seed(rank)
    means = []
    for _ in range(5):
        ddp.zero_grad()
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
        means += [p.grad.flatten() for p in ddp.parameters() if p.grad is not None]
    stats, threads = state.stats(), len(state._lane._threads)  # type: ignore[attr-defined]
    state.close()
    return digest(torch.cat([*means, torch.tensor([stats["residual_norm"]])])), threads, stats["calls"]


@pytest.mark.parametrize(
    "codec", ["none", "int4:rounding=stochastic", "onebit", "topk", "powersgd:rank=2"]
)
@pytest.mark.parametrize("world", [2, 3])
def test_two_ways_give_the_bits_of_one(ranks: Ranks, world: int, codec: str) -> None:
    one = ranks.run(_trained, world, codec, False)
    two = ranks.run(_trained, world, codec, True)
    assert {t for _, t, _ in one} == {1} and {t for _, t, _ in two} == {2}
    assert [(bits, calls) for bits, _, calls in one] == [(bits, calls) for bits, _, calls in two]


def test_a_forked_process_is_told_that_it_has_no_lane() -> None:
    lane = ThreadLane(Streams(torch.device("cpu")))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lane.submit([lambda *_: None], torch.zeros(1), "step 0, bucket 0")
            os.write(write, b"it went through")
        except LaneError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(child, 0)
    assert "step 0, bucket 0" in said and "forked" in said
    lane.close()


def test_a_transport_that_enqueues_needs_no_thread() -> None:
    before = threading.active_count()
    assert isinstance(make_lane(Streams(torch.device("cpu")), True), StreamLane)
    assert threading.active_count() == before
