"""One request against a server of odd streams: what the record says of each."""

from __future__ import annotations

import contextlib
import gzip
from typing import Any

import pytest
import trio
import trio.testing

from engine.bench import probe
from engine.bench.client import Client, Prepared
from engine.bench.endpoints import ENDPOINTS, Asked
from engine.bench.record import RequestRecord
from engine.bench.runner import make_http
from engine.bench.workload import Work
from engine.core.errors import TwinferError
from tests.bench.fake_server import (
    CUT,
    DONE,
    END,
    STREAM_HEAD,
    Answer,
    chat_chunk,
    chunked,
    event,
    fake_server,
    plain,
    role_chunk,
    stream,
    usage,
)


async def send(answer: Answer, endpoint: str = "chat", *, timeout_s: float = 30.0, cancel_after_s: float | None = None) -> RequestRecord:
    async with fake_server(lambda *_: answer) as server, make_http(server.url, None, 1) as http:
        chosen = ENDPOINTS[endpoint]
        body = chosen.body(Asked("m"), "hello", 4)
        work = Work(index=7, arrival_s=None, parts=(("request:7", 1),), output_tokens=4, cancel_after_s=cancel_after_s)
        return await Client(http, chosen, timeout_s).send(Prepared(work, body, b"digest", None))


async def test_a_stream_with_running_usage_is_counted_by_tokens_not_chunks() -> None:
    record = await send(
        stream(
            role_chunk(),
            chat_chunk("He", usage=usage(9, 1)),
            chat_chunk("llo there", usage=usage(9, 4)),
            chat_chunk(" you", usage=usage(9, 5)),
            chat_chunk(finish="stop", usage=usage(9, 6)),
            {"choices": [], "usage": usage(9, 6, cached=8)},
        )
    )
    metrics = record.metrics
    assert (record.error, metrics.reason, record.count_source) == (None, "stop", "usage_per_chunk")
    assert (metrics.num_output_tokens, metrics.num_prompt_tokens, metrics.num_cached_tokens) == (6, 9, 8)
    assert len(metrics.itl_s) == 5
    # Three tokens came in one event: two gaps of 0; the end of text, which has no text, came with the finish reason.
    assert metrics.itl_s[1:3] == [0.0, 0.0]
    assert metrics.first_token_s is not None
    assert metrics.last_token_s is not None
    assert metrics.last_token_s == metrics.finished_s
    assert sum(metrics.itl_s) == pytest.approx(metrics.last_token_s - metrics.first_token_s)


@pytest.mark.parametrize(
    ("totals", "tokens", "source"), [([{"choices": [], "usage": usage(9, 5)}], 5, "usage"), ([], 3, "events"),
                                     ([{"choices": [], "usage": usage(9, 2)}], 2, "usage")]
)  # fmt: skip
async def test_tokens_of_a_stream_without_running_usage(totals: list[Any], tokens: int, source: str) -> None:
    chunks = [chat_chunk("a"), chat_chunk("b"), chat_chunk("c"), chat_chunk(finish="length")]
    record = await send(stream(role_chunk(), *chunks, *totals))
    assert record.count_source == source
    assert record.metrics.reason == "length"
    assert record.metrics.num_output_tokens == tokens
    assert len(record.metrics.itl_s) == tokens - 1


async def test_the_role_chunk_is_no_first_token_and_reasoning_is_one() -> None:
    answer: Answer = [
        STREAM_HEAD,
        chunked(event(role_chunk())),
        0.05,
        chunked(event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})),
        0.05,
        chunked(event(chat_chunk("so", finish="stop"))),
        END,
    ]
    metrics = (await send(answer)).metrics
    assert metrics.ttft_s is not None
    assert metrics.ttft_s >= 0.05  # never early; how late depends on the machine
    assert metrics.num_output_tokens == 2
    assert metrics.itl_s[0] >= 0.05


async def test_tool_calls_are_output() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    delta = {"choices": [{"index": 0, "delta": {"content": None, "tool_calls": [call]}, "finish_reason": None}]}
    record = await send(stream(role_chunk(), delta, chat_chunk(finish="tool_calls")))
    assert record.metrics.num_output_tokens == 1
    assert record.metrics.reason == "stop"


async def test_an_answer_without_text_has_its_tokens_at_its_end() -> None:
    record = await send(stream(role_chunk(), chat_chunk(finish="stop"), {"choices": [], "usage": usage(3, 1)}))
    assert record.error is None
    assert record.metrics.num_output_tokens == 1
    assert record.metrics.first_token_s == record.metrics.finished_s


def frames(*parts: bytes) -> list[bytes]:
    return [STREAM_HEAD, *(chunked(part) for part in parts)]


@pytest.mark.parametrize(
    ("answer", "error", "text", "tokens"),
    [
        (plain(429, {"error": {"message": "queue full", "code": "queue_full"}}, "retry-after: 1"), "http_429", "queue full", 0),
        (plain(500, {"detail": "boom"}), "http_500", "boom", 0),
        (plain(503, []), "http_503", "[]", 0),
        (plain(200, {"choices": []}), "malformed", "not an event stream", 0),
        ([*frames(event(chat_chunk("a"))), chunked(event({"error": {"message": "worker died"}})), END], "error_event", "worker died", 1),
        # An error is an error even where a client would see a normal end after it.
        (stream(chat_chunk("a"), {"error": {"message": "late"}}, chat_chunk(finish="stop")), "error_event", "late", 1),
        (stream(chat_chunk("a"), chat_chunk(finish="abort")), "error_event", "abort", 1),
        ([*frames(event(chat_chunk("a"))), CUT], "cut", "", 1),
        ([*frames(event(chat_chunk("a")), DONE), END], "cut", "without a finish reason", 1),
        ([STREAM_HEAD, CUT], "cut", "", 0),
        ([CUT], "cut", "", 0),
        ([b"no http at all\r\n\r\n", CUT], "cut", "", 0),
        ([*frames(b"data: {not json\n\n"), END], "malformed", "/v1/chat/completions", 0),
        ([*frames(b'data: {"choices": 3}\n\n'), END], "malformed", "/v1/chat/completions", 0),
        ([*frames(b"data: \xff\xfe\n\n"), END], "malformed", "/v1/chat/completions", 0),
        (stream(chat_chunk("a"), {"choices": [], "usage": usage(5, -1)}), "malformed", "completion_tokens", 1),
        (stream(chat_chunk("a"), {"choices": [], "usage": usage(-5, 1)}), "malformed", "prompt_tokens", 1),
        (stream(chat_chunk("a"), {"choices": [], "usage": usage(5, 10**18)}), "malformed", "completion_tokens", 1),
    ],
)
async def test_what_goes_wrong_is_an_error_of_its_kind(answer: Answer, error: str, text: str, tokens: int) -> None:
    record = await send(answer)
    assert record.error == error
    assert text in record.message
    assert record.metrics.reason == "error"
    assert record.metrics.num_output_tokens == tokens
    assert record.metrics.finished_s is not None


async def test_a_connection_that_the_server_closed_while_idle_is_no_failure() -> None:
    answer = [*stream(chat_chunk("a"), chat_chunk(finish="stop")), CUT]
    async with fake_server(lambda *_: answer) as server, make_http(server.url, None, 1) as http:
        client = Client(http, ENDPOINTS["chat"], 5.0)
        for index in range(3):
            work = Work(index=index, arrival_s=None, parts=(), output_tokens=None)
            record = await client.send(Prepared(work, b"{}", b"", None))
            assert record.error is None, record.message
            await trio.testing.wait_all_tasks_blocked(0.02)  # the think time: the server has closed
        assert server.num_connections == 3


async def test_nobody_listens() -> None:
    async with make_http("http://127.0.0.1:9", None, 1) as http:
        work = Work(index=0, arrival_s=None, parts=(), output_tokens=None)
        record = await Client(http, ENDPOINTS["chat"], 5.0).send(Prepared(work, b"{}", b"", None))
    assert record.error == "connect"


async def test_a_time_out_and_a_cancellation_are_told_apart() -> None:
    never: Answer = [*frames(event(chat_chunk("a"))), trio.Event()]
    late = await send(never, timeout_s=0.2)
    assert (late.error, late.cancelled, late.metrics.reason) == ("timeout", False, "error")
    left = await send(never, cancel_after_s=0.2)
    assert (left.error, left.cancelled, left.metrics.reason) == (None, True, "abort")
    assert left.metrics.num_output_tokens == 1


async def test_completions_and_responses() -> None:
    text = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    last = {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}], "usage": None}
    record = await send(stream(text, last, {"choices": [], "usage": usage(3, 2)}), "completions")
    assert (record.error, record.metrics.num_output_tokens, record.metrics.reason) == (None, 2, "length")

    counts = {"input_tokens": 5, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
    record = await send(
        stream(
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_item.added", "item": {}},
            {"type": "response.reasoning_text.delta", "delta": "hm"},
            {"type": "response.output_text.delta", "delta": "a"},
            {"type": "response.output_text.done", "text": "a"},
            {"type": "response.completed", "response": {"usage": counts}},
            done=False,
        ),
        "responses",
    )
    metrics = record.metrics
    assert (record.error, metrics.num_output_tokens, metrics.num_prompt_tokens, metrics.num_cached_tokens) == (None, 3, 5, 4)
    failed = await send(stream({"type": "response.failed", "response": {"error": {"message": "no"}}}, done=False), "responses")
    assert (failed.error, failed.message) == ("error_event", "no")
    cut_off = {"type": "response.incomplete", "response": {"incomplete_details": {"reason": "max_output_tokens"}, "usage": counts}}
    record = await send(stream({"type": "response.output_text.delta", "delta": "a"}, cut_off, done=False), "responses")
    assert record.metrics.reason == "length"


async def test_reads_may_be_cut_anywhere() -> None:
    text = event(role_chunk()) + b": ping\r\n\r\n" + event(chat_chunk("ä€")) + event(chat_chunk("b", finish="stop")) + DONE
    whole = await send([*frames(text), END])
    pieces = await send([*frames(*(text[index : index + 1] for index in range(len(text)))), END])
    assert whole.metrics.num_output_tokens == pieces.metrics.num_output_tokens == 2
    assert whole.error is pieces.error is None


@pytest.mark.parametrize(
    ("head", "part", "reason"),
    [
        (b"content-type: application/json\r\n", b"", "no whole answer within 0.3 s"),
        (b"content-type: application/json\r\n", b" ", "no whole answer within 0.3 s"),
        (b"content-type: application/json\r\n", b" " * 65536, "something else than JSON, or too much of it"),
        (b"content-encoding: gzip\r\n", gzip.compress(b'{"data": [{"id": "a"}]}') + b" " * 65536, "something else than JSON"),
    ],
)
async def test_a_question_has_an_end(head: bytes, part: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a server makes of a small question: an answer that goes on for ever, or grows without bound."""
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 0.3)

    async def answer(client: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await client.receive_some(65536)
            await client.send_all(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
            while True:
                await client.send_all(part)
                await trio.sleep(0 if len(part) > 1 else 0.05)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with make_http(url, None, 1) as http:
            with trio.fail_after(10), pytest.raises(TwinferError, match=reason):
                await probe.first_model(http)
        nursery.cancel_scope.cancel()
