"""A debugging aid: do all ranks hold the same bits?"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gradcomm.transport import Transport


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def compare_ranks(transport: Transport, tensor: Tensor) -> None:
    """Raises RuntimeError, on every rank, naming the ranks whose bits are not rank 0's. Collective."""
    digests = transport.all_gather_object(digest(tensor))
    differing = [rank for rank, d in enumerate(digests) if d != digests[0]]
    if differing:
        raise RuntimeError(f"gradcomm: ranks {differing} hold other bits than rank 0 after the exchange")
