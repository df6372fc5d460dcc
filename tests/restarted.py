"""A training script for torchrun that saves every second step, goes on from there, and dies once.

restarted.py FOLDER CODEC STEP_TO_DIE_IN
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
    # Ranks may die with one file more than others: only a step that all have saved counts.
    saved = [set(int(p.suffix[1:]) for p in folder.glob(f"rank{r}.*")) for r in range(ranks)]
    if common := set.intersection(*saved):
        first = max(common)
        found = torch.load(folder / f"rank{rank}.{first}")
        model.load_state_dict(found["model"])
        state.load_state_dict(found["gradcomm"])
        (folder / "restarted").write_text(f"from step {first}")
    for step in range(first, 10):
        if step == die and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        if step % 2:
            contents = {"model": model.state_dict(), "gradcomm": state.state_dict()}
            torch.save(contents, folder / f"rank{rank}.{step + 1}")
    state.close()
    return digest(torch.cat([p.detach().flatten() for p in model.parameters()]))


def main() -> None:
    torch.set_num_threads(1)
    world = gradcomm.launch.init("gloo")
    folder = pathlib.Path(sys.argv[1])
    end = run(world.rank, world.world_size, folder, sys.argv[2], int(sys.argv[3]))
    (folder / f"end-{world.rank}").write_text(end)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
