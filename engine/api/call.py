"""One HTTP request inside its handler: the body read under bounds, the client watched, the answer sent.

A handler is ``async def handler(context, call)``. It raises for what is wrong; as long as nothing was sent, that becomes an answer
with the right status. When the client leaves, or takes nothing for too long, the handler is cancelled: whatever it holds (an
engine's stream above all) is given back by leaving its contexts.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import trio

from engine.api.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from engine.api.context import ApiContext

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Access = Literal["public", "key", "metrics"]
Headers = tuple[tuple[str, str], ...]

_log = logging.getLogger("twinfer.api")
_encoder = msgspec.json.Encoder()


class Tenant(msgspec.Struct, frozen=True):
    """Who asks. ``salt`` keeps the KV of different keys apart; None where the server has no keys."""

    key_id: str | None = None  # of the log: never the key
    salt: str | None = None


class ClientGone(Exception):  # noqa: N818 - not an error of ours
    """The client has left or takes nothing: there is nobody to answer."""


class Call:
    """``body`` is complete when the handler is called."""

    def __init__(self, context: ApiContext, scope: Scope, receive: Receive, send: Send) -> None:
        self._context = context
        self._receive = receive
        self._send = send
        self.scope = scope
        self.id = secrets.token_hex(12)
        self.tenant = Tenant()
        self.body = b""
        self.started = False  # headers are out
        self.status: int | None = None
        self._writer: EventWriter | None = None

    async def send_json(self, value: object, *, status: int = 200, headers: Headers = ()) -> None:
        await self.send_bytes(_encoder.encode(value), "application/json", status=status, headers=headers)

    async def send_bytes(self, data: bytes, content_type: str, *, status: int = 200, headers: Headers = ()) -> None:
        await self._start(status, (("content-type", content_type), ("content-length", str(len(data))), *headers))
        await self._put(data, more=False)

    def events(self, error_frame: Callable[[ApiError], bytes] | None = None) -> EventWriter:
        """Answer with server-sent events. ``error_frame`` renders what goes wrong after the headers; the default is OpenAI's."""
        self._writer = EventWriter(self, error_frame or _error_frame)
        return self._writer

    # -- for the endpoint -----------------------------------------------------------------------------------------------------

    async def run(self, handler: Handler) -> None:
        """Read the body, call ``handler`` while the client is there, answer for what it raises."""
        config = self._context.config
        try:
            with trio.move_on_after(config.request_timeout_s) as limit:
                await self._read_body()
                await self._run_watched(handler)
            if limit.cancelled_caught:
                await self._answer_error(
                    ApiError(408, f"the request took longer than {config.request_timeout_s:g} s", type="timeout_error", code="timeout")
                )
        except ClientGone:
            self.status = 499

    async def _run_watched(self, handler: Handler) -> None:
        failure: Exception | None = None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                await handler(self._context, self)
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
        if gone:
            raise ClientGone
        if failure is not None:
            if isinstance(failure, ClientGone):
                raise failure
            await self.answer_failure(failure)

    async def answer_failure(self, failure: Exception) -> None:
        error = as_api_error(failure, ready=self._context.engine.health.ok)
        if error.status == 500:
            _log.error("request %s failed", self.id, exc_info=failure)
        await self._answer_error(error)

    async def _answer_error(self, error: ApiError) -> None:
        if not self.started:
            await self.send_json(error.body, status=error.status, headers=error.headers)
        elif self._writer is not None:
            self.status = error.status
            await self._writer.fail(error)

    async def _read_body(self) -> None:
        config = self._context.config
        limit = config.max_body_bytes
        declared = dict(self.scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise await self._refuse_body(limit)
        parts: list[bytes] = []
        size = 0
        with trio.move_on_after(config.body_timeout_s) as deadline:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise await self._refuse_body(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    break
        if deadline.cancelled_caught:
            await self._answer_error(
                ApiError(408, f"the body did not arrive within {config.body_timeout_s:g} s", type="timeout_error", code="body_timeout",
                         headers=(("connection", "close"),))
            )  # fmt: skip
            raise ClientGone
        self.body = b"".join(parts)

    async def _refuse_body(self, limit: int) -> ClientGone:
        """Answer without reading on: the connection cannot be used any more."""
        await self._answer_error(
            ApiError(413, f"the body has more than {limit} bytes", type="invalid_request_error", code="body_too_large",
                     headers=(("connection", "close"),))
        )  # fmt: skip
        return ClientGone()

    # -- sending --------------------------------------------------------------------------------------------------------------

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.started = True
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        raw.append((b"x-request-id", self.id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, data: bytes, *, more: bool) -> None:
        """Send under a deadline: what the client does not take for ``send_timeout_s`` it will not get."""
        with trio.move_on_after(self._context.config.send_timeout_s) as deadline:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        if deadline.cancelled_caught:
            raise ClientGone


class EventWriter:
    """Server-sent events. Headers go out with the first write."""

    def __init__(self, call: Call, error_frame: Callable[[ApiError], bytes]) -> None:
        self._call = call
        self._error_frame = error_frame

    async def write(self, frames: bytes) -> None:
        """Send one or more whole frames. Raises ClientGone where the client takes nothing for ``send_timeout_s``."""
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


Handler = Callable[["ApiContext", Call], Awaitable[None]]
