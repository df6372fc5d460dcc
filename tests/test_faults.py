"""A rank that fails ends the others within the timeout; the error says where, and nothing is left."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from bench import faults, namespaces
from bench.namespaces import Link

from . import restarted
from .models import small_model, train
from .ranks import Ranks

TIMEOUT = 5.0
ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("fault", [f for f in faults.FAULTS if f != "loss"])
def test_the_others_end_in_time_and_say_where(fault: str) -> None:
    if fault in faults.LOSSY and (why := namespaces.missing(Link())):
        pytest.skip(why)
    *others, failed = faults.run(fault, ranks=3 if fault == "kill" else 2, timeout=TIMEOUT)
    for outcome in others:
        assert outcome.error == "LaneError"
        assert f"step {outcome.step}, bucket " in outcome.message
        assert "wire of onebit by" in outcome.message or "wire of none by" in outcome.message
        assert outcome.seconds < TIMEOUT + 3
        assert outcome.intact and outcome.threads == 0
        assert outcome.exit_code == 1 and outcome.gone < TIMEOUT + 5
    if fault == "out of memory":
        assert "encode of onebit" in failed.message and "MemoryError" in failed.message
    if fault == "interrupt":
        assert failed.error == "KeyboardInterrupt" and failed.exit_code == 1
    assert failed.intact


def test_a_lossy_link_only_costs_time() -> None:
    if why := namespaces.missing(Link(loss=0.01)):
        pytest.skip(why)
    for outcome in faults.run("loss", ranks=2, timeout=30):
        assert outcome.error == "" and outcome.exit_code == 0


class Corrupting:
    """A transport that flips a bit of the ``at``-th payload that this rank receives from rank 0."""

    def __init__(self, inner: Any, at: int) -> None:
        self._inner, self._left = inner, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, rows: Tensor) -> None:
        self._inner.all_gather(rows)
        self._flip(rows)

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        self._inner.all_to_all(out, rows)
        self._flip(out)

    def _flip(self, rows: Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            rows[0].view(-1)[3] ^= 4


def _corrupted(rank: int, ranks: int, exchange: str, at: int) -> str:
    ddp = DDP(small_model())
    state = gradcomm.register(ddp, "int4", exchange=exchange, warmup_steps=0, min_numel=100, verify=True)
    if rank == 1:
        checked = state._runner.transport
        checked._inner = Corrupting(checked._inner, at)  # type: ignore[attr-defined]
    try:
        train(ddp, rank, steps=3)
    except gradcomm.LaneError as error:
        return str(error)
    finally:
        state.close()
    return ""


@pytest.mark.parametrize(
    ("exchange", "at", "step"), [("gather", 2, 1), ("shard", 1, 0), ("shard", 2, 0), ("shard", 5, 2)]
)
def test_a_corrupted_wire_is_found(ranks: Ranks, exchange: str, at: int, step: int) -> None:
    for message in ranks.run(_corrupted, 2, exchange, at):
        assert f"step {step}, bucket 0" in message and f"wire of quantize by {exchange}" in message
        assert "payloads arrived changed: rank 0 to rank 1" in message


def _join_fails(rank: int, ranks: int) -> str:
    """Rank 0 runs out of data, and fails in an exchange that it only shadows."""
    ddp = DDP(small_model(), process_group=dist.new_group(timeout=timedelta(seconds=3)))
    state = gradcomm.register(ddp, "onebit", warmup_steps=0, min_numel=100)
    try:
        with ddp.join():
            for step in range(1 + rank):
                ddp(torch.ones(2, 40)).square().mean().backward()
                if rank == 0 and step == 0:
                    state._memory.flat = None  # type: ignore[assignment,method-assign]
    except gradcomm.LaneError as error:
        return str(error)
    finally:
        state.close()
    return ""


def test_an_error_while_joined_is_told(ranks: Ranks) -> None:
    # The other rank waits for the one that failed, as it would for one that has died.
    first, second = ranks.run(_join_fails, 2)
    assert "encode of onebit" in first and "wire of onebit" in second


def test_torchrun_restarts_from_the_checkpoint(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """Killed in step 5 and restarted: the end is that of a run in which nothing happened."""
    (tmp_path / "through").mkdir()
    through = ranks.run(restarted.run, 2, tmp_path / "through", "onebit")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.2", restarted.__file__]
    command += [str(tmp_path), "onebit", "5"]
    with _torchrun(command) as torchrun:
        try:
            _, errors = torchrun.communicate(timeout=90)
        finally:
            torchrun.terminate()  # and not kill: it would leave its ranks
    assert torchrun.returncode == 0, errors[-3000:]
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == through
    assert (tmp_path / "restarted").read_text() == "from step 4 of 2 ranks by 2"


def test_torchrun_goes_on_with_the_nodes_that_are_left(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """Of two nodes one is gone in step 5: the other goes on alone from both ranks' checkpoint, to where
    one rank comes that loads it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=nodes"]
    command += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"]
    command += ["--max-restarts=3", "--monitor-interval=0.2", restarted.__file__]
    command += [str(tmp_path), "onebit", "5"]
    with _torchrun(command, NODE_DIES="0") as stays:
        try:
            _wait_for(port)  # who comes first hosts the rendezvous
            with _torchrun(command, NODE_DIES="1") as goes:
                try:
                    _, errors = stays.communicate(timeout=90)
                    assert goes.wait(10) == -signal.SIGKILL
                finally:
                    goes.terminate()
        finally:
            stays.terminate()
    assert stays.returncode == 0, errors[-3000:]
    assert (tmp_path / "restarted").read_text() == "from step 4 of 2 ranks by 1"
    (tmp_path / "alone").mkdir()
    for rank in range(2):
        shutil.copy(tmp_path / f"4.of2.rank{rank}", tmp_path / "alone")
    (alone,) = ranks.run(restarted.run, 1, tmp_path / "alone", "onebit")
    assert (tmp_path / "end-0").read_text() == alone


def _torchrun(command: list[str], **environ: str) -> subprocess.Popen[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environ
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environ, **pipes)


def _wait_for(port: int) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
