"""Bit patterns in PyTorch: what the families have in common."""

from __future__ import annotations

import torch
from torch import Tensor

INFINITY = 0x7F800000
NAN = 0x7FC00000
MASK = 0xFFFFFFFF


def bits(x: Tensor) -> Tensor:
    """The bits of a float32 tensor, as int64 in [0, 2^32)."""
    return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def floats(b: Tensor) -> Tensor:
    """The inverse of ``bits``."""
    return torch.where(b >= 2**31, b - 2**32, b).to(torch.int32).view(torch.float32)


def header(x: Tensor) -> Tensor:
    """float32 ``[n]`` as bytes ``[n, 4]``; every NaN becomes the one that a payload may hold."""
    x = torch.where(torch.isnan(x), floats(torch.full_like(bits(x), NAN)), x)
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def read_header(b: Tensor) -> Tensor:
    """Bytes ``[..., 4]`` as float32 ``[...]``."""
    return b.contiguous().view(torch.float32).squeeze(-1)


def pack(fields: Tensor, bits: int) -> Tensor:
    """Integers ``[n, elements]`` below 2^bits as bytes: see csrc/device/format.cuh for the order."""
    per_byte = 8 // bits
    rows = fields.view(fields.size(0), -1, per_byte, 16)
    out = torch.zeros_like(rows[:, :, 0])
    for i in range(per_byte):
        out |= rows[:, :, i] << (bits * i)
    return out.to(torch.uint8).reshape(fields.size(0), -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack`` over the last dimension, as int64."""
    per_byte = 8 // bits
    units = packed.long().unflatten(-1, (-1, 1, 16))
    shifts = torch.arange(per_byte, device=packed.device).view(per_byte, 1) * bits
    fields: Tensor = ((units >> shifts) & (2**bits - 1)).flatten(-3)
    return fields


def random_bits(key: int, first_elements: Tensor, elements: int) -> Tensor:
    """32 random bits as int64 ``[n, elements]``: ``random_bits(random_key(key, first), 0 ...)`` of
    csrc/device/common.cuh for each of ``first_elements`` (int64 ``[n]``)."""
    key = key * 0x9E3779B97F4A7C15 % 2**64
    key = (key ^ key >> 32) * 0xD6E8FEB86659FD93 % 2**64
    key ^= key >> 32
    high = first_elements >> 32
    a = ((key & MASK) + first_elements + high * 0x9E3779B9) & MASK
    b = (key >> 32) ^ (high * 0x85EBCA6B & MASK)
    x = (torch.arange(elements, device=first_elements.device) + a.unsqueeze(1)) & MASK
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & MASK
    x = x ^ (x >> 15) ^ b.unsqueeze(1)
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def mean_of(decoded: Tensor) -> Tensor:
    """Mean over dimension 0, summed rank by rank, times 1/ranks: the order of the kernels."""
    total = decoded[0]
    for other in decoded[1:]:
        total = total + other
    return total * (torch.ones(()) / decoded.size(0)).item()
