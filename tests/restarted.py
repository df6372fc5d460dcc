"""A training script for torchrun that saves every second step, goes on from there, and dies once.

restarted.py FOLDER CODEC STEP_TO_DIE_IN

Who dies: rank 1; or, where the variable NODE_DIES is set, rank and agent of the node where it is "1".
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.verify import digest
from tests.models import small_model


def run(rank: int, ranks: int, folder: pathlib.Path, codec: str, die: int = -1) -> str:
    """Hash of the parameters after ten steps."""
    model = small_model()
    ddp = DDP(model)
    state = gradcomm.register(ddp, codec, warmup_steps=1, min_numel=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    first = 0
    if found := _newest(folder):
        first, files = found
        saved = [torch.load(file) for file in files]
        mine = saved[rank] if len(saved) == ranks else saved[0]
        model.load_state_dict(mine["model"])
        state.load_state_dict(
            mine["gradcomm"] if len(saved) == ranks else [s["gradcomm"] for s in saved]
        )
        (folder / "restarted").write_text(f"from step {first} of {len(saved)} ranks by {ranks}")
    for step in range(first, 10):
        if step == die and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            _die(rank)
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        if step % 2:
            contents = {"model": model.state_dict(), "gradcomm": state.state_dict()}
            torch.save(contents, folder / f"{step + 1}.of{ranks}.rank{rank}")
    state.close()
    return digest(torch.cat([p.detach().flatten() for p in model.parameters()]))


def _newest(folder: pathlib.Path) -> tuple[int, list[pathlib.Path]] | None:
    """The last step that all ranks saved, and their files: some die with one file more than others."""
    complete: dict[int, list[pathlib.Path]] = {}
    for first in folder.glob("*.of*.rank0"):
        step, of, _ = first.name.split(".")
        files = [folder / f"{step}.{of}.rank{r}" for r in range(int(of.removeprefix("of")))]
        if all(f.exists() for f in files):
            complete[int(step)] = files
    return max(complete.items(), default=None)


def _die(rank: int) -> None:
    node = os.environ.get("NODE_DIES")
    if node == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    if node == "1" or (node is None and rank == 1):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    world = gradcomm.launch.init("gloo")
    folder = pathlib.Path(sys.argv[1])
    end = run(world.rank, world.world_size, folder, sys.argv[2], int(sys.argv[3]))
    (folder / f"end-{world.rank}").write_text(end)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
