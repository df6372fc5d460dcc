"""Each bucket of a backward: what it is exchanged as, and when."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradcomm import checkpoint, checks
from gradcomm.buckets import BucketKey
from gradcomm.replay import Replay, regroup
from gradcomm.resume import Resumable


class Backward(Resumable):
    """The part of ``CommState`` that hands buckets to the lane."""

    def bind(self, named: list[tuple[str, Tensor]], complete: bool, find_unused: bool = True) -> None:
        raise NotImplementedError

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hands a bucket to the lane; the future completes with its mean over ranks, in place."""
        buffer, params = bucket.buffer(), bucket.parameters()
        if not self._bound:
            self.bind([(f"parameter {i}", p) for i, p in enumerate(params)], False)
        checks.bucket_device(buffer.device, self._memory.device)
        self._follow_group()
        keys = tuple(self._buckets.add(p).key for p in params)
        self._begin(keys)
        what = f"bucket {bucket.index()}"
        if self._pending is not None and self._replay is None:
            saved = checkpoint.read(self._pending[0], self._transport.rank, self._transport.size)
            self._replay = Replay(len(saved.body["parameters"]))
        if self._replay is None or self._graph_task == -1:
            return self._submit(keys, buffer, what)
        numels = [p.numel() for p in params]
        future = self._replay.hold(keys, numels, buffer)
        if self._replay.complete:
            self._release()
        return future

    def _submit(self, keys: BucketKey, buffer: Tensor, what: str) -> torch.futures.Future[Tensor]:
        if not self._agreed:
            self._compare()
        step = self._step
        spend = step == self._flush_at
        warm = spend or step < self.warmup_steps
        overlap = len(self._runners) > 1 and self.codec.in_pieces
        pieces = self._buckets.cut(keys, buffer) if overlap else [(keys, buffer)]
        stale = [old for cut, _ in pieces for old in self._buckets.stale(cut, warm)]
        # What runs in the lane may still write to the old layout.
        with self._lane.between() if stale or spend else contextlib.nullcontext():
            if self._runner.clip is not None:
                for old in set(stale) - {cut for cut, _ in pieces}:
                    self._runner.clip.forget(old)
            if spend:
                self._memory.settle()
            parts = [self._buckets.parts(*piece, warm, spend) for piece in pieces]
        spent = self.codec if spend else None
        runners = self._runners

        def job(i: int, way: int, begun: Callable[[], None]) -> None:
            runners[way].run(parts[i], *pieces[i], step, spent, begun)

        jobs = [functools.partial(job, i) for i in range(len(pieces))]
        future = self._lane.submit(jobs, buffer, f"step {step}, {what}", self._turn)
        self._turn += len(jobs)
        if self._graph_task == -1:
            self._lane.drain()  # no backward (DDP.join): nobody asks later whether it failed
        return future

    def _release(self) -> None:
        """Exchanges the buckets that were held for the replay."""
        assert self._replay is not None
        held = self._replay.held
        if self._take_pending(self._seen):  # may bring a layout to follow
            self._begin_step()
        layout, self._replay, self._layout = self._layout, None, []
        buckets = regroup(held, layout)
        if self._runner.clip is not None:
            for keys in set(layout) - {keys for keys, _ in buckets}:
                self._runner.clip.forget(keys)
        for i, (keys, buffer) in enumerate(buckets):
            self._submit(keys, buffer, f"bucket {i} of the checkpoint")
        for h in held:
            done = self._lane.submit([h.fill], h.buffer, f"step {self._step}, copying back", alone=True)
            done.add_done_callback(h.complete)

    def _begin(self, keys: tuple[int, ...]) -> None:
        """A parameter that comes a second time begins a new step. Buckets' indices would not do: with
        ``static_graph`` they are all 0 in the first step."""
        if not self._seen.isdisjoint(keys):
            self._step += 1
            self._seen.clear()
        new = not self._seen
        self._seen.update(keys)
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if task != -1:
                # Runs in the thread that called backward, before DDP's own: raises there what the
                # lane ran into, with its traceback.
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if new:
            self._begin_step()

    def _finish(self) -> None:
        if self._replay is not None and self._replay.held:
            self._release()  # not all of the checkpoint's parameters came
        self._graph_task = -1
        with self._runner.meter.wait():
            self._lane.drain()
