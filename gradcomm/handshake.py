"""Ranks compare what they are about to do, before they do it."""

from __future__ import annotations

from typing import Any

from gradcomm.transport import Transport


class DisagreementError(RuntimeError):
    """Ranks would not do the same; the message names a rank and the field."""


def agree(
    transport: Transport,
    mine: dict[str, Any],
    doing: str = "register",
    remedy: str = "every rank must register the same codec, options and model",
) -> None:
    """Compares ``mine`` with every rank's, on every rank. ``doing``, ``remedy``: for the message.

    Raises DisagreementError on all ranks when a rank says anything else than rank 0, or has an
    ``error`` to tell. Collective.
    """
    everyone: list[dict[str, Any]] = transport.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        if theirs.get("error") is not None:
            raise DisagreementError(f"gradcomm: rank {rank} cannot {doing}: {theirs['error']}")
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for field in dict.fromkeys([*first, *theirs]):
            if first.get(field) != theirs.get(field):
                raise DisagreementError(
                    f"gradcomm: rank {rank} and rank 0 disagree on {field}: "
                    f"{_difference(theirs.get(field), first.get(field))}; "
                    f"{remedy}"
                )


def _difference(theirs: Any, first: Any) -> str:
    if isinstance(theirs, list) and isinstance(first, list):
        if len(theirs) != len(first):
            return f"{len(theirs)} entries against {len(first)}"
        for a, b in zip(theirs, first, strict=True):
            if a != b:
                return f"{a!r} against {b!r}"
    return f"{theirs!r} against {first!r}"
