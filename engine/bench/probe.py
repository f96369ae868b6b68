"""What the benchmark asks the server before it starts: the model's name, and whether it counts tokens."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import trio

from engine.bench.client import bounded_body
from engine.bench.prompts import MIN_SINGLE_WORDS, PromptMaker, single_token_words
from engine.core.errors import TwinferError

PROBE_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20


async def first_model(http: httpx.AsyncClient) -> str:
    """The first of /v1/models. Raises TwinferError where there is no such answer."""
    body = await ask(http, "GET", "/v1/models")
    try:
        name = body["data"][0]["id"]
    except (TypeError, KeyError, IndexError):
        raise TwinferError(f"{_url(http, '/v1/models')} names no model; give --model") from None
    return str(name)


async def ask(http: httpx.AsyncClient, method: str, path: str, body: object = None) -> Any:
    """A small JSON question. Raises TwinferError that says what came instead of an answer, and where it did not come in time."""
    content = None if body is None else msgspec.json.encode(body)
    url = _url(http, path)
    with trio.move_on_after(PROBE_TIMEOUT_S) as deadline:
        try:
            async with http.stream(method, path, content=content, timeout=PROBE_TIMEOUT_S) as response:
                answer = await bounded_body(response, MAX_ANSWER_BYTES)
        except httpx.HTTPError as error:
            raise TwinferError(f"{url}: {error or type(error).__name__}; is the server running?") from None
    if deadline.cancelled_caught:
        raise TwinferError(f"{url}: no whole answer within {PROBE_TIMEOUT_S:g} s")
    if response.status_code != 200:
        raise TwinferError(f"{url} answered {response.status_code}: {answer[:200].decode('utf-8', 'replace')}")
    try:
        return msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        raise TwinferError(f"{url} answered something else than JSON, or too much of it") from None


async def make_prompts(http: httpx.AsyncClient, model: str, endpoint: str, seed: int) -> PromptMaker:
    """The best source of exact lengths that the server offers; see engine.bench.prompts."""

    async def count(text: str) -> int:
        answer = await ask(http, "POST", "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        number = answer.get("count") if isinstance(answer, dict) else None
        if number is None and isinstance(answer, dict) and isinstance(answer.get("tokens"), list):
            number = len(answer["tokens"])
        if not isinstance(number, int) or number < 1:
            raise TwinferError("/tokenize counts no tokens")
        return number

    try:
        words = await single_token_words(count)
    except TwinferError:
        words = ()
    if len(words) >= MIN_SINGLE_WORDS:
        return PromptMaker("tokenize", seed, words)
    return PromptMaker("ids" if endpoint == "completions" else "words", seed)


def _url(http: httpx.AsyncClient, path: str) -> str:
    return str(http.base_url).rstrip("/") + path
