"""The HTTP server: sockets, connections, and the way down after a signal.

bind            before the weights are loaded: an address in use is said at once
serve_http      accepts until it is told to finish; then running answers get a moment, and everything is closed
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from functools import partial

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from engine.api.app import App
from engine.api.config import ApiConfig
from engine.api.connection import Connection, serve_connections
from engine.core.errors import ConfigError

# Once the engine is done, answers that are on their way get this long; then connections are closed.
LAST_WORDS_S = 2.0
BACKLOG = 1024
MAX_HEADER_BYTES = 16 << 10  # more is answered with 431
# Files of the engine's own beside one descriptor per connection.
RESERVED_FILES = 128

_log = logging.getLogger("twinfer.http")


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until then clients are refused. Raises ConfigError where the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name with both kinds of address (localhost) means the kind that every client tries.
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Events are small and must not wait for each other.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _address_error(host, port, error) from None
    bound.setblocking(False)
    return bound


def _address_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}; choose another --port (0 takes a free one)")


def base_url(bound: socket.socket, config: ApiConfig) -> str:
    """Where clients on this machine find the server."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(config: ApiConfig) -> ssl.SSLContext | None:
    """Raises ConfigError for files that are no certificate and key."""
    if not config.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {error}") from None
    return context


def connection_limit(asked: int) -> int:
    """Connections that the process's limit on open files allows, after it was raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = asked + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = asked if soft == resource.RLIM_INFINITY else max(1, min(asked, soft - RESERVED_FILES))
    if limit < asked:
        _log.warning("at most %d connections instead of %d: the limit on open files is %d (ulimit -n)", limit, asked, soft)
    return limit


@contextlib.asynccontextmanager
async def serve_http(app: App, bound: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Serve while the body runs. After it, however it ended: nothing new is accepted, answers under way get LAST_WORDS_S.

    The server does not end with a cancellation of the body at once: a client reads of a forced stop as its stream's last event.
    """
    config = app.context.config
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # somebody else was faster
        host, port = bound.getsockname()[:2]
        raise _address_error(host, port, error) from None
    server = _Server(app, bound, tls, connection_limit(config.max_connections))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        try:
            yield
        finally:
            await server.finish()


class _Server:
    def __init__(self, app: App, bound: socket.socket, tls: ssl.SSLContext | None, max_connections: int) -> None:
        config = app.context.config
        self._app = app
        self._max_connections = max_connections
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        self._listener = listener if tls is None else trio.SSLListener(listener, tls, https_compatible=True)
        self._context = WorkerContext(None)
        self._accepting = trio.CancelScope()
        self._connections = trio.CancelScope(shield=True)
        self._connect = partial(
            _connect, ASGIWrapper(app), _hypercorn_config(config), self._context, send_timeout_s=config.client_timeout_s  # type: ignore[arg-type]
        )  # fmt: skip

    async def run(self) -> None:
        with self._connections:
            async with trio.open_nursery() as nursery:
                with self._accepting:
                    await serve_connections([self._listener], self._connect, self._max_connections, nursery)

    async def finish(self) -> None:
        self._accepting.cancel()
        await self._context.terminated.set()  # idle connections are closed, the others after their answer
        with trio.move_on_after(LAST_WORDS_S, shield=True):
            await self._app.wait_idle()
        self._connections.cancel()


def _connect(
    app: ASGIWrapper, config: Config, context: WorkerContext, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
    *, send_timeout_s: float,
) -> Connection:  # fmt: skip
    return Connection(app, config, context, stream, send_timeout_s)


def _hypercorn_config(config: ApiConfig) -> Config:
    result = Config()
    result.errorlog = logging.getLogger("twinfer.http")
    result.accesslog = None
    result.include_server_header = False
    result.keep_alive_timeout = config.keep_alive_timeout_s
    result.keep_alive_max_requests = 1 << 20
    result.h11_max_incomplete_size = MAX_HEADER_BYTES
    result.ssl_handshake_timeout = 15.0
    # Nothing is read for as long as an answer takes, so this would cut long streams.
    result.read_timeout = None
    return result
