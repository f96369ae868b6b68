"""Clients that mean harm, or are broken in ways that look like it: what one of them does costs nobody else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio

from engine.api.config import ApiConfig
from engine.api.schema import common
from engine.core.errors import RequestError
from engine.tokenizer import LONG_TEXT_CHARS, Tokenizer, refuse_far_too_long
from tests.actors.harness import engine_config, until
from tests.api.harness import assert_idle, error_code, open_server, parse_response, raw_client, request_bytes, script_of, tokenizer
from tests.api.openai_server import BODIES, CHAT, COMPLETIONS, RESPONSES, open_answering
from tests.test_tokenizer import byte_fallback_json, byte_level_json, word_piece_json

LONG = json.dumps({"model": "scripted", "prompt": [5], "max_tokens": 100, "ignore_eos": True}).encode()


@pytest.mark.parametrize("after", [b"\r\n", request_bytes("POST", COMPLETIONS, LONG), b"GET / HT", b"x" * 200_000])
async def test_a_client_that_leaves_is_noticed_behind_requests_of_its_own_that_wait(after: bytes) -> None:
    """What it has sent already is not read before the answer is complete; that it has left still ends the answer."""
    config = ApiConfig(port=0, client_timeout_s=0.3)  # also for more than is read ahead, whose end cannot be seen
    async with open_server(engine=engine_config(script_of("abc", step_s=0.2)), config=config) as server:
        async with raw_client(server) as client:
            await client.send(request_bytes("POST", COMPLETIONS, LONG) + after)
            await until(lambda: server.gateway.num_requests == 1)
        await until(lambda: server.gateway.num_requests == 0, timeout_s=5.0)
        await until(lambda: server.app.num_calls == 0)


async def test_requests_that_wait_behind_a_long_answer_are_served() -> None:
    async with open_server(engine=engine_config(script_of("abc", step_s=0.02))) as server, raw_client(server) as client:
        body = json.dumps({"model": "scripted", "prompt": [5], "max_tokens": 10, "stream": True, "ignore_eos": True}).encode()
        await client.send(request_bytes("POST", COMPLETIONS, body))
        await client.receive_until(b"data: ")
        await client.send(request_bytes("GET", "/version")[:10])
        await client.receive_until(b"data: ")
        await client.send(request_bytes("GET", "/version")[10:] + request_bytes("GET", "/v1/models", headers="connection: close\r\n"))
        rest = await client.receive_all()
        assert rest.index(b"[DONE]") < rest.index(b'"version"') < rest.index(b'"object":"list"')
        await assert_idle(server)


async def test_a_body_of_two_lengths_is_refused_with_its_connection() -> None:
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with open_server() as server, raw_client(server) as client:
        await client.send(request_bytes("POST", "/tokenize", smuggled, headers="transfer-encoding: chunked\r\n"))
        status, headers, _ = parse_response(await client.receive_all())
        assert (status, headers["connection"]) == (400, "close")


async def test_a_path_is_matched_to_its_last_character() -> None:
    async with open_server() as server:
        for path in ("/health%0a", "/v1/models%0A", "/v1/models/scripted%0a", "/v1/models/a%0ab", "//health", "/health/%2e%2e/version"):
            answer = await server.client.get(path)
            assert (answer.status_code, error_code(answer.content)) == (404, "not_found"), path
        for path in ("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/%ff"):
            assert error_code((await server.client.get(path)).content) == "model_not_found"


async def test_errors_repeat_no_more_of_a_body_than_a_line() -> None:
    long = "x" * 100_000
    changes: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": long, "content": "a"}]}),
        (CHAT, {"model": long}),
        (CHAT, {long: 1}),
        (CHAT, {"chat_template_kwargs": {long: 1}}),
        (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": long}}}}),
        (COMPLETIONS, {"logit_bias": {long: 1}}),
        (RESPONSES, {"input": [{"type": long}]}),
        (RESPONSES, {"tools": [{"type": long}]}),
    ]
    async with open_answering("Hi") as server:
        for path, change in changes:
            answer = await server.client.post(path, json=BODIES[path] | change)
            assert answer.status_code in (400, 404)
            assert error_code(answer.content)
            assert len(answer.content) < 5000, change.keys()
        for number in ("1" + "0" * 4000, "-1" + "0" * 5000, "1e999"):
            data = json.dumps(BODIES[COMPLETIONS])[:-1] + f', "seed": {number}}}'
            answer = await server.client.post(COMPLETIONS, content=data)
            assert answer.status_code == 400
            assert len(answer.content) < 5000


async def test_names_of_functions_end_where_they_end() -> None:
    function = {"name": "add\n", "parameters": {"type": "object"}}
    async with open_answering("Hi") as server:
        for path, tool in ((CHAT, {"type": "function", "function": function}), (RESPONSES, {"type": "function"} | function)):
            answer = await server.client.post(path, json=BODIES[path] | {"tools": [tool]})
            assert answer.status_code == 400
            assert "name" in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (b"[" + b"[]," * 7 + b"[]]", False),
        (b"[" + b"[]," * 6 + b"[]]", True),
        (b"[" + b"{}," * 8 + b"1]", False),
        (b"[" + b"1," * 20 + b"1]", True),
        (b"[" + b"1," * 21 + b"1]", False),
        (b"[" + b'"",' * 10 + b'""]', False),
        (b"[" + rb'"\\",' * 21 + b"1]", False),
        (b'"' + b"[{,}]" * 100 + b'"', True),
        (b'"' + rb"[\"," * 100 + b'"', True),  # brackets and quotes of a text
        (b'["' + rb"[,\\\"" * 100 + b'",' + b"[]," * 8 + b"1]", False),
        (b'"' + b"[," * 100, True),  # a string that does not end: the decoder's business
        (b'"' + b"[," * 100 + b"\\", True),
    ],
)
def test_values_of_a_body_are_counted_outside_its_texts(body: bytes, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "MAX_CONTAINERS", 8)
    monkeypatch.setattr(common, "MAX_VALUES", 20)
    monkeypatch.setattr(common, "MAX_STRINGS", 10)
    if fits:
        common.check_number_of_values(body)
    else:
        with pytest.raises(RequestError, match="too many values; allowed: 20 altogether, 10 strings, 8 objects and lists"):
            common.check_number_of_values(body)


async def test_bodies_of_too_many_values_are_refused_on_every_route() -> None:
    lists = b"[" + b"[]," * (common.MAX_CONTAINERS + 1) + b"[]]"
    async with open_server() as server:
        for path in (*BODIES, "/tokenize", "/detokenize"):
            answer = await server.client.post(path, content=b'{"prompt": ' + lists + b"}")
            assert (answer.status_code, error_code(answer.content)) == (400, "too_many_values")


@pytest.mark.parametrize("json_of", [byte_level_json, byte_fallback_json, word_piece_json])
def test_long_texts_have_the_tokens_that_short_ones_have(json_of: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Tokenizer(json_of())
    text = "the dog plays, naïve 東京 👩‍👩‍👧 ab ▁ab <|bos|>\n" * 3
    expected = encoder.encode(text)
    monkeypatch.setattr("engine.tokenizer.LONG_TEXT_CHARS", 10)
    assert encoder.encode(text) == expected


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    text = "the quick brown fox " * 30_000
    span_s: list[float] = []

    def encode() -> None:
        begin_s = time.perf_counter()
        tokenizer().encode(text)
        span_s.extend((begin_s, time.perf_counter()))

    seen_s = []
    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        seen_s.append(time.perf_counter())
        time.sleep(0.001)
    begin_s, end_s = span_s
    quarter_s = (end_s - begin_s) / 4
    assert any(begin_s + quarter_s < at_s < end_s - quarter_s for at_s in seen_s)


def test_a_text_far_beyond_the_context_is_refused_by_its_beginning() -> None:
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return [1] * text.count("a")

    with pytest.raises(RequestError, match="prompt has 10000000 characters, which are more than the 5000 tokens") as caught:
        refuse_far_too_long("a" * 10_000_000, 5000, encode, "prompt")
    assert (caught.value.code, encoded) == ("context_length_exceeded", [40_000])
    encoded.clear()
    refuse_far_too_long(" " * 200_000 + "a" * 5000, 5000, encode, "prompt")  # many characters, few tokens
    refuse_far_too_long("a" * LONG_TEXT_CHARS, 5, encode, "prompt")  # short enough to be encoded and counted
    assert encoded == [40_000, 80_000, 160_000]


async def test_long_prompts_are_refused_early_and_only_counted_whole_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "abc " * 25_000
    async with open_answering("Hi") as server:
        encode = server.gateway.tokenizer.encode  # type: ignore[union-attr]
        lengths: list[int] = []

        def recorded(text: str, **options: Any) -> list[int]:
            lengths.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(server.gateway.tokenizer, "encode", recorded)
        answer = await server.client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {"prompt": text})
        assert (answer.status_code, error_code(answer.content)) == (400, "context_length_exceeded")
        assert max(lengths) < len(text)
        counted = await server.client.post("/tokenize", json={"prompt": text})
        assert counted.json()["count"] > 25_000
        with trio.fail_after(5):
            assert (await server.client.post("/tokenize", json={"prompt": "abc"})).status_code == 200
