"""The version, as ranks compare it."""

from __future__ import annotations

__version__ = "0.1.0"
