"""A real server in a process of its own, for tests with real clients."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
START_S = 90.0
STOP_S = 30.0


@dataclass
class LiveServer:
    """``facts`` is what ``--json`` printed. ``log`` grows while the server runs."""

    process: subprocess.Popen[bytes]
    facts: dict[str, Any]
    log: Path

    @property
    def base_url(self) -> str:
        url: str = self.facts["url"]
        return url

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def start_server(log: Path, *arguments: str, environment: dict[str, str] | None = None) -> LiveServer:
    """``twinfer serve`` on a free port, ready."""
    command = [sys.executable, str(ROOT / "twinfer.py"), "serve", *arguments, "--port", "0", "--json"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env={**os.environ, **(environment or {})}, start_new_session=True
        )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if ready else b""
    try:
        return LiveServer(process, json.loads(line), log)
    except ValueError:
        process.kill()
        process.wait(STOP_S)
        pytest.fail(f"the server did not start: {line!r}\n{log.read_text()}")


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """``twinfer serve tiny-v41`` as a user starts it; shared by all tests, which leave it as it was."""
    server = start_server(tmp_path_factory.mktemp("server") / "log", "tiny-v41")
    try:
        yield server
    finally:
        if server.process.poll() is None:
            assert server.stop() == 0
