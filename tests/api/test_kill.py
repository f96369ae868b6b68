"""A worker that is killed or stopped under load, seen from outside: bounded errors, honest health, the exit code, and no orphans."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trio

from engine.actors.worker import WORKER_MODULE
from engine.core.cache_config import CacheConfig
from engine.core.errors import WorkerError
from tests.actors.harness import engine_config, is_alive, until, worker_pids
from tests.api.conftest import LiveServer, start_server
from tests.api.harness import Server, open_server, script_of

NUM_STREAMS = 16
# From the signal to the last stream's error. A death is seen at once, a stopped process after two missed heartbeats.
LIMIT_S = 3.0
CACHE = CacheConfig(num_blocks=NUM_STREAMS * 50, block_size=4, max_running=NUM_STREAMS, max_batched_tokens=64, context_length=200)


class Load:
    """Streams that would go on for long, each by a client of its own; and what /health says meanwhile."""

    def __init__(self, base_url: str, model: str, max_tokens: int) -> None:
        self._client = httpx.AsyncClient(base_url=base_url, timeout=30, limits=httpx.Limits(max_connections=NUM_STREAMS + 1))
        self._body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 1}
        self.events: list[list[str]] = [[] for _ in range(NUM_STREAMS)]
        self.ended_s: list[float] = []
        self.health: list[tuple[float, int | None]] = []  # (when it was asked, status; None where nobody answers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Give control once every stream has tokens; leave once every stream has ended."""
        async with self._client, trio.open_nursery() as nursery:
            for index in range(NUM_STREAMS):
                nursery.start_soon(self._read, index)
            await until(lambda: all(self.events), timeout_s=20)
            yield self
        self.check()

    async def _read(self, index: int) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    self.events[index].append(line.removeprefix("data: "))
        self.ended_s.append(trio.current_time())

    async def ask_health(self) -> int | None:
        asked_s, status = trio.current_time(), None
        with contextlib.suppress(httpx.TransportError):
            status = (await self._client.get("/health")).status_code
        self.health.append((asked_s, status))
        return status

    def check(self) -> None:
        """Every stream ended with an error that names the worker, and without any sign of a good end."""
        for events in self.events:
            last = json.loads(events[-1])["error"]
            assert last["code"] == "engine_unavailable"
            assert "worker-0" in last["message"]
            assert events[-1:] == [event for event in events if '"error"' in event]
            assert all(choice["finish_reason"] is None for event in events[:-1] for choice in json.loads(event)["choices"])
            assert "[DONE]" not in events

    def check_times(self, signal_s: float) -> None:
        assert len(self.ended_s) == NUM_STREAMS
        assert max(self.ended_s) - signal_s < LIMIT_S
        assert 200 not in [status for asked_s, status in self.health if asked_s > min(self.ended_s)]


def session_pids(session: int) -> list[int]:
    """Live processes of a server's session: itself, and whatever it has left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
    return found


@contextlib.asynccontextmanager
async def live_server(log: Path, *arguments: str) -> AsyncIterator[LiveServer]:
    server = await trio.to_thread.run_sync(lambda: start_server(log, "tiny-v41", "--no-warm-up", *arguments))
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


async def exit_code(server: LiveServer) -> int:
    with trio.fail_after(20):
        return await trio.to_thread.run_sync(server.process.wait, abandon_on_cancel=True)


async def test_a_killed_worker_ends_all_streams_and_the_server(tmp_path: Path) -> None:
    async with live_server(tmp_path / "log") as server:
        load = Load(server.base_url, "tiny-v41", 1000)
        async with load.running():
            assert await load.ask_health() == 200
            (worker,) = worker_pids(server.process.pid, WORKER_MODULE)
            signal_s = trio.current_time()
            os.kill(worker, signal.SIGKILL)
            with trio.fail_after(20):
                while await load.ask_health() is not None:
                    await trio.sleep(0.01)
        load.check_times(signal_s)
        assert {status for _, status in load.health} <= {200, 503, None}  # it may be gone before it is asked once more
        assert await exit_code(server) == 1
        assert session_pids(server.process.pid) == []
        assert "worker-0" in server.log.read_text()


async def test_a_stopped_worker_is_replaced_where_that_is_wanted(tmp_path: Path) -> None:
    async with live_server(tmp_path / "log", "--on-worker-death", "restart") as server:
        load = Load(server.base_url, "tiny-v41", 1000)
        async with load.running():
            (worker,) = worker_pids(server.process.pid, WORKER_MODULE)
            signal_s = trio.current_time()
            os.kill(worker, signal.SIGSTOP)
        load.check_times(signal_s)
        assert not is_alive(worker)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=30) as client:
            statuses = [(await client.get("/health")).status_code]
            with trio.fail_after(60):
                while statuses[-1] != 200:
                    await trio.sleep(0.05)
                    statuses.append((await client.get("/health")).status_code)
            assert set(statuses) == {503, 200}
            body = {"model": "tiny-v41", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == 5
        assert await trio.to_thread.run_sync(server.stop) == 0
        assert session_pids(server.process.pid) == []


async def test_a_stopped_worker_is_noticed() -> None:
    """The same in one process, with a scripted worker: what the gateway and the metrics say afterwards."""
    servers: list[Server] = []
    loads: list[Load] = []
    signals_s: list[float] = []

    async def serve() -> None:
        engine = engine_config(script_of("abcdefgh", step_s=0.01), cache=CACHE, heartbeat_interval_s=0.2, heartbeat_timeout_s=10.0)
        async with open_server(engine=engine) as server:
            servers.append(server)
            load = Load(server.base_url, "scripted", 190)
            loads.append(load)
            # The engine's end cancels its body, which these clients are no part of but for being in one process with it.
            with trio.CancelScope(shield=True):
                async with load.running():
                    (worker,) = worker_pids(os.getpid())
                    signals_s.append(trio.current_time())
                    os.kill(worker, signal.SIGSTOP)
            await trio.sleep_forever()

    with pytest.raises(WorkerError, match="worker-0: is stopped"), trio.fail_after(30):
        await serve()
    (server,), (load,) = servers, loads
    load.check()
    load.check_times(signals_s[0])
    metrics = server.context.metrics
    assert metrics.finished["error"] == NUM_STREAMS == metrics.counters.started
    assert metrics.open_streams == 0
    assert metrics._running == {}
    assert worker_pids(os.getpid()) == []
