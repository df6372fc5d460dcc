"""Keys of the counter-based random numbers (csrc/device/common.cuh)."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def key_of(*parts: int) -> int:
    """A 63-bit key from a seed, a step and so on: SplitMix64 (Steele, Lea, Flood, 2014), chained."""
    x = 0
    for part in parts:
        x = (x ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return x >> 1
