"""Schedules: how payloads travel. Each is straight-line code: encode, send, decode.

Bytes that a rank sends (w payload bytes an element, b plain bytes, N elements, P ranks):

========  ==================================================  ======================
reduce    all-reduce of linear payloads                        2 b N (P - 1) / P
gather    encode, all-gather, decode the mean of P             w N (P - 1)
shard     all-to-all of P chunks, the owner decodes, adds its  2 w N (P - 1) / P
          residual and encodes, all-gather, decode
hierarchy  the ranks of a host average plainly, hosts shard    between hosts of G
          a piece for each of their ranks                      ranks: shard's / G
========  ==================================================  ======================
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradcomm.codec.base import Codec, Turn
from gradcomm.part import Part
from gradcomm.stats import Clock
from gradcomm.transport import Transport

from .gather import gather
from .hierarchy import hierarchy
from .reduce import reduce
from .shard import shard

#: ``exchange(part, bucket, turn, transport, clock)``: the mean over ranks of the part's elements
#: replaces them in ``bucket``.
Exchange = Callable[[Part, Tensor, Turn, Transport, Clock], None]

EXCHANGES: dict[str, Exchange] = {
    "reduce": reduce,
    "gather": gather,
    "shard": shard,
    "hierarchy": hierarchy,
}


def choose(codec: Codec, ranks: int, wanted: str | None) -> str:
    """The name of the exchange for a codec among this many ranks; ``wanted`` overrides.

    Gather grows with the number of ranks and encodes once; shard is flat and encodes twice: at two
    ranks they send the same, so gather is better there. A linear codec is reduced if nothing else can
    carry it: Gloo's own all-reduce of 16-bit types is slower than sharding them.
    """
    if wanted is not None:
        if wanted not in EXCHANGES:
            raise ValueError(f"gradcomm: exchange={wanted!r} is unknown; use one of {sorted(EXCHANGES)}")
        if wanted not in codec.exchanges:
            raise ValueError(
                f"gradcomm: exchange={wanted!r} cannot carry {codec.name}; use one of {codec.exchanges}"
            )
        return wanted
    flat = "gather" if ranks <= 2 else "shard"
    return flat if flat in codec.exchanges else codec.exchanges[0]
