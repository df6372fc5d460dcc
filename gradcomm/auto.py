"""Choosing a codec by a short measurement on the network that will carry it."""

from __future__ import annotations

import statistics
import time

import torch

from gradcomm.codec import Cast, Codec, Dense, Quantize
from gradcomm.codec.base import Scratch, Turn
from gradcomm.exchange import EXCHANGES, choose
from gradcomm.memory import Memory
from gradcomm.part import Part, Slice
from gradcomm.stats import Meter, Traffic
from gradcomm.streams import Streams
from gradcomm.transport import Transport

CANDIDATES: tuple[Codec, ...] = (Dense(), Cast(), Quantize(bits=8))


def fastest(
    transport: Transport, device: torch.device, numel: int = 1 << 20, repeats: int = 5
) -> tuple[Codec, dict[str, float]]:
    """The candidate with the shortest median exchange of ``numel`` float32, and the medians in
    milliseconds by codec. Collective; rank 0's clock decides, so that all ranks choose alike."""
    bucket, streams = torch.zeros(numel, device=device), Streams(device)
    shape = torch.Size([numel])
    times: dict[Codec, list[float]] = {codec: [] for codec in CANDIDATES}
    uncounted, transport.traffic = transport.traffic, Traffic()
    memory, scratch, meter = Memory(transport.size, device), Scratch(), Meter()
    for _ in range(repeats + 1):  # the first is for buffers and connections
        for codec in CANDIDATES:
            exchange = choose(codec, transport.size, None)
            part = Part(codec, exchange, [Slice(0, 0, numel, shape, (1,), True)], whole=True)
            turn = Turn(0, 0, None, transport.size, transport.rank, memory, False, scratch)
            transport.all_gather_object(None)  # ranks begin together
            start = time.perf_counter()
            EXCHANGES[exchange](part, bucket, turn, transport, meter.clock)
            streams.record().synchronize()
            times[codec].append(time.perf_counter() - start)
    transport.traffic = uncounted
    medians = {codec: 1e3 * statistics.median(t[1:]) for codec, t in times.items()}
    everyone: list[dict[Codec, float]] = transport.all_gather_object(medians)
    best = min(everyone[0], key=lambda codec: everyone[0][codec])
    return best, {codec.spec(): ms for codec, ms in everyone[0].items()}
