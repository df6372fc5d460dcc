"""Hierarchy: ranks of one host average plainly, hosts exchange compressed, each rank a shard of it.

With G ranks on each of H hosts a part's blocks are cut into G pieces. Inside a host, every rank gets the
host's mean of one piece, uncompressed. Ranks that hold the same piece on different hosts run the shard
exchange on it, with error feedback on the host's mean. Then the encoded means of all pieces go round
inside the host, and everyone decodes them all.

Between hosts a rank sends 2 w N (H - 1) / (G H); inside its host b N (G - 1) / G plain and
w N (G - 1) / G encoded.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gradcomm.codec.base import RecordCodec, Turn
from gradcomm.part import Part, Piece
from gradcomm.stats import Clock
from gradcomm.transport import Transport
from gradcomm.transport.hosts import HostsTransport

from .shard import encoded_mean


def hierarchy(part: Part, bucket: Tensor, turn: Turn, transport: Transport, clock: Clock) -> None:
    codec = part.codec
    assert isinstance(codec, RecordCodec) and isinstance(transport, HostsTransport)
    local, cross = transport.local, transport.cross
    pieces = part.pieces(local.size, part.chunk_blocks(turn.ranks) * cross.size)
    with clock("encode"):
        _spend(part, bucket, turn)
    _average_locally(pieces, bucket, local, turn, clock)

    mine = pieces[local.rank]
    there = dataclasses.replace(
        turn, gain=None, ranks=cross.size, rank=cross.rank, momentum=None, unused=()
    )
    means = encoded_mean(mine, bucket, there, cross, clock)

    payloads = turn.scratch.get("pieces", (local.size, means.numel()), torch.uint8, bucket.device)
    payloads[local.rank].copy_(means.view(-1))
    with clock("wire"):
        local.all_gather(payloads)
    chunks = payloads.view(turn.ranks, -1)
    with clock("decode"):
        codec.decode_mean(part, chunks.unsqueeze(0), bucket, turn)
        if turn.momentum is not None:
            # Of a host's mean no rank knows which of its own elements were sent: what the mean of
            # all holds counts as sent.
            format = codec.format(part.chunk_blocks(turn.ranks), turn.step)
            codec.forget_sent(part, chunks, format, turn.momentum)


def _spend(part: Part, bucket: Tensor, turn: Turn) -> None:
    """Adds what this rank's own residual holds, from another layout or exchange, to the gradient, since
    nothing of it is kept by rank here. ``turn.gain`` is applied on the way, and is 1 from then on."""
    held = turn.memory.take("residual", part) if turn.error_feedback else {}
    for s in part.slices:
        gradient = bucket[s.offset : s.offset + s.numel]
        if turn.gain is not None:
            gradient.mul_(turn.gain.to(bucket.dtype))
        if s.key in held:
            gradient.add_(held[s.key].to(bucket.dtype))


def _average_locally(
    pieces: list[Piece], bucket: Tensor, local: Transport, turn: Turn, clock: Clock
) -> None:
    """The host's mean of this rank's piece replaces its elements in ``bucket``: a reduce-scatter,
    summed in rank order in float32."""
    most = max(piece.numel for piece in pieces)
    rows = turn.scratch.get("rows", (local.size, most), bucket.dtype, bucket.device)
    got = turn.scratch.get("got", (local.size, most), bucket.dtype, bucket.device)
    with clock("encode"):
        for piece, row in zip(pieces, rows, strict=True):
            if piece.numel:
                torch.cat(piece.elements(bucket), out=row[: piece.numel])
    with clock("wire"):
        local.all_to_all(got, rows)
    with clock("decode"):
        mine = pieces[local.rank]
        mean = torch.sum(got[:, : mine.numel], dim=0, dtype=torch.float32).mul_(1.0 / local.size)
        views = mine.elements(bucket)
        for view, share in zip(views, mean.split([v.numel() for v in views]), strict=True):
            view.copy_(share)
