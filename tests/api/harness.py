"""Servers for the tests: the real application on real hypercorn connections over loopback, an engine of scripted workers behind it.

async with open_server(script_of("Hello")) as server:
    response = await server.client.get("/health")
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import trio

from engine.actors.config import EngineConfig
from engine.actors.gateway import Gateway
from engine.actors.supervisor import open_engine
from engine.api.app import App
from engine.api.config import ApiConfig
from engine.api.context import ApiContext
from engine.api.formats.base import ChatFormat
from engine.api.info import ServerInfo
from engine.api.metrics import ServerMetrics
from engine.api.routes import ROUTES, Route
from engine.api.server import base_url, bind, serve_http, tls_context
from engine.core.sampling import SamplingParams
from engine.core.step_cost import StepCost
from engine.tokenizer import Tokenizer
from tests.actors.harness import MODULE, engine_config, until
from tests.actors.scripted_worker import Script
from tests.test_tokenizer import byte_level_json

TIMEOUT_S = 10.0


@dataclass
class Server:
    """``client`` (httpx) has the base URL set; the other fields are the server's own objects."""

    base_url: str
    port: int
    gateway: Gateway
    context: ApiContext
    app: App
    client: httpx.AsyncClient


def tokenizer() -> Tokenizer:
    """Byte-level: one token a byte, in effect; token 1 ends a text."""
    return Tokenizer(byte_level_json(), eos_token_ids=(1,))


def script_of(text: str, **values: Any) -> Script:
    """A worker that says ``text`` over and over, one token at a time (by position, prompt tokens included)."""
    return Script(tokens=tuple(tokenizer().encode(text)), **values)


def server_info(gateway: Gateway, config: EngineConfig, **changes: Any) -> ServerInfo:
    cache = config.scheduler.cache
    info = ServerInfo(
        version="0",
        model="scripted",
        served_names=("scripted",),
        created_unix_s=1_800_000_000,
        layout="tp1dp1ep1",
        dtype="float32",
        device="cpu",
        num_parameters=1000,
        weight_bytes=gateway.workers[0].weight_bytes,
        kv_bytes=gateway.workers[0].cache_bytes,
        kv_tokens=cache.num_blocks * cache.block_size,
        block_size=cache.block_size,
        context_length=gateway.context_length,
        max_running_requests=cache.max_running,
        max_waiting_requests=config.scheduler.max_waiting,
        draft_tokens=0,
        prefix_caching=True,
        chat_format=None,
        load_s=0.1,
        warm_up_s=0.0,
        ready_s=0.2,
        non_default={},
    )
    return msgspec.structs.replace(info, **changes)


@contextlib.asynccontextmanager
async def open_server(
    script: Script | None = None,
    *,
    config: ApiConfig | None = None,
    engine: EngineConfig | None = None,
    chat_format: ChatFormat | None = None,
    defaults: SamplingParams | None = None,
    routes: Sequence[Route] = ROUTES,
    info: dict[str, Any] | None = None,
    log_requests: bool = False,
    handle_signals: bool = False,
    cost: StepCost | None = None,
) -> AsyncIterator[Server]:
    """``info`` replaces fields of the ServerInfo; OpenAI's temperature is the default one, as in a real server."""
    config = config or ApiConfig(port=0)
    engine = engine or engine_config(script or script_of("Hello, world! "))
    metrics = ServerMetrics()
    async with open_engine(
        engine, tokenizer(), worker_module=MODULE, observers=(metrics,), handle_signals=handle_signals, cost=cost
    ) as gateway:
        facts = server_info(gateway, engine, **({"chat_format": chat_format.name} if chat_format else {}) | (info or {}))
        context = ApiContext(gateway, facts, config, chat_format, defaults or SamplingParams(temperature=1.0), metrics)
        metrics.start(gateway, facts, config.metrics_compat)
        app = App(context, routes, log_requests=log_requests)
        context = app.context
        bound = bind(config.host, 0)
        url = base_url(bound, config)
        async with serve_http(app, bound, tls_context(config)), httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
            yield Server(url, bound.getsockname()[1], gateway, context, app, client)


async def assert_idle(server: Server) -> None:
    """No request is under way and every block is free or merely cached."""
    await until(lambda: server.gateway.num_requests == 0 and server.app.num_calls == 0)
    await until(lambda: server.gateway.stats().core.num_uncommitted == 0)
    for rank in server.gateway.stats().core.ranks:
        assert rank.num_running == 0
        assert rank.free_blocks + rank.cached_only_blocks == rank.total_blocks


class RawClient:
    """One TCP connection, for what a proper client would not do."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive(self, timeout_s: float = TIMEOUT_S) -> bytes:
        """Whatever comes next; empty at the end of the connection."""
        with trio.fail_after(timeout_s):
            try:
                return bytes(await self.stream.receive_some(65536))
            except trio.BrokenResourceError:
                return b""

    async def receive_all(self, timeout_s: float = TIMEOUT_S) -> bytes:
        parts = []
        with trio.fail_after(timeout_s):
            while part := await self.receive(timeout_s):
                parts.append(part)
        return b"".join(parts)

    async def receive_until(self, mark: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        data = b""
        with trio.fail_after(timeout_s):
            while mark not in data:
                part = await self.receive(timeout_s)
                assert part, f"the connection ended after {data!r}"
                data += part
        return data


@contextlib.asynccontextmanager
async def raw_client(server: Server) -> AsyncIterator[RawClient]:
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    try:
        yield RawClient(stream)
    finally:
        await trio.aclose_forcefully(stream)


def request_bytes(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{length}{headers}\r\n".encode() + body


def parse_response(data: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one response whose connection has ended."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def error_code(body: bytes) -> str | None:
    """The code of an error answer, whose form is checked too."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    code: str | None = error["code"]
    return code
