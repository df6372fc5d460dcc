"""One of several ranks on each host, which tests/test_links.py starts: trains by the hierarchy and by
the shard exchange, and answers what it found and sent."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from bench import namespaces
from tests.models import train

RANKS, STEPS = 4, 5


def run(rank: int, exchange: str) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)))
    state = gradcomm.register(ddp, "int8", exchange=exchange)
    train(ddp, rank, 1, inputs=256)  # connects
    before = _sent(state)
    digest, loss = train(ddp, rank, STEPS, inputs=256)
    # Before anybody sends anything else:
    sent = {name: value - before[name] for name, value in _sent(state).items()}
    hosts = getattr(state._runners[0].transport, "hosts", None)
    state.close()
    return {"digest": digest, "loss": loss, "hosts": hosts, **sent}


def _sent(state: gradcomm.CommState) -> dict[str, int]:
    """Bytes so far: by this rank's host; by this rank; of these to other hosts, by hierarchy."""
    dist.barrier()
    host = namespaces.bytes_sent()
    dist.barrier()
    assert host is not None
    between = [runner.transport.cross.traffic.sent for runner in state._runners
               if hasattr(runner.transport, "cross")]  # fmt: skip
    return {"host": host, "rank": state.stats()["bytes_sent"], "between": sum(between)}


def main() -> None:
    parser = argparse.ArgumentParser()
    namespaces.add_rank_arguments(parser)
    arguments = parser.parse_args()
    namespaces.init_rank(arguments, RANKS)
    answers = {how: run(arguments.rank, how) for how in ("hierarchy", "shard")}
    namespaces.answer(arguments, answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
