"""Gather: every rank's payload to every rank, which decodes the mean of all in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomm.codec.base import RecordCodec, Turn
from gradcomm.part import Part
from gradcomm.stats import Clock
from gradcomm.transport import Transport


def gather(part: Part, bucket: Tensor, turn: Turn, transport: Transport, clock: Clock) -> None:
    codec = part.codec
    assert isinstance(codec, RecordCodec)
    size = codec.chunk_bytes(part.chunk_blocks(1), turn.step)
    payloads = turn.scratch.get("gathered", (turn.ranks, 1, size), torch.uint8, bucket.device)
    mine = payloads[turn.rank]
    with clock("encode"):
        codec.encode(part, bucket, mine, turn)
    with clock("wire"):
        transport.all_gather(payloads)
    with clock("decode"):
        codec.decode_mean(part, payloads, bucket, turn)
