"""What stands around or inside of a DDP model: other dtypes, torch.compile, checkpointing, copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradcomm

from .models import small_model, train
from .ranks import Ranks


class Kinds(nn.Module):
    """Parameters that no codec has a kernel for, beside one that is compressed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wave = nn.Parameter(torch.randn(50, 50, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(50, 50, dtype=torch.float64))
        self.table = nn.Embedding(60, 50, sparse=True)
        self.layer = nn.Linear(50, 50)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.layer(self.table(rows)) @ (self.wave @ self.wave.conj().T).abs()
        return (x.double() @ self.wide).square().mean()


def _kinds(rank: int, ranks: int, codec: str) -> list[str]:
    """Names of the parameters whose gradients are not those of DDP, bit for bit, in the first step."""
    gradients = []
    for hooked in (False, True):
        ddp = DDP(Kinds())
        state = None
        if hooked:
            state = gradcomm.register(ddp, codec, warmup_steps=0, min_numel=100, clip_norm=None)
        rows = torch.randint(0, 60, (5,), generator=torch.Generator().manual_seed(rank))
        ddp(rows).backward()
        dense = {n: p.grad.to_dense() for n, p in ddp.module.named_parameters() if p.grad is not None}
        gradients.append(dense)
        if state is not None:
            sent = state.stats()["elements_by_codec"]
            assert sent[state.codec.name] == 2500 and sent["none"] > 5050
            state.close()
    plain, mine = gradients
    return [n for n in plain if not torch.equal(plain[n], mine[n])]


@pytest.mark.parametrize("codec", ["int4", "topk:density=0.1", "powersgd:rank=1,start_step=0"])
def test_what_has_no_kernel_is_exact(ranks: Ranks, codec: str) -> None:
    assert ranks.run(_kinds, 2, codec) == [["layer.weight"]] * 2


def _mixed(rank: int, ranks: int) -> str:
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = DDP(small_model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    try:
        gradcomm.register(ddp, "onebit")
    except ValueError as error:
        return str(error)
    return ""


def test_mixed_precision_of_ddp_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(_mixed, 2):
        assert "mixed_precision=" in message and "torch.autocast" in message


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self._reentrant = small_model(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self._reentrant is None:
            return self.inner(x)
        x.requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self._reentrant)


def _same_training(rank: int, ranks: int, case: str, codec: str) -> tuple[str, str, int]:
    """Hashes of the parameters, plain module and changed module, and steps that the state has seen."""
    options: dict[str, Any] = {"static_graph": True} if case == "reentrant" else {}
    hashes, steps = [], 0
    for changed in (False, True):
        torch._dynamo.reset()
        module: nn.Module = small_model()
        if "checkpoint" in case or case == "reentrant":
            module = Checkpointed((case == "reentrant") if changed else None)
        if case == "compiled inside" and changed:
            module = torch.compile(module, backend="aot_eager")
        # Compiled outside, DDP's graph is split at its buckets, of which dynamo asks a size in order.
        cap = 25 if "compiled" in case else 0.03
        ddp: Any = DDP(module, bucket_cap_mb=cap, **options)
        if case == "compiled outside" and changed:
            ddp = torch.compile(ddp, backend="aot_eager")
        state = gradcomm.register(ddp, codec, warmup_steps=1, min_numel=100)
        if case == "compiled later" and changed:
            ddp = torch.compile(ddp, backend="aot_eager")
        hashes.append(train(ddp, rank)[0])
        steps = state.step
        state.close()
    return hashes[0], hashes[1], steps


@pytest.mark.parametrize(
    "case", ["checkpoint", "reentrant", "compiled inside", "compiled outside", "compiled later"]
)
def test_the_same_training(ranks: Ranks, case: str) -> None:
    results = ranks.run(_same_training, 2, case, "int4")
    assert len({h for plain, changed, _ in results for h in (plain, changed)}) == 1
    assert all(steps == 6 for _, _, steps in results)


def _python_reducer(rank: int, ranks: int) -> str:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        gradcomm.register(DDP(small_model()), "onebit")
    except ValueError as error:
        return str(error)
    finally:
        torch._dynamo.config.optimize_ddp = before
    return ""


def test_the_python_reducer_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(_python_reducer, 2):
        assert "python_reducer" in message and "optimize_ddp" in message
