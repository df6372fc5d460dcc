"""Bytes measured equal the formulas, to the byte, for every codec, exchange and number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomm
from gradcomm.codec import PowerSGD, RecordCodec, parse

from .ranks import Ranks

SHAPES = [(70, 130), (257, 64), (31, 33), (1000, 3)]  # none a multiple of anything


def _measure(rank: int, ranks: int, codec: str, exchange: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Module()
    for i, shape in enumerate(SHAPES):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
    model.forward = lambda x: sum((p * x).sum() for p in model.parameters())  # type: ignore[method-assign]
    ddp = DDP(model)
    state = gradcomm.register(ddp, codec, warmup_steps=0, min_numel=0, clip_norm=None, exchange=exchange)
    for _ in range(3):
        ddp(torch.ones(())).backward()
    stats = state.stats()
    state.close()
    return stats


def _record_bytes(codec: RecordCodec, exchange: str, ranks: int) -> int:
    """w N (P - 1) for gather, 2 w N (P - 1) / P for shard, w N in whole blocks, padded to P chunks."""
    block = codec.block
    blocks = sum(-(-torch.Size(s).numel() // block) for s in SHAPES)
    if exchange == "gather":
        return codec.chunk_bytes(blocks, 10**6) * (ranks - 1)
    return 2 * codec.chunk_bytes(-(-blocks // ranks), 10**6) * (ranks - 1)


def _all_reduce_bytes(payload: int, ranks: int) -> int:
    return 2 * payload * (ranks - 1) // ranks


RECORDS = [
    ("fp16", 2.0),
    ("bf16", 2.0),
    ("int8", 1 + 4 / 512),
    ("int8:scheme=minmax", 1 + 8 / 512),
    ("int4", 0.5 + 4 / 512),
    ("int2:block=64", 0.25 + 4 / 64),
    ("twobit:refresh=0,normalize=False", 1 / 4 + 4 / 512),
    ("onebit", 1 / 8 + 4 / 512),
    ("onebit:block=128", 1 / 8 + 4 / 128),
    ("topk:density=0.01,ramp_steps=0", 5 / 100),
    ("topk:density=0.01,values=float16,ramp_steps=0", 3 / 100),
    ("topk:k=3,rows=300,ramp_steps=0", 3 * (4 + 2) / 300),
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("exchange", ["gather", "shard"])
@pytest.mark.parametrize("codec", [name for name, _ in RECORDS])
def test_records(ranks: Ranks, codec: str, exchange: str, world: int) -> None:
    made = parse(codec)
    assert isinstance(made, RecordCodec)
    for stats in ranks.run(_measure, world, codec, exchange):
        assert stats["bytes_sent"] == 3 * _record_bytes(made, exchange, world)
        assert stats["bytes_received"] == stats["bytes_sent"]


@pytest.mark.parametrize(("codec", "width"), RECORDS)
def test_bytes_an_element(codec: str, width: float) -> None:
    made = parse(codec)
    assert isinstance(made, RecordCodec)
    numel = made.block * 1000
    assert made.payload_bytes(numel) == pytest.approx(width * numel)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_reduced(ranks: Ranks, world: int) -> None:
    numel = sum(torch.Size(s).numel() for s in SHAPES)
    plain = _all_reduce_bytes(4 * numel, world)
    powersgd = PowerSGD(rank=2)
    taken = [torch.Size(s) for s in SHAPES if powersgd.takes(torch.Size(s), torch.float32)]
    assert len(taken) == 3
    p = sum(2 * s[0] for s in taken)
    q = sum(2 * s[1] for s in taken)
    rest = numel - sum(s.numel() for s in taken)
    for stats in ranks.run(_measure, world, "none", None):
        assert stats["bytes_sent"] == 3 * plain
        assert abs(stats["bytes_plain"] - stats["bytes_sent"]) <= 3
    for stats in ranks.run(_measure, world, "powersgd:rank=2,start_step=0", None):
        expected = sum(_all_reduce_bytes(4 * n, world) for n in (p, q, rest))
        assert stats["bytes_sent"] == 3 * expected
        assert stats["sent_by_codec"]["powersgd"] < stats["bytes_plain"]
    for stats in ranks.run(_measure, world, "fp16", "reduce"):
        blocks = sum(-(-torch.Size(s).numel() // 64) for s in SHAPES)
        assert stats["bytes_sent"] == 3 * _all_reduce_bytes(2 * 64 * blocks, world)
