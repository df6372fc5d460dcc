"""Real ranks for tests: processes that stay up and run one function after another over Gloo.

Starting a process costs seconds, most of them for importing torch, so the same ones serve all tests.
A function that hangs fails its test with the stack of every rank, and the processes are replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

MAX_RANKS = 4


class RankError(AssertionError):
    """A rank raised; the message holds its traceback. ``errors``: by rank, (type name, message)."""

    def __init__(self, message: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


class Ranks:
    """``run(function, ranks, …)`` calls ``function(rank, ranks, …)`` on that many processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradcomm-ranks-")
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._count = 0
        # Where the ranks meet: on a port that the system picks.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self, function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[Any]:
        """The ranks' results. ``function`` must be importable (a module's, not a closure). A default
        process group over Gloo is there when it is called, and is destroyed after it."""
        self._count += 1
        store = (self._store.port, f"run-{self._count}")
        workers = self._up(ranks)
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, rank, ranks, store, args, kwargs))
        replies: dict[int, Any] = {}
        end = time.monotonic() + timeout
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pipe.recv()
                except EOFError:
                    replies[rank] = ("error", "EOFError", "the process died", "")
        failed = {r: reply for r, reply in replies.items() if reply[0] == "error"}
        if waiting or any(reply[1] == "EOFError" for reply in failed.values()):
            stacks = self._stacks() if waiting else ""
            self.close()
            self.__init__()  # type: ignore[misc]
            if waiting and not failed:
                raise TimeoutError(f"ranks {sorted(waiting.values())} hang after {timeout} s\n{stacks}")
        if failed:
            text = "\n".join(f"rank {r}: {reply[3] or reply[2]}" for r, reply in sorted(failed.items()))
            raise RankError(text, {r: (reply[1], reply[2]) for r, reply in failed.items()})
        return [replies[rank][1] for rank in range(ranks)]

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []
        self._folder.cleanup()

    def _up(self, ranks: int) -> list[tuple[multiprocessing.process.BaseProcess, Connection]]:
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < ranks:
            ours, theirs = context.Pipe()
            log = self._log(len(self._workers))
            process = context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers[:ranks]

    def _log(self, worker: int) -> pathlib.Path:
        return pathlib.Path(self._folder.name) / f"stacks-{worker}"

    def _stacks(self) -> str:
        for process, _ in self._workers:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        logs = (self._log(i) for i in range(len(self._workers)))
        return "\n".join(f"rank {i}:\n{p.read_text()}" for i, p in enumerate(logs) if p.exists())


def _serve(pipe: Connection, log: str) -> None:
    torch.set_num_threads(1)
    with open(log, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                function, rank, ranks, store, args, kwargs = pipe.recv()
            except EOFError:
                return
            try:
                patience = timedelta(seconds=60)
                shared = dist.TCPStore("127.0.0.1", store[0], is_master=False, timeout=patience)
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(store[1], shared),
                    timeout=patience,
                    world_size=ranks,
                    rank=rank,
                )
                try:
                    result = function(rank, ranks, *args, **kwargs)
                finally:
                    dist.destroy_process_group()
                pipe.send(("ok", result))
            except BaseException as error:
                pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
            # DDP models lie in cycles; large ones would pile up, since few objects hold them.
            result = function = None
            gc.collect()
