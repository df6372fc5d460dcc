"""The pool of ranks itself: a hang and an error are failures."""

from __future__ import annotations

import time

import pytest

from .ranks import RankError, Ranks


def test_a_hang_is_a_failure_with_stacks(ranks: Ranks) -> None:
    with pytest.raises(TimeoutError, match="_hangs"):
        ranks.run(_hangs, 2, timeout=3)
    with pytest.raises(RankError, match="on purpose"):
        ranks.run(_raises, 2)


def _hangs(rank: int, ranks: int) -> None:
    time.sleep(60)


def _raises(rank: int, ranks: int) -> None:
    raise ValueError("on purpose")
