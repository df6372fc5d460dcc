"""Errors for bad options."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raises ValueError("gradcomm: message") unless the condition holds. The message names the value
    and what to do instead."""
    if not condition:
        raise ValueError(f"gradcomm: {message}")
