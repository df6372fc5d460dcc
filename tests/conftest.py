"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="train for fifty steps where six are usual")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes to run a function on several ranks: ``ranks.run(function, 2, …)``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _threads() -> None:
    """Two cores, several ranks: one thread each."""
    torch.set_num_threads(1)
