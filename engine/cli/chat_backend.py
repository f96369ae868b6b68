"""Where a chat's answers come from: a running server, or an engine inside this process. Both stream pieces and end with an account."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from engine.core.errors import RequestError, TwinferError

if TYPE_CHECKING:
    import httpx

    from engine.actors.config import EngineConfig
    from engine.actors.gateway import Gateway
    from engine.api.formats.base import ChatFormat
    from engine.core.sampling import SamplingParams
    from engine.tokenizer import Tokenizer

Message = dict[str, Any]
# Content and reasoning of a piece, in that order; one of them may be empty.
Say = Callable[[str, str], None]


class Account(msgspec.Struct, kw_only=True):
    """What one answer was: counts of tokens (None where the server does not say), times in seconds, and the number the context holds."""

    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    context_length: int | None = None
    ttft_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first one."""
        if self.ttft_s is None or self.completion_tokens is None or self.completion_tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return (self.completion_tokens - 1) / (self.total_s - self.ttft_s)


class Backend(Protocol):
    model: str

    async def answer(self, messages: list[Message], say: Say) -> Account:
        """Stream the next message. Raises TwinferError for what goes wrong; cancelling it stops the answer."""
        ...


OpenBackend = Callable[[], AbstractAsyncContextManager[Backend]]


class ServerBackend:
    """An OpenAI-compatible server. ``body`` holds the sampling values that were asked for."""

    def __init__(self, http: httpx.AsyncClient, model: str, body: dict[str, Any], context_length: int | None) -> None:
        self._http = http
        self.model = model
        self._body = body
        self._context_length = context_length

    async def answer(self, messages: list[Message], say: Say) -> Account:
        import httpx

        body = {"model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **self._body}
        account = Account(context_length=self._context_length)
        start_s = trio.current_time()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", content=msgspec.json.encode(body)) as response:
                await self._read(response, account, say, start_s)
        except httpx.TransportError as error:
            raise TwinferError(f"the server's connection broke: {str(error) or type(error).__name__}") from None
        account.total_s = trio.current_time() - start_s
        return account

    async def _read(self, response: httpx.Response, account: Account, say: Say, start_s: float) -> None:
        from engine.bench.client import bounded_body
        from engine.bench.endpoints import error_text, read_chunk
        from engine.bench.sse import EventParser

        if response.status_code != 200:
            raise TwinferError(f"the server answered {response.status_code}: {error_text(await bounded_body(response))}")
        parser = EventParser()
        async for chunk in response.aiter_raw():
            for data in parser.push(chunk):
                if data == b"[DONE]":
                    continue
                try:
                    piece = read_chunk(data)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise TwinferError(f"the server sent what is no chat chunk: {error}") from None
                if piece.error is not None:
                    raise TwinferError(f"the server broke the answer off: {piece.error}")
                if piece.has_output and account.ttft_s is None:
                    account.ttft_s = trio.current_time() - start_s
                if piece.content or piece.reasoning:
                    say(piece.content, piece.reasoning)
                account.finish_reason = piece.finish or account.finish_reason
                if piece.completion_tokens is not None:
                    account.completion_tokens = piece.completion_tokens
                    account.prompt_tokens, account.cached_tokens = piece.prompt_tokens, piece.cached_tokens
        if account.finish_reason is None:
            raise TwinferError("the server's answer ended without a finish reason")


class EngineBackend:
    """An engine in this process. ``params.max_tokens`` is replaced by what the context has room for where ``limit_tokens`` is None."""

    def __init__(
        self, engine: Gateway, model: str, chat_format: ChatFormat, params: SamplingParams, limit_tokens: int | None, stop: tuple[str, ...]
    ) -> None:
        self._engine = engine
        self.model = model
        self._format = chat_format
        self._params = params
        self._limit_tokens = limit_tokens
        self._stop = stop

    async def answer(self, messages: list[Message], say: Say) -> Account:
        from engine.actors.gateway import Generation
        from engine.api.formats.base import ChatInput

        start_s = trio.current_time()
        prepared = await trio.to_thread.run_sync(lambda: self._format.prepare(ChatInput(messages=messages)), abandon_on_cancel=True)
        prompt = prepared.prompt
        if isinstance(prompt, str):
            assert self._engine.tokenizer is not None  # it has a chat format
            prompt = tuple(self._engine.tokenizer.encode(prompt, add_special_tokens=prepared.add_special_tokens))
        room_tokens = self._engine.context_length - len(prompt)
        if room_tokens < 1:
            raise RequestError(
                f"the conversation has {len(prompt)} tokens and fills the context of {self._engine.context_length}; /reset it"
            )
        max_tokens = min(self._limit_tokens or room_tokens, room_tokens)
        generation = Generation(
            prompt=prompt,
            params=msgspec.structs.replace(self._params, max_tokens=max_tokens, grammar=prepared.grammar),
            stop=self._stop,
            skip_special_tokens=prepared.skip_special_tokens,
        )
        account = Account(context_length=self._engine.context_length)
        parser = prepared.make_parser()
        async with self._engine.generate(generation) as stream:
            async for output in stream:
                account.ttft_s = account.ttft_s or trio.current_time() - start_s
                deltas = [parser.push(output.text)]
                if output.finish_reason is not None:
                    account.finish_reason = output.finish_reason
                    deltas.append(parser.finish())
                for delta in deltas:
                    if delta.content or delta.reasoning:
                        say(delta.content, delta.reasoning)
            usage = stream.usage
        account.prompt_tokens, account.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        account.completion_tokens = usage.completion_tokens
        account.total_s = trio.current_time() - start_s
        return account


@asynccontextmanager
async def open_server_backend(base_url: str, api_key: str | None, model: str | None, body: dict[str, Any]) -> AsyncIterator[Backend]:
    """Raises TwinferError where nobody answers."""
    from engine.bench.probe import ask
    from engine.bench.runner import make_http

    async with make_http(base_url, api_key, 1) as http:
        answer = await ask(http, "GET", "/v1/models")
        listed = answer.get("data") if isinstance(answer, dict) else None
        models = [entry for entry in listed if isinstance(entry, dict) and "id" in entry] if isinstance(listed, list) else []
        if model is None and not models:
            raise TwinferError(f"{base_url}/v1/models names no model; give --model")
        name = model if model is not None else str(models[0]["id"])
        lengths = [entry.get("max_model_len") for entry in models if entry["id"] == name]
        yield ServerBackend(http, name, body, lengths[0] if lengths and isinstance(lengths[0], int) else None)


@asynccontextmanager
async def open_engine_backend(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    chat_format: ChatFormat,
    params: SamplingParams,
    limit_tokens: int | None,
    stop: tuple[str, ...],
) -> AsyncIterator[Backend]:
    from engine.actors.supervisor import open_engine

    async with open_engine(config, tokenizer) as engine:
        engine.begin_recording()
        yield EngineBackend(engine, config.workers[0].model, chat_format, params, limit_tokens, stop)
