"""Starts ranks on this machine and listens to them; whatever happens, none is left behind."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pathlib
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

#: A rank that waits longer than this for another gives up.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


def run(
    work: Callable[..., None], ranks: int, *args: Any, silence: float = 120.0
) -> Iterator[tuple[Any, ...]]:
    """Calls ``work(rank, tell, *args)`` on ``ranks`` processes with a default process group over Gloo
    and one thread each; yields what they ``tell(*event)``, as it comes.

    ``work`` must be importable. Raises RankError when a rank raises, dies, or when none has told
    anything for ``silence`` seconds. All processes have ended when this generator is closed.
    """
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    with tempfile.TemporaryDirectory(prefix="gradcomm-") as folder:
        # A file in place of a TCP port: nothing to choose, nothing that another program could take.
        store = str(pathlib.Path(folder) / "store")
        processes = [
            context.Process(target=_rank, args=(work, rank, ranks, store, events, args), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            yield from _listen(processes, events, silence)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            events.close()


def _listen(processes: list[Any], events: Any, silence: float) -> Iterator[tuple[Any, ...]]:
    finished = 0
    heard = time.monotonic()
    while finished < len(processes):
        # Looked at before the queue: what a rank that has ended told is in the queue by then.
        dead = [(i, p.exitcode) for i, p in enumerate(processes) if p.exitcode]
        try:
            event = events.get(timeout=0.5)
        except queue.Empty:
            if dead:
                raise RankError(f"rank {dead[0][0]} died (exit code {dead[0][1]})") from None
            if time.monotonic() - heard > silence:
                raise RankError(f"no rank has made progress for {silence:.0f} s") from None
            continue
        heard = time.monotonic()
        if event[0] == "failed":
            raise RankError(f"rank {event[1]} failed\n{event[2]}")
        if event[0] == "finished":
            finished += 1
        else:
            yield event


def _rank(
    work: Callable[..., None], rank: int, ranks: int, store: str, events: Any, args: tuple[Any, ...]
) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{store}", COLLECTIVE_TIMEOUT, world_size=ranks, rank=rank
        )
        work(rank, lambda *event: events.put(event), *args)
        dist.barrier()
        events.put(("finished", rank))
    except BaseException:
        events.put(("failed", rank, traceback.format_exc()))
        # Waits to be ended: leaving now would break the others' connections, and their errors would
        # hide the cause.
        time.sleep(10)
    events.close()
    events.join_thread()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
