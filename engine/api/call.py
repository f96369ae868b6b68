"""One HTTP request inside its handler: the body read under bounds, the client watched, the answer sent.

A handler is ``async def handler(context, call)``. It raises for what is wrong; as long as nothing was sent, that becomes an answer
with the right status. When the client leaves, or takes nothing for too long, the handler is cancelled: whatever it holds (an
engine's stream above all) is given back by leaving its contexts.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import trio

from engine.api.auth import NOBODY, Tenant
from engine.api.errors import ApiError, as_api_error
from engine.core.errors import CapacityError, InvariantError

if TYPE_CHECKING:
    from engine.api.context import ApiContext

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Access = Literal["public", "key", "metrics"]
Headers = tuple[tuple[str, str], ...]

# What nobody reads of a body: for how long it is taken in and thrown away, so that the client is still there to read the answer.
LINGER_S = 2.0
SMALL_BODY_BYTES = 64 << 10
CLIENT_LEFT = 499  # of the log; no client sees it
CLOSE: Headers = (("connection", "close"),)

_log = logging.getLogger("twinfer.api")
_encoder = msgspec.json.Encoder()


class ClientGone(Exception):  # noqa: N818 - not an error of ours
    """The client has left: there is nobody to answer."""


class Call:
    """``body`` is complete when the handler is called. ``notes`` (numbers and names, never text of the client's) go to the log line."""

    def __init__(self, context: ApiContext, scope: Scope, receive: Receive, send: Send) -> None:
        self._context = context
        self._receive = receive
        self._send = send
        self.scope = scope
        self.id = secrets.token_hex(12)
        self.tenant: Tenant = NOBODY
        self.body = b""
        self.notes: dict[str, Any] = {}
        self.started = False  # headers are out
        self.complete = False  # the last byte is out, or on its way
        self.status: int | None = None
        self._body_read = False
        self._writer: EventWriter | None = None

    @property
    def path_params(self) -> dict[str, Any]:
        """What the route's braces matched."""
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    def header(self, name: bytes) -> bytes | None:
        """The first header of this (lower-case) name."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def send_json(self, value: object, *, status: int = 200, headers: Headers = ()) -> None:
        await self.send_bytes(_encoder.encode(value), "application/json", status=status, headers=headers)

    async def send_bytes(self, data: bytes, content_type: str, *, status: int = 200, headers: Headers = ()) -> None:
        await self._start(status, (("content-type", content_type), ("content-length", str(len(data))), *headers))
        await self._put(data, more=False)

    async def send_empty(self, status: int, headers: Headers = ()) -> None:
        await self._start(status, headers)
        await self._put(b"", more=False)

    def events(self, error_frame: Callable[[ApiError], bytes] | None = None) -> EventWriter:
        """Answer with server-sent events. ``error_frame`` renders what goes wrong after the headers; the default is OpenAI's."""
        if self._writer is None:
            self._context.metrics.stream_opened()
        self._writer = EventWriter(self, error_frame or _error_frame)
        return self._writer

    # -- for the endpoint -----------------------------------------------------------------------------------------------------

    async def run(self, handler: Handler, max_body_bytes: int) -> None:
        """Read the body, call ``handler`` while the client is there, answer for what it raises."""
        limit_s = self._context.config.request_timeout_s
        try:
            with trio.move_on_after(limit_s) as limit:
                await self._read_body(max_body_bytes)
                await self._run_watched(handler)
            if limit.cancelled_caught:
                message = f"the request took longer than {limit_s:g} s"
                await self._answer(ApiError(504, message, type="timeout_error", code="request_timeout"))
        except ClientGone:
            self.status = CLIENT_LEFT
        except (ApiError, CapacityError) as error:
            await self.refuse(self._as_api_error(error))
        finally:
            if self._writer is not None:
                self._context.metrics.stream_closed()

    async def refuse(self, error: ApiError) -> None:
        """Answer an error without the body. What still comes of it is thrown away for a moment: a connection that is closed on a client
        that is still sending takes the answer with it.
        """
        if self._body_read:
            await self._answer(error)
            return
        drained = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._discard_body, drained)
            if self._announced_bytes() <= SMALL_BODY_BYTES:  # it is here already, or soon: then the connection stays usable
                with trio.move_on_after(LINGER_S):
                    await drained.wait()
            data = _encoder.encode(error.body)
            closing = () if drained.is_set() else CLOSE
            headers = (("content-type", "application/json"), ("content-length", str(len(data))), *error.headers, *closing)
            await self._start(error.status, headers)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            with trio.move_on_after(LINGER_S):
                await drained.wait()
            await self._put(b"", more=False)
            nursery.cancel_scope.cancel()

    async def _discard_body(self, drained: trio.Event) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                drained.set()

    async def _run_watched(self, handler: Handler) -> None:
        """Call the handler; cancel it when the client leaves. A disconnect after the last byte is the end of every connection."""
        failure: BaseException | None = None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.complete:
                gone = True
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                await handler(self._context, self)
                if not self.complete:
                    failure = InvariantError(f"the handler of {self.scope['path']} ended without an answer")
            except Exception as error:
                failure = error
            except BaseExceptionGroup as group:
                # Tasks of the handler's: its own failure beside the cancellation of the others.
                cancelled, failure = group.split(trio.Cancelled)
                if cancelled is None:
                    raise
                raise cancelled from None
            finally:
                nursery.cancel_scope.cancel()
        if gone:
            self._log_fault(failure)
            raise ClientGone
        if failure is not None:
            await self._answer_failure(failure)

    def _log_fault(self, failure: BaseException | None) -> None:
        """What a handler raised when nobody reads the answer any more: faults of ours are still faults."""
        if failure is not None and self._as_api_error(failure).status == 500:
            _log.error("request %s failed", self.id, exc_info=failure)

    async def _answer_failure(self, failure: BaseException) -> None:
        if isinstance(failure, ClientGone):
            raise failure
        self._log_fault(failure)
        await self._answer(self._as_api_error(failure))

    def _as_api_error(self, failure: BaseException) -> ApiError:
        while isinstance(failure, BaseExceptionGroup):  # the first of a handler's tasks to fail
            failure = failure.exceptions[0]
        assert isinstance(failure, Exception)
        return as_api_error(failure, ready=self._context.engine.health.ok)

    async def _answer(self, error: ApiError) -> None:
        if self.complete:
            return
        if not self.started:
            await self.send_json(error.body, status=error.status, headers=error.headers)
        elif self._writer is not None:
            self.status = error.status
            await self._writer.fail(error)
        # Headers without their body: the connection is closed, and the client sees that the answer is cut.

    def _announced_bytes(self) -> float:
        """How large the body is said to be; infinite where that is not said."""
        declared = self.header(b"content-length")
        if declared is not None:
            return int(declared)  # digits: the protocol has checked that
        return 0 if self.header(b"transfer-encoding") is None else math.inf

    async def _read_body(self, limit: int) -> None:
        """Raises ApiError for a body that is too large or too slow, as early as that is known, CapacityError where all bodies together
        are too much, ClientGone where it never comes.
        """
        if limit < self._announced_bytes() < math.inf:
            raise _too_large(limit)
        timeout_s = self._context.config.body_timeout_s
        parts: list[bytes] = []
        size = 0
        with trio.move_on_after(timeout_s) as deadline, self._context.body_budget.share() as take:
            while not self._body_read:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                take(len(part))
                parts.append(part)
                self._body_read = not message.get("more_body", False)
        if deadline.cancelled_caught:
            raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", type="timeout_error", code="body_timeout")
        self.body = b"".join(parts)

    # -- sending --------------------------------------------------------------------------------------------------------------
    # A client that takes nothing for client_timeout_s is cut off by its connection, which is a disconnect to us.

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.started = True
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        raw.append((b"x-request-id", self.id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, data: bytes, *, more: bool) -> None:
        # A send is not a checkpoint: what the kernel takes at once is sent without one, and what it does not is not cut.
        await trio.lowlevel.checkpoint_if_cancelled()
        self.complete = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class EventWriter:
    """Server-sent events. Headers go out with the first write."""

    def __init__(self, call: Call, error_frame: Callable[[ApiError], bytes]) -> None:
        self._call = call
        self._error_frame = error_frame

    async def write(self, frames: bytes) -> None:
        """Send one or more whole frames."""
        if not self._call.started:
            headers = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"), ("x-accel-buffering", "no"))
            await self._call._start(200, headers)
        await self._call._put(frames, more=True)

    async def end(self) -> None:
        """Nothing more comes. A stream that was never written to is an empty one."""
        if not self._call.started:
            await self.write(b"")
        await self._call._put(b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """Say what went wrong, as the last frame: no finish reason, no [DONE]."""
        await self._call._put(self._error_frame(error), more=False)


def frame(value: object) -> bytes:
    """One unnamed event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_frame(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


DONE_FRAME = b"data: [DONE]\n\n"


def _error_frame(error: ApiError) -> bytes:
    return frame(error.body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", type="invalid_request_error", code="body_too_large")


Handler = Callable[["ApiContext", Call], Awaitable[None]]
