"""hypercorn's HTTP/1.1 connection with the bounds that a server of long streams needs.

What hypercorn leaves open: a send to a client that takes nothing cannot be cancelled and has no end; an error outside the application
takes the whole server down. HTTP/2 is not spoken (a proxy in front does): a stream of it that a client does not read waits without end.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]

# Each piece has its own deadline, so a slow client is one below 64 KiB in send_timeout_s.
_PIECE_BYTES = 64 << 10
# Of requests that a client sends while an answer is on its way: read so far, so that its end is seen. The rest waits in the kernel.
_PIPELINED_BYTES = 64 << 10

_log = logging.getLogger("twinfer.http")


class Connection(TCPServer):
    """One client. ``run`` returns when it is gone and never raises an error of one connection's into the server."""

    def __init__(self, app: ASGIWrapper, config: Config, context: WorkerContext, stream: Stream, send_timeout_s: float) -> None:
        super().__init__(app, config, context, {}, stream)  # type: ignore[arg-type]
        self._send_timeout_s = send_timeout_s
        self._gone = False  # the client has closed its side
        self._plain_socket = stream.socket if isinstance(stream, trio.SocketStream) else None

    async def run(self) -> None:
        try:
            await self._run()
        except* OSError:
            pass  # the client's side of the connection
        except* Exception as group:
            _log.error("a connection failed", exc_info=group)

    async def _run(self) -> None:
        try:
            is_tls = isinstance(self.stream, trio.SSLStream)
            if is_tls and not await self._shake_hands():
                return
            socket = self.stream.transport_stream.socket if is_tls else self.stream.socket
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as self._task_group:
                self.protocol = _Http11(  # type: ignore[assignment]
                    self.app, self.config, self.context, self._task_group, ConnectionState({}), is_tls, client, server, self.protocol_send
                )
                self.protocol.can_read = _NextRequest(self)  # type: ignore[attr-defined]
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
                # Nobody is waited for: the timer of idle connections would keep this one until it is up.
                self._gone = True
                await self.idle_task.stop()
        finally:
            await trio.aclose_forcefully(self.stream)

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        except _ClientLeft:
            await self.protocol.handle(Closed())

    async def read_ahead(self) -> None:
        """While an answer is on its way, whatever the client sends is kept for later, and its end is noticed: then this returns. It
        does too where so much was sent that nothing more is read, after send_timeout_s.
        """
        protocol = self.protocol
        assert isinstance(protocol, _Http11)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while len(protocol.connection.trailing_data[0]) < _PIPELINED_BYTES:
                data = await self.stream.receive_some(_PIPELINED_BYTES)
                if not data:
                    return
                protocol.connection.receive_data(bytes(data))
            await trio.sleep(self._send_timeout_s)

    async def _shake_hands(self) -> bool:
        try:
            with trio.move_on_after(self.config.ssl_handshake_timeout) as deadline:
                await self.stream.do_handshake()
        except trio.BrokenResourceError:
            return False
        return not deadline.cancelled_caught

    async def protocol_send(self, event: Event) -> None:
        """Shielded: what is half sent cannot be continued. Bounded: a client that takes nothing is cut off."""
        if isinstance(event, Closed):
            with trio.move_on_after(self._send_timeout_s):  # TLS says goodbye, to a client that may not listen
                await super().protocol_send(event)
        elif isinstance(event, RawData):
            if not await self._send_all(memoryview(event.data)):
                await trio.aclose_forcefully(self.stream)
                await self.protocol.handle(Closed())
        elif not self._gone:
            await super().protocol_send(event)

    async def _send_all(self, data: memoryview) -> bool:
        """False where the client is not there or takes nothing."""
        data = data[self._send_now(data) :]
        if not data:
            return True
        # The protocol has counted these bytes as sent, so a cancellation must not come between, the wait for the lock included.
        with trio.CancelScope(shield=True):
            async with self.send_lock:
                for start in range(0, len(data), _PIECE_BYTES):
                    if not await self._send_piece(data[start : start + _PIECE_BYTES]):
                        return False
        return True

    def _send_now(self, data: memoryview) -> int:
        """How many bytes the kernel took at once. That is nearly always all of an event; a lock, a deadline and a turn of the scheduler
        for each of them would cost more than everything else that a streamed token does.
        """
        if self._plain_socket is None or self.send_lock.locked():
            return 0
        try:
            return os.write(self._plain_socket.fileno(), data)
        except OSError:  # no room, or nobody there: the careful way finds out
            return 0

    async def _send_piece(self, piece: memoryview) -> bool:
        with trio.move_on_after(self._send_timeout_s) as deadline:
            try:
                await self.stream.send_all(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
        if deadline.cancelled_caught:
            _log.info("a client took nothing for %g s and was cut off", self._send_timeout_s)
        return not deadline.cancelled_caught


class _Http11(H11Protocol):
    """HTTP/1.1 and nothing else, whatever the client proposes."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """No change to another version of HTTP."""

    async def _create_stream(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        if {b"content-length", b"transfer-encoding"} <= names:  # where the next request begins is then a matter of opinion
            await self._send_error_response(400)
            await self.send(Closed())
            return
        if b"upgrade" in names:  # to be passed over, as a server may: nothing here speaks anything else
            kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = h11.Request(method=request.method, target=request.target, headers=kept, http_version=request.http_version)
        await super()._create_stream(request)


class _ClientLeft(Exception):  # noqa: N818 - not an error
    """The client has closed its side while there were requests of it to be read."""


class _NextRequest:
    """Stands in for hypercorn's event that an answer is complete and the next request of the connection may be read.

    Where a client has sent one already, hypercorn reads nothing until then, and would not notice that it has left.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._event = trio.Event()

    async def clear(self) -> None:
        self._event = trio.Event()

    async def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        left = False

        async def watch() -> None:
            nonlocal left
            await self._connection.read_ahead()
            left = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await self._event.wait()
            nursery.cancel_scope.cancel()
        if left:
            raise _ClientLeft


async def serve_connections(
    listeners: list[trio.SocketListener | trio.SSLListener[trio.SocketStream]],
    connect: Callable[[Stream], Connection],
    max_connections: int,
    nursery: trio.Nursery,
) -> None:
    """Accept for ever; connections run in ``nursery``. Above ``max_connections`` newcomers wait in the kernel's queue."""
    slots = trio.Semaphore(max_connections)

    async def handle(stream: Stream) -> None:
        try:
            await connect(stream).run()
        finally:
            slots.release()

    await trio.serve_listeners(handle, [_Capped(listener, slots) for listener in listeners], handler_nursery=nursery)


class _Capped(trio.abc.Listener[Stream]):
    """A listener that accepts only while there is a slot; whoever ends the connection gives it back."""

    def __init__(self, listener: trio.SocketListener | trio.SSLListener[trio.SocketStream], slots: trio.Semaphore) -> None:
        self._listener = listener
        self._slots = slots

    async def accept(self) -> Stream:
        await self._slots.acquire()
        try:
            return await self._listener.accept()
        except BaseException:
            self._slots.release()
            raise

    async def aclose(self) -> None:
        await self._listener.aclose()
