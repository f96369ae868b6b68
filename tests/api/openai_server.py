"""What the tests of the OpenAI routes share: answers told token by token, a chat format with reasoning and tools, servers in a thread.

A scripted worker samples by position. ``answering(text)`` gives a script and an engine that say exactly ``text`` and end it, to every
prompt of one token; ``TaggedFormat`` makes prompts of one token out of every chat.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import trio

from engine.actors.config import EngineConfig
from engine.api.formats.base import ChatInput, Delta, PlainParser, PreparedChat, ToolCallDelta
from engine.core.errors import RequestError
from tests.actors.harness import engine_config
from tests.actors.scripted_worker import Script
from tests.api.harness import Server, open_server, tokenizer

PROMPT = (5,)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"model": "scripted", "prompt": list(PROMPT)},
    RESPONSES: {"model": "scripted", "input": "Hi"},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "find")]


def answer_script(text: str, *, end: bool = True, **values: Any) -> Script:
    return Script(tokens=(0, *tokenizer().encode(text), *([1] if end else [])), **values)


def answering(text: str, *, end: bool = True, **supervision: Any) -> EngineConfig:
    return engine_config(answer_script(text, end=end), scheduler={"eos_token_ids": (1,)}, **supervision)


class TaggedFormat:
    """Answers are ``<think>reasoning</think>content`` with calls ``<call name>arguments</call>`` in it. Keeps what it was asked."""

    name = "tagged"
    has_reasoning = True
    has_tools = True

    def __init__(self) -> None:
        self.asked: list[ChatInput] = []
        self.bodies: list[dict[str, Any]] = []

    def prepare(self, chat: ChatInput) -> PreparedChat:
        self.asked.append(chat)
        if chat.messages[-1].get("content") == "refuse":
            raise RequestError("the template refuses this", param="messages")
        return PreparedChat(prompt=PROMPT, make_parser=TaggedParser)

    def prepare_responses(self, body: dict[str, Any], chat: ChatInput) -> PreparedChat:
        self.bodies.append(body)
        return self.prepare(chat)


class PlainFormat(TaggedFormat):
    """All text is content. The prompt is the last message, as text."""

    name = "plain"
    has_reasoning = False
    has_tools = False

    def prepare(self, chat: ChatInput) -> PreparedChat:
        self.asked.append(chat)
        return PreparedChat(prompt=str(chat.messages[-1]["content"]), make_parser=PlainParser)


class TaggedParser:
    """One tag or character at a time: what a piece adds does not depend on where it was cut."""

    def __init__(self) -> None:
        self._text = ""
        self._tag: str | None = None  # the call that is open
        self.in_reasoning = False
        self.num_tool_calls = 0

    def push(self, text: str) -> Delta:
        self._text += text
        return self._read(at_end=False)

    def finish(self) -> Delta:
        return self._read(at_end=True)

    def _read(self, *, at_end: bool) -> Delta:
        total = Delta()
        while self._text:
            if not self._text.startswith("<"):
                head, found, rest = self._text.partition("<")
                self._text = found + rest
                total = _added(total, self._plain(head))
                continue
            tag, closed, rest = self._text.partition(">")
            if not closed:
                if at_end:
                    total, self._text = _added(total, self._plain(tag)), ""
                break
            self._text = rest
            total = _added(total, self._tagged(tag[1:]))
        return total

    def _plain(self, text: str) -> Delta:
        if self.in_reasoning:
            return Delta(reasoning=text)
        if self._tag is not None:
            return Delta(tool_calls=(ToolCallDelta(self.num_tool_calls - 1, text),))
        return Delta(content=text)

    def _tagged(self, tag: str) -> Delta:
        if tag in ("think", "/think"):
            self.in_reasoning = tag == "think"
        elif tag.startswith("call "):
            self._tag = tag
            index = self.num_tool_calls
            self.num_tool_calls += 1
            return Delta(tool_calls=(ToolCallDelta(index, "", f"call_{index}", tag.removeprefix("call ")),))
        elif tag == "/call":
            self._tag = None
        else:
            return self._plain(f"<{tag}>")
        return Delta()


def _added(first: Delta, second: Delta) -> Delta:
    return Delta(first.content + second.content, first.reasoning + second.reasoning, first.tool_calls + second.tool_calls)


# -- reading answers --------------------------------------------------------------------------------------------------------------


def events(text: str) -> list[tuple[str | None, Any]]:
    """(event's name, data) of each server-sent event; data is decoded but for [DONE]. The framing itself is checked."""
    assert text.endswith("\n\n")
    found: list[tuple[str | None, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        assert len(lines) == 1
        assert lines[0].startswith("data: ")
        data = lines[0].removeprefix("data: ")
        found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    data = [value for _, value in events(text)]
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return data[:-1]


async def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    """The route's least body, with ``fields`` over it; a field that is Ellipsis is left out."""
    body = {name: value for name, value in (BODIES[path] | fields).items() if value is not ...}
    return await server.client.post(path, json=body)


async def whole(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    response = await post(server, path, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def streamed(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await post(server, path, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks(response.text)


@contextlib.asynccontextmanager
async def begun(server: Server, path: str, **fields: Any) -> AsyncIterator[AsyncIterator[str]]:
    """A stream whose first line has come; leaving the context closes the connection."""
    body = {name: value for name, value in (BODIES[path] | {"stream": True} | fields).items() if value is not ...}
    async with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith(("data: ", "event: "))
        yield lines


# -- a server in a thread ---------------------------------------------------------------------------------------------------------


class ThreadedServer:
    """For tests that are not async: Hypothesis, synchronous clients."""

    def __init__(self, server: Server, token: trio.lowlevel.TrioToken) -> None:
        self.base_url = server.base_url
        self.server = server
        self._token = token

    def run(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        return trio.from_thread.run(function, *arguments, trio_token=self._token)


@contextlib.contextmanager
def serve_in_thread(open_one: Callable[[], contextlib.AbstractAsyncContextManager[Server]]) -> Iterator[ThreadedServer]:
    started: queue.Queue[ThreadedServer | BaseException] = queue.Queue()
    stop = trio.Event()

    async def main() -> None:
        async with open_one() as server:
            started.put(ThreadedServer(server, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    server = started.get(timeout=60)
    if isinstance(server, BaseException):
        thread.join()
        raise server
    try:
        yield server
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=server._token)
        thread.join(timeout=30)


@contextlib.asynccontextmanager
async def open_answering(text: str, *, end: bool = True, **values: Any) -> AsyncIterator[Server]:
    """A server that gives one answer, in TaggedFormat unless another format is named."""
    values.setdefault("chat_format", TaggedFormat())
    async with open_server(engine=answering(text, end=end), **values) as server:
        yield server
