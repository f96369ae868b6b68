"""Engines of several ranks whose workers are forked instead of started anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.actors import worker
from tests.parallel.forkserver import ForkServer


@pytest.fixture(scope="package")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def forked_workers(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test get their workers from the fork server."""
    monkeypatch.setattr(worker, "_spawn", fork_server.spawn)
