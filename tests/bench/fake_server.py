"""A small HTTP server that answers each POST with a script of bytes: for the odd streams that a real server sends once in a while."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import trio

Answer = Sequence[bytes | float | trio.Event]  # bytes to send, seconds to wait, an event to wait for
Handler = Callable[[str, dict[str, Any]], Answer]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, "prompt_tokens_details": details}


def chat_chunk(content: str | None = None, *, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    delta: dict[str, Any] = {} if content is None else {"content": content}
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **extra}


def role_chunk() -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
    }


def stream(*values: object, done: bool = True) -> list[bytes]:
    """A well-formed answer: one HTTP chunk an event."""
    frames = [chunked(event(value)) for value in values] + ([chunked(DONE)] if done else [])
    return [STREAM_HEAD, *frames, END]


def plain(status: int, value: object, *headers: str) -> list[bytes]:
    body = json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n" + body]


class FakeServer:
    """``requests`` holds (path, body) of the generations in the order they came, ``headers`` those of the last one; ``peak`` is the most
    answers under way at once, ``gone`` counts those that the client broke off."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        self.num_connections = 0
        self.gone = 0
        self.running = 0
        self.peak = 0
        self.url = ""

    async def _serve(self, connection: trio.SocketStream) -> None:
        self.num_connections += 1
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            buffer = b""
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = await connection.receive_some(65536)
                    if not data:
                        return
                    buffer += data
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                self.headers = headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                size = int(headers.get("content-length", "0"))
                while len(buffer) < size:
                    data = await connection.receive_some(65536)
                    if not data:
                        return
                    buffer += data
                body, buffer = buffer[:size], buffer[size:]
                path = lines[0].split()[1]
                parsed = json.loads(body) if body else {}
                if not await self._answer(connection, path, parsed):
                    return

    async def _answer(self, connection: trio.SocketStream, path: str, body: dict[str, Any]) -> bool:
        if path == "/v1/models":
            script: Answer = plain(200, {"object": "list", "data": [{"id": "fake-model"}]})
        else:
            if path != "/tokenize":
                self.requests.append((path, body))
            script = self._handler(path, body)
        self.running += path not in ("/v1/models", "/tokenize")
        self.peak = max(self.peak, self.running)
        try:
            for part in script:
                if isinstance(part, bytes):
                    await connection.send_all(part)
                elif isinstance(part, trio.Event):
                    await part.wait()
                else:
                    await trio.sleep(part)
        except trio.BrokenResourceError:
            self.gone += 1
            raise
        finally:
            self.running -= path not in ("/v1/models", "/tokenize")
        if script and script[-1] == b"":  # the marker of an answer that breaks off
            await connection.aclose()
            return False
        return True


CUT = b""


@contextlib.asynccontextmanager
async def fake_server(handler: Handler) -> AsyncIterator[FakeServer]:
    server = FakeServer(handler)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.start_soon(trio.serve_listeners, server._serve, listeners)
        yield server
        nursery.cancel_scope.cancel()


@contextlib.contextmanager
def threaded_server(handler: Handler) -> Iterator[FakeServer]:
    """The same on a thread of its own, for commands that run trio themselves."""
    opened: queue.SimpleQueue[tuple[FakeServer, trio.lowlevel.TrioToken, trio.CancelScope]] = queue.SimpleQueue()

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with fake_server(handler) as server:
                opened.put((server, trio.lowlevel.current_trio_token(), scope))
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    server, token, scope = opened.get(timeout=10)
    try:
        yield server
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()
