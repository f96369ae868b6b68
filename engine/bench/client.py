"""One request to the server: sent, read to its end, and what became of it. Nothing is retried: a retry would hide what a user sees.

Kinds of errors: "connect" (no connection), "http_<status>", "timeout" (the whole request), "error_event" (an error inside the stream),
"cut" (the stream ended, or the connection broke, without a finish reason), "malformed" (no event stream, or an event that is not the
route's JSON). A request that the client itself left is cancelled, which is no error.
"""

from __future__ import annotations

import httpx
import msgspec
import trio

from engine.bench.endpoints import Endpoint, error_text
from engine.bench.record import RequestRecord, TokenCounter
from engine.bench.sse import EventParser, EventTooLongError
from engine.bench.workload import Work
from engine.core.errors import TwinferError
from engine.core.metrics import RequestMetrics

MAX_ERROR_BODY_BYTES = 64 << 10


class _Failure(TwinferError):  # noqa: N818 - a kind and a text, raised out of the reading
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Prepared(msgspec.Struct, frozen=True):
    """A request ready to be sent; ``scheduled_s`` (trio's clock) is when it should be, None in the closed loop."""

    work: Work
    body: bytes
    prompt_digest: bytes
    scheduled_s: float | None


class Client:
    """Sends requests of one run over one pool of connections."""

    def __init__(self, http: httpx.AsyncClient, endpoint: Endpoint, timeout_s: float) -> None:
        self._http = http
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def send(self, prepared: Prepared) -> RequestRecord:
        """Never raises for what the server or the network does; the record says it."""
        work, sent_s = prepared.work, trio.current_time()
        record = RequestRecord(
            metrics=RequestMetrics(request=work.index, arrived_s=sent_s, num_prompt_tokens=0),
            asked_input_tokens=work.input_tokens,
            asked_output_tokens=work.output_tokens,
            scheduled_s=prepared.scheduled_s,
            prompt_digest=prepared.prompt_digest,
        )
        counter = TokenCounter(record.metrics)
        cancel_after_s = work.cancel_after_s if work.cancel_after_s is not None else float("inf")
        with trio.move_on_after(min(self._timeout_s, cancel_after_s)) as limit:
            try:
                await self._read(record, counter, prepared.body)
            except _Failure as failure:
                record.error, record.message = failure.kind, str(failure)
            except EventTooLongError as error:
                record.error, record.message = "malformed", str(error)
            except httpx.TransportError as error:
                is_before = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol))
                record.error, record.message = "connect" if is_before else "cut", f"{type(error).__name__}: {error}"
        if limit.cancelled_caught:
            if work.cancel_after_s is not None and cancel_after_s <= self._timeout_s:
                record.cancelled = True
            else:
                record.error, record.message = "timeout", f"not finished after {self._timeout_s:g} s"
        reason = "abort" if record.cancelled else "error" if record.error is not None else counter.finish
        record.count_source = counter.close(trio.current_time(), reason or "error")
        return record

    async def _read(self, record: RequestRecord, counter: TokenCounter, body: bytes) -> None:
        async with self._http.stream("POST", self._endpoint.path, content=body) as response:
            record.status = response.status_code
            if response.status_code != 200:
                raise _Failure(f"http_{response.status_code}", error_text(await bounded_body(response)))
            content_type = response.headers.get("content-type", "")
            if not content_type.startswith("text/event-stream"):
                raise _Failure("malformed", f"the answer is {content_type[:80] or 'untyped'}, not an event stream")
            parser = EventParser()
            async for chunk in response.aiter_raw():
                now_s = trio.current_time()
                for data in parser.push(chunk):
                    record.num_events += 1
                    if data != b"[DONE]":
                        self._fold(counter, data, now_s)
        if counter.finish is None:
            raise _Failure("cut", "the stream ended without a finish reason")

    def _fold(self, counter: TokenCounter, data: bytes, now_s: float) -> None:
        try:
            piece = self._endpoint.read(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Failure("malformed", f"an event is not what {self._endpoint.path} sends: {error}") from None
        counter.add(piece, now_s)
        if piece.error is not None:
            raise _Failure("error_event", piece.error)
        if piece.finish in ("error", "abort"):
            raise _Failure("error_event", f"the finish reason is {piece.finish}")


async def bounded_body(response: httpx.Response, limit_bytes: int = MAX_ERROR_BODY_BYTES) -> bytes:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit_bytes:
            break
    return body[:limit_bytes]
