"""How a server ends: drained by a signal, forced by a second one, with a dead worker; and what its clients read of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from engine.actors.supervisor import open_engine
from engine.api.config import ApiConfig
from engine.api.routes import ROUTES, Route
from engine.api.server import bind
from engine.cli.warm_up import warm_up
from engine.core.errors import StoppedError, WorkerError
from tests.actors.harness import MODULE, engine_config, until
from tests.api.harness import Server, error_code, open_server, script_of, tokenizer
from tests.api.test_server_calls import stream

TEST_ROUTES = (*ROUTES, Route("/test", "key", {"POST": stream}))


class Reader:
    """A client of one stream, with a life of its own."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.base_url}/test"
        self.lines: list[str] = []

    async def run(self, num_tokens: int) -> None:
        async with httpx.AsyncClient(timeout=10) as client, client.stream("POST", self._url, content=str(num_tokens).encode()) as response:
            async for line in response.aiter_lines():
                if line:
                    self.lines.append(line.removeprefix("data: "))

    @property
    def error(self) -> dict[str, Any]:
        """The last event, which has to be an error, and the only one."""
        errors = [json.loads(line)["error"] for line in self.lines if '"error"' in line]
        assert len(errors) == 1
        assert '"error"' in self.lines[-1]
        assert "[DONE]" not in self.lines
        error: dict[str, Any] = errors[0]
        return error


@asynccontextmanager
async def serving(step_s: float = 0.01, **supervision: Any) -> AsyncIterator[tuple[Server, Reader, trio.Nursery]]:
    """A server that handles signals, and a reader outside of it."""
    script = script_of("abcdefgh", step_s=step_s)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            engine = engine_config(script, **supervision)
            async with open_server(engine=engine, routes=TEST_ROUTES, handle_signals=True) as server:
                yield server, Reader(server), nursery


async def test_the_first_signal_lets_streams_finish_and_refuses_newcomers() -> None:
    async with serving() as (server, reader, nursery):
        nursery.start_soon(reader.run, 60)
        await until(lambda: bool(reader.lines))
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server.gateway.stop_signal is not None)
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, "draining")
        assert (await server.client.get("/health/live")).status_code == 200
        refused = await server.client.post("/test", content=b"1")
        assert (refused.status_code, error_code(refused.content)) == (503, "engine_unavailable")
        await server.gateway.wait_drained()
    assert reader.lines[-1] == "[DONE]"
    assert len(reader.lines) == 61
    assert server.gateway.exit_code == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.base_url}/health")


async def test_a_second_signal_ends_streams_with_an_error() -> None:
    async with serving() as (server, reader, nursery):
        nursery.start_soon(reader.run, 190)
        await until(lambda: bool(reader.lines))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: server.gateway.stop_signal is not None)
        await trio.Event().wait()  # the engine cancels its body
    assert "stopped" in reader.error["message"]
    assert server.gateway.exit_code == 143


async def test_a_drain_has_an_end() -> None:
    async with serving(shutdown_timeout_s=0.1) as (server, reader, nursery):
        nursery.start_soon(reader.run, 190)
        await until(lambda: bool(reader.lines))
        os.kill(os.getpid(), signal.SIGINT)
        await server.gateway.wait_drained()
    assert "shut down" in reader.error["message"]
    assert server.gateway.exit_code == 130


async def test_a_signal_while_the_server_warms_up() -> None:
    script = script_of("abcdefgh", step_s=0.05)
    engine = engine_config(script)

    def report(done: int, _: int) -> None:
        if done == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with trio.fail_after(10), pytest.raises(StoppedError) as caught:
        async with open_engine(engine, tokenizer(), worker_module=MODULE, handle_signals=True) as gateway:
            await warm_up(gateway, engine.scheduler, report)
    assert caught.value.exit_code == 143


async def test_a_worker_that_dies_ends_every_stream_with_an_error_and_the_server_with_its_own() -> None:
    readers: list[Reader] = []

    async def serve(nursery: trio.Nursery) -> None:
        async with open_server(script_of("abcdefgh", step_s=0.01, kill_at_step=20), routes=TEST_ROUTES) as server:
            readers.extend(Reader(server) for _ in range(4))
            for reader in readers:
                nursery.start_soon(reader.run, 100)
            await until(lambda: not server.gateway.health.ok)
            health = await server.client.get("/health")
            assert (health.status_code, health.json()["state"]) == (503, "failed")
            await trio.sleep_forever()

    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            with pytest.raises(WorkerError, match="worker-0"):
                await serve(nursery)
    for reader in readers:
        assert reader.error["code"] == "engine_unavailable"
        assert "worker-0" in reader.error["message"]


async def test_health_while_workers_are_restarted(tmp_path: Any) -> None:
    script = script_of("abcdefgh", step_s=0.01, kill_at_step=5, once_file=str(tmp_path / "once"))
    engine = engine_config(script, on_worker_death="restart", restart_backoff_s=0.3)
    async with open_server(engine=engine, routes=TEST_ROUTES) as server:
        response = await server.client.post("/test", content=b"50")
        assert "engine_unavailable" in response.text
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, "restarting")
        await until(lambda: server.gateway.health.ok)
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.post("/test", content=b"2")).text.endswith("[DONE]\n\n")


async def test_an_actor_that_is_silent_for_too_long_makes_health_red(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_server(config=ApiConfig(port=0, health_timeout_s=5.0)) as server:
        monkeypatch.setattr(server.gateway, "heartbeat_ages_s", lambda: {"scheduler": 0.0, "worker-0": 5.5})
        for path in ("/health", "/ping", "/health/ready"):
            answer = await server.client.get(path)
            assert (answer.status_code, answer.json()["ok"]) == (503, False)
            assert "worker-0" in answer.json()["message"]
        assert (await server.client.get("/health/live")).status_code == 200


async def test_connections_close_with_the_server_and_leave_no_files() -> None:
    """Idle ones, ones in the middle of a request head, and ones whose client has left."""
    before = len(os.listdir("/proc/self/fd"))
    async with open_server() as server:
        streams = [await trio.open_tcp_stream("127.0.0.1", server.port) for _ in range(6)]
        for index, client in enumerate(streams):
            await client.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + (b"\r\n" if index % 2 else b""))
        assert (await server.client.get("/health")).status_code == 200
        for client in streams[:2]:
            await client.aclose()
    for client in streams[2:]:
        with trio.fail_after(5):
            while await client.receive_some(1000):
                pass
        await client.aclose()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_client_that_has_left_gives_its_connection_back_at_once() -> None:
    """Not only when it would have been idle for too long."""
    async with open_server(config=ApiConfig(port=0, max_connections=1, keep_alive_timeout_s=60)) as server:
        for _ in range(3):
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            await stream.send_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with trio.fail_after(5):
                assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200")
            await stream.aclose()


def test_the_socket_is_closed_by_the_process_that_opened_it() -> None:
    """A worker started later must not keep the port."""
    with bind("127.0.0.1", 0) as bound:
        assert not os.get_inheritable(bound.fileno())
