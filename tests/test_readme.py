"""The README's Python runs as it stands, on two ranks."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .ranks import Ranks

README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def _run(rank: int, ranks: int, source: str, folder: str) -> str:
    os.chdir(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DDP(model)
    names = {
        "torch": torch,
        "model": model,
        "ddp": ddp,
        "rank": rank,
        "inputs": torch.randn(4, 64),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    if "state" in source and "state =" not in source:
        import gradcomm

        names["state"] = gradcomm.register(ddp, "onebit", warmup_steps=0)
        ddp(torch.randn(4, 64)).sum().backward()
    exec(compile(source, "README.md", "exec"), names)
    names["state"].close()  # type: ignore[attr-defined]
    return "done"


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block(ranks: Ranks, index: int, tmp_path: pathlib.Path) -> None:
    assert ranks.run(_run, 2, BLOCKS[index], str(tmp_path)) == ["done", "done"]


def test_there_are_blocks_and_one_trains_torchs_way() -> None:
    assert any("register_comm_hook" in b and "backward" in b for b in BLOCKS)
    assert any("gradcomm.register(" in b for b in BLOCKS)
