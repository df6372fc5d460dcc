"""Reduce: payloads that may be summed travel by all-reduce."""

from __future__ import annotations

from torch import Tensor

from gradcomm.codec.base import Turn
from gradcomm.part import Part
from gradcomm.stats import Clock
from gradcomm.transport import Transport


def reduce(part: Part, bucket: Tensor, turn: Turn, transport: Transport, clock: Clock) -> None:
    rounds = part.codec.rounds(part, bucket, turn)
    phase = "encode"
    while True:
        with clock(phase):
            payload = next(rounds, None)
        if payload is None:
            return
        with clock("wire"):
            transport.all_reduce(payload)
        phase = "decode"
