"""Shard: a parameter server of which every rank serves one chunk.

The bucket's blocks are cut into as many equal chunks as there are ranks. Each rank sends each owner
that owner's chunk; the owner decodes and averages them, adds its own residual, encodes once more;
everyone gathers the encoded means. Each rank sends 2 (P - 1) / P payloads, however many ranks there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomm.codec.base import RecordCodec, Turn
from gradcomm.part import Part
from gradcomm.stats import Clock
from gradcomm.transport import Transport


def shard(part: Part, bucket: Tensor, turn: Turn, transport: Transport, clock: Clock) -> None:
    codec = part.codec
    assert isinstance(codec, RecordCodec)
    means = encoded_mean(part, bucket, turn, transport, clock)
    with clock("decode"):
        # One sender, as many chunks as owners: everyone, the owner too, decodes the same bytes.
        codec.decode_mean(part, means.unsqueeze(0), bucket, turn)


def encoded_mean(part: Part, bucket: Tensor, turn: Turn, transport: Transport, clock: Clock) -> Tensor:
    """The mean over ranks as its owners encoded it: uint8 ``[ranks, chunk bytes]``, the same on every
    rank."""
    codec = part.codec
    assert isinstance(codec, RecordCodec)
    ranks = turn.ranks
    size = codec.chunk_bytes(part.chunk_blocks(ranks), turn.step)
    chunks = turn.scratch.get("chunks", (ranks, size), torch.uint8, bucket.device)
    owned = turn.scratch.get("owned", (ranks, 1, size), torch.uint8, bucket.device)
    means = turn.scratch.get("gathered", (ranks, 1, size), torch.uint8, bucket.device)
    with clock("encode"):
        codec.encode(part, bucket, chunks, turn)
    with clock("wire"):
        transport.all_to_all(owned, chunks)
    with clock("encode"):
        codec.reduce_encode(part, owned, means[turn.rank, 0], turn)
    with clock("wire"):
        transport.all_gather(means)
    return means.view(ranks, size)
