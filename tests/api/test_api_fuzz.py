"""Bodies that nobody writes: whatever comes, the answer is a good one or an error in OpenAI's form, and nothing stays behind.

Beside them the text of streams: every chunking of stop strings and of characters over tokens gives what the bytes say.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.actors.harness import engine_config
from tests.actors.scripted_worker import Script
from tests.api.harness import assert_idle, open_server, tokenizer
from tests.api.openai_server import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    TOOLS,
    PlainFormat,
    ThreadedServer,
    chunks,
    events,
    open_answering,
    serve_in_thread,
)

FULL: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "s", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r",
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ],
        "stream": False, "n": 2, "max_tokens": 3, "max_completion_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1}, "seed": 1, "stop": ["x"],
        "stop_token_ids": [9], "min_tokens": 0, "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
        "priority": 1, "cache_salt": "s", "user": "u", "metadata": {"a": "b"}, "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
        "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "low", "thinking": {"type": "enabled"},
        "chat_template_kwargs": {"enable_thinking": True}, "add_generation_prompt": True, "continue_final_message": False,
        "stream_options": None, "structured_outputs": None, "modalities": ["text"], "service_tier": "auto", "store": False,
    },
    COMPLETIONS: {
        "model": "scripted", "prompt": [[5], [6, 7]], "stream": False, "n": 2, "max_tokens": 3, "logprobs": 1, "echo": False, "best_of": 2,
        "temperature": 0.5, "stop": "x", "seed": 1, "suffix": None, "logit_bias": {"5": -1}, "min_tokens": 0, "add_special_tokens": True,
        "stop_token_ids": [9], "structured_outputs": {"regex": "a+"}, "response_format": None, "stream_options": None, "user": "u",
    },
    RESPONSES: {
        "model": "scripted",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "instructions": "i", "stream": False, "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_logprobs": 1,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}, "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}], "tool_choice": "auto", "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"], "truncation": "disabled", "store": False, "previous_response_id": None, "seed": 1,
    },
}  # fmt: skip

NUMBERS = st.sampled_from([0, 1, -1, 2, 20, 21, 128, 129, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.0, 1.5, -0.5, 1e308])
TEXTS = st.sampled_from(
    ["", "x", "auto", "none", "text", "function", "\x00", "🐈", "a" * 300, "ſ", "\u2028", "<think>", "[DONE]", "data: x\n\n"]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=5
)
_SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


Path = tuple[Any, ...]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value inside."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(body: dict[str, Any], path: Path, change: Any, *, remove: bool = False) -> None:
    target: Any = body
    try:
        for key in path[:-1]:
            target = target[key]
        if remove:
            del target[path[-1]]
        else:
            target[path[-1]] = change
    except (KeyError, IndexError, TypeError):
        pass  # an earlier mutation took the place away


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A valid body with a few of its fields, and some mutations of them."""
    body = copy.deepcopy(FULL[path])
    for name in draw(st.sets(st.sampled_from(sorted(body)))):
        del body[name]
    if draw(st.booleans()):
        body["stream"] = True
    for _ in range(draw(st.integers(0, 3))):
        found = list(places(body))
        if found and draw(st.integers(0, 5)) > 0:
            place: Path = draw(st.sampled_from(found))
            put(body, place, draw(VALUES), remove=draw(st.integers(0, 3)) == 0)
        else:
            body[draw(TEXTS)] = draw(VALUES)
    return body


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with serve_in_thread(lambda: open_answering("<think>ä</think>🐈 <call add>{}</call>")) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: ThreadedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=20) as client:
        yield client


def check_answer(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) < 2000
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert not any(isinstance(data, dict) and data.get("error") for name, data in events(response.text) if name is None)
    else:
        assert response.json()["usage"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_mutated_bodies(path: str, server: ThreadedServer, http: httpx.Client) -> None:
    statuses: set[int] = set()

    @_SETTINGS
    @given(body=bodies(path))
    def run(body: dict[str, Any]) -> None:
        response = http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
        check_answer(response)
        statuses.add(response.status_code)

    run()
    assert statuses >= {200, 400}  # neither all refused nor all taken
    server.run(assert_idle, server.server)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_bytes_that_are_hardly_json(path: str, server: ThreadedServer, http: httpx.Client) -> None:
    valid = json.dumps(FULL[path]).encode()

    @_SETTINGS
    @given(position=st.integers(0, len(valid) - 1), piece=st.binary(max_size=4), length=st.integers(0, 8))
    def run(position: int, piece: bytes, length: int) -> None:
        check_answer(http.post(path, content=valid[:position] + piece + valid[position + length :]))

    run()
    server.run(assert_idle, server.server)


# -- text -------------------------------------------------------------------------------------------------------------------------

# Every kind of trouble: characters of one to four bytes, each in several tokens, beside bytes that begin one and never end it.
TROUBLE = "aaab abab é🐈\u200d👩 ab\n東京aabaab🦊"
TOKENS = (*tokenizer().encode(TROUBLE), *tokenizer().encode("🐈")[:2], *tokenizer().encode("ab"), tokenizer().encode("é")[-1])


@pytest.fixture(scope="module")
def troubled() -> Iterator[httpx.Client]:
    with (
        serve_in_thread(lambda: open_server(engine=engine_config(Script(tokens=TOKENS)), chat_format=PlainFormat())) as found,
        httpx.Client(base_url=found.base_url, timeout=20) as client,
    ):
        yield client


def expected_text(num_prompt: int, num_tokens: int, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: all bytes decoded at once, cut at the stop string that is complete first (the longer of two)."""
    ids = [TOKENS[(num_prompt + step) % len(TOKENS)] for step in range(num_tokens)]
    text = b"".join(tokenizer().token_bytes(token) for token in ids).decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(
    st.sampled_from(["ab", "aab", "é", "🐈\u200d", "b é", "京aa", "zz", "\ufffd", "a", "東京", "👩 ab\n"]), max_size=3, unique=True
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_prompt=st.integers(1, len(TOKENS)), num_tokens=st.integers(1, 40), stops=STOPS, n=st.integers(1, 2))
def test_streamed_text_is_what_the_bytes_say(troubled: httpx.Client, num_prompt: int, num_tokens: int, stops: list[str], n: int) -> None:
    text, stop = expected_text(num_prompt, num_tokens, stops)
    # A prompt of ASCII: nothing of it is left over for the first character.
    body = {"model": "scripted", "prompt": tokenizer().encode("z") * num_prompt, "max_tokens": num_tokens, "stop": stops, "n": n}
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "z" * num_prompt}]} | {
        name: body[name] for name in ("max_tokens", "stop", "n")
    }
    whole = troubled.post(COMPLETIONS, json=body).json()
    assert [(choice["text"], choice["stop_reason"]) for choice in whole["choices"]] == [(text, stop)] * n
    usage = [whole["usage"]["completion_tokens"]]
    for path, request, field in ((COMPLETIONS, body, "text"), (CHAT, chat, "content")):
        response = troubled.post(path, json=request | {"stream": True, "stream_options": {"include_usage": True}})
        found = chunks(response.text)
        texts = ["" for _ in range(n)]
        for choice in (choice for chunk in found for choice in chunk["choices"]):
            piece = choice["text"] if field == "text" else choice["delta"].get("content", "")
            assert text.startswith(texts[choice["index"]] + piece)
            texts[choice["index"]] += piece
        assert texts == [text] * n
        usage.append(found[-1]["usage"]["completion_tokens"])
    assert len(set(usage)) == 1


def test_the_mutations_begin_with_valid_bodies(http: httpx.Client) -> None:
    for path, body in FULL.items():
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
