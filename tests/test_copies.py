"""States and models are copied, pickled, and several in one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm

from .ranks import Ranks
from .test_checkpoint import OPTIONS, bits, steps, wrapped


def _copied(rank: int, ranks: int, how: str) -> tuple[str, str]:
    """The end's bits of a model that trained through, and of its copy from step 4 on."""
    ddp = wrapped()
    state = gradcomm.register(ddp, "onebit", plain=[ddp.module[0].weight], exchange="shard", **OPTIONS)
    steps(ddp, rank, 0, 4)
    if how == "deepcopy":
        twin = copy.deepcopy(ddp)  # of a model with the hook in place
        again = copy.deepcopy(state)
    else:
        twin = pickle.loads(pickle.dumps(ddp))
        again = pickle.loads(pickle.dumps(state))
    steps(ddp, rank, 4, 7)
    state.close()
    with pytest.raises(ValueError, match="is in use, at step 7"):
        gradcomm.register(twin, state)
    with pytest.raises(ValueError, match="belong to the CommState"):
        gradcomm.register(twin, again, seed=3)
    assert gradcomm.register(twin, again) is again
    assert again.step == 4
    steps(twin, rank, 4, 7)
    assert again.stats()["sent_by_codec"]["onebit"] > 0
    again.close()
    return bits(ddp), bits(twin)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_as_its_original(ranks: Ranks, how: str) -> None:
    for through, again in ranks.run(_copied, 2, how):
        assert through == again


def test_an_unused_state_is_copied_with_its_options() -> None:
    state = gradcomm.CommState(
        {0: "none", 5: "topk:density=0.1"}, seed=3, clip_norm=1.0, plain=["*.bias"]
    )
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin._wanted == state._wanted
        assert twin.clip_norm == 1.0 and twin.seed == 3 and twin.codec == state.codec


def _several(rank: int, ranks: int) -> list[list[str]]:
    """The end's bits of three models: each alone; step by step in turn; in one backward."""
    codecs = ["onebit", "topk:density=0.1", "powersgd:rank=2"]

    def make() -> tuple[list[DDP], list[Any]]:
        models = [wrapped() for _ in codecs]
        return models, [gradcomm.register(m, c, **OPTIONS) for m, c in zip(models, codecs, strict=True)]

    ends = []
    for way in ("alone", "in turn", "in one"):
        models, states = make()
        if way == "alone":
            for m in models:
                steps(m, rank, 0, 5)
        elif way == "in turn":
            for step in range(5):
                for m in models:
                    steps(m, rank, step, step + 1)
        else:
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
            for step in range(5):
                x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1000 * rank + step))
                for o in optimizers:
                    o.zero_grad()
                sum((m(x) - x.roll(1, 1)).square().mean() for m in models).backward()  # type: ignore[union-attr]
                for o in optimizers:
                    o.step()
        assert [s.step for s in states] == [5, 5, 5]
        for s in states:
            s.close()
        ends.append([bits(m) for m in models])
    return ends


def test_several_models_over_one_group_do_not_mix(ranks: Ranks) -> None:
    for alone, in_turn, in_one in ranks.run(_several, 2):
        assert alone == in_turn == in_one and len(set(alone)) == 3
