"""/v1/chat/completions: chunks, ends, counts, log-probabilities, reasoning and tools, streamed and whole."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import trio

from tests.actors.harness import CACHE, engine_config, until
from tests.api.harness import assert_idle, error_code, open_server, script_of, tokenizer
from tests.api.openai_server import (
    CHAT,
    TOOLS,
    PlainFormat,
    TaggedFormat,
    answer_script,
    begun,
    events,
    open_answering,
    post,
    streamed,
    whole,
)

ANSWER = "The cat 🐈 sat on the mat."
TOOL_ANSWER = '<think>two sums</think>Let me see.<call add>{"a": 1, "b": [2]}</call><call find>{"name": "ä🐈"}</call>'


def assembled(found: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message, finish reason and log-probabilities that one choice's chunks add up to, with the rules of the order checked."""
    mine = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
    assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"] and all(choice["delta"].values()) for choice in mine[1:-1]), "an empty delta on the way"
    assert mine[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    logprobs: list[Any] = []
    for choice in mine:
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        message["content"] += choice["delta"].get("content", "")
        message["reasoning_content"] += choice["delta"].get("reasoning_content", "")
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] not in message["tool_calls"]:
                assert call["type"] == "function"
                message["tool_calls"][call["index"]] = {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
            else:
                assert "id" not in call
                assert "name" not in call["function"]
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message | {"logprobs": logprobs, "finish_reason": mine[-1]["finish_reason"], "stop_reason": mine[-1]["stop_reason"]}


async def test_chunks_in_order_and_equal_to_the_whole() -> None:
    async with open_answering(ANSWER) as server:
        num_tokens = len(tokenizer().encode(ANSWER)) + 1  # the end of text counts
        usage = {
            "prompt_tokens": 1,
            "completion_tokens": num_tokens,
            "total_tokens": 1 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        found = await streamed(server, CHAT, stream_options={"include_usage": True})
        assert found[-1]["choices"] == []
        assert found[-1]["usage"] == usage
        assert all(chunk["usage"] is None for chunk in found[:-1])
        assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in found} == {
            (found[0]["id"], "chat.completion.chunk", "scripted")
        }
        message = assembled(found[:-1])
        assert (message["content"], message["finish_reason"], message["stop_reason"]) == (ANSWER, "stop", None)
        body = await whole(server, CHAT)
        assert body["object"] == "chat.completion"
        assert body["usage"] == usage
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
        assert "usage" not in (await streamed(server, CHAT))[-1]
        await assert_idle(server)


async def test_continuous_usage_counts_what_was_shown() -> None:
    async with open_answering("abcdef") as server:
        found = await streamed(server, CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 1, 2, 3, 4, 5, 6, 7, 7]
        assert found[-1]["choices"] == []


@pytest.mark.parametrize("n", [1, 3])
async def test_one_end_for_each_sample(n: int) -> None:
    async with open_answering(ANSWER) as server:
        found = await streamed(server, CHAT, n=n, max_tokens=9, stream_options={"include_usage": True})
        ends = [choice["index"] for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
        assert sorted(ends) == list(range(n))
        body = await whole(server, CHAT, n=n, max_tokens=9)
        assert found[-1]["usage"]["completion_tokens"] == body["usage"]["completion_tokens"] == 9 * n
        for index, choice in enumerate(body["choices"]):
            message = assembled(found[:-1], index)
            assert choice["index"] == index
            assert choice["message"]["content"] == message["content"] == tokenizer().decode(tokenizer().encode(ANSWER)[:9]) + ""
            assert choice["finish_reason"] == message["finish_reason"] == "length"


async def test_reasoning_and_tool_calls_in_both_modes() -> None:
    async with open_answering(TOOL_ANSWER) as server:
        found = await streamed(server, CHAT, tools=TOOLS, stream_options={"include_usage": True})
        message = assembled(found[:-1])
        assert message["finish_reason"] == "tool_calls"
        assert (message["reasoning_content"], message["content"]) == ("two sums", "Let me see.")
        assert [(index, call["id"], call["name"]) for index, call in message["tool_calls"].items()] == [
            (0, "call_0", "add"),
            (1, "call_1", "find"),
        ]
        assert [json.loads(call["arguments"]) for call in message["tool_calls"].values()] == [{"a": 1, "b": [2]}, {"name": "ä🐈"}]
        body = await whole(server, CHAT, tools=TOOLS)
        choice = body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("two sums", "Let me see.")
        assert [{"id": call["id"], **call["function"]} for call in choice["message"]["tool_calls"]] == list(message["tool_calls"].values())
        assert {call["type"] for call in choice["message"]["tool_calls"]} == {"function"}
        assert body["usage"] == found[-1]["usage"]
        # From the token after <think> to the one that ends </think>.
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer().encode("two sums</think>"))


async def test_calls_without_content_have_none() -> None:
    async with open_answering("<call add>{}</call>") as server:
        choice = (await whole(server, CHAT, tools=TOOLS))["choices"][0]
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
        cut = (await whole(server, CHAT, tools=TOOLS, max_tokens=9))["choices"][0]
        assert cut["finish_reason"] == "length"  # only a sample that stopped by itself called its tools


async def test_logprobs() -> None:
    async with open_answering("ab🐈") as server:
        for top, num_top in ((..., 0), (0, 0), (1, 1), (20, 1)):  # the script has one alternative
            body = await whole(server, CHAT, logprobs=True, top_logprobs=top)
            entries = body["choices"][0]["logprobs"]["content"]
            assert len(entries) == body["usage"]["completion_tokens"]
            assert [len(entry["top_logprobs"]) for entry in entries] == [num_top] * len(entries)
            assert entries[0] == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": entries[0]["top_logprobs"]}
            assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == "ab🐈"
            found = await streamed(server, CHAT, logprobs=True, top_logprobs=top)
            assert assembled(found)["logprobs"] == entries
        assert (await whole(server, CHAT, logprobs=False))["choices"][0]["logprobs"] is None


async def test_logprobs_of_text_that_a_parser_holds_back() -> None:
    async with open_answering("<think>a</think>b<no tag") as server:
        found = await streamed(server, CHAT, logprobs=True)
        entries = (await whole(server, CHAT, logprobs=True))["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == "<think>a</think>b<no tag<|end|>"
        assert assembled(found)["logprobs"] == entries
        assert assembled(found)["content"] == "b<no tag"


@pytest.mark.parametrize(("stop", "include"), [("sat", False), (["🐈", "mat"], False), ("sat", True), (["zzz"], False)])
async def test_stop_strings(stop: Any, include: bool) -> None:
    async with open_answering(ANSWER) as server:
        fields = {"stop": stop, "include_stop_str_in_output": include, "stream_options": {"include_usage": True}}
        found = await streamed(server, CHAT, **fields)
        message = assembled(found[:-1])
        matched = next((text for text in ([stop] if isinstance(stop, str) else stop) if text in ANSWER), None)
        end = len(ANSWER) if matched is None else ANSWER.index(matched) + (len(matched) if include else 0)
        assert (message["content"], message["finish_reason"], message["stop_reason"]) == (ANSWER[:end], "stop", matched)
        body = await whole(server, CHAT, **fields | {"stream_options": ...})
        assert (body["choices"][0]["message"]["content"], body["choices"][0]["stop_reason"]) == (ANSWER[:end], matched)
        assert body["usage"]["completion_tokens"] == found[-1]["usage"]["completion_tokens"]


async def test_stop_tokens_and_ignored_ends() -> None:
    async with open_answering("abc") as server:
        token = tokenizer().encode("b")[0]
        choice = (await whole(server, CHAT, stop_token_ids=[token]))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", token)
        body = await whole(server, CHAT, ignore_eos=True, max_tokens=20)
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (20, "length")
        body = await whole(server, CHAT, min_tokens=10, max_tokens=20, stop_token_ids=[token])
        assert body["usage"]["completion_tokens"] >= 10


async def test_max_tokens() -> None:
    async with open_server(script_of("abc"), chat_format=PlainFormat()) as server:
        context = CACHE.context_length
        prompt = "x" * 10
        messages = [{"role": "user", "content": prompt}]
        num_prompt = len(tokenizer().encode(prompt))
        body = await whole(server, CHAT, messages=messages)
        assert body["usage"]["total_tokens"] == context
        assert body["choices"][0]["finish_reason"] == "length"
        for name in ("max_tokens", "max_completion_tokens"):
            assert (await whole(server, CHAT, messages=messages, **{name: 3}))["usage"]["completion_tokens"] == 3
            assert (await whole(server, CHAT, messages=messages, **{name: context - num_prompt}))["usage"]["total_tokens"] == context
            response = await post(server, CHAT, messages=messages, **{name: context})
            assert (response.status_code, error_code(response.content)) == (400, "context_length_exceeded")
            error = response.json()["error"]
            assert error["param"] == name
            for number in (num_prompt, context, num_prompt + context, context - num_prompt):
                assert str(number) in error["message"]
        long = await post(server, CHAT, messages=[{"role": "user", "content": "x" * 1000}])
        assert (long.status_code, error_code(long.content)) == (400, "context_length_exceeded")
        assert long.json()["error"]["param"] == "messages"
        assert (await whole(server, CHAT, messages=messages, max_tokens=3, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_cache_salts_and_cached_tokens() -> None:
    async with open_server(script_of("abc"), chat_format=PlainFormat()) as server:
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 2}

        async def cached(**more: Any) -> int:
            body = await whole(server, CHAT, **fields, **more)
            number: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return number

        assert [await cached(), await cached() > 0, await cached(cache_salt="mine"), await cached(cache_salt="mine") > 0] == [
            0,
            True,
            0,
            True,
        ]
        found = await streamed(server, CHAT, **fields, stream_options={"include_usage": True})
        assert found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == await cached()


async def test_what_the_format_is_asked() -> None:
    tagged = TaggedFormat()
    async with open_answering("ok", chat_format=tagged) as server:
        await whole(server, CHAT)
        plain = tagged.asked[-1]
        assert (plain.tool_choice, plain.parallel_tool_calls, plain.thinking, plain.constraint) == ("auto", True, None, None)
        assert (plain.add_generation_prompt, plain.continue_final_message, plain.tools) == (True, False, None)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "why", "refusal": None, "annotations": [],
             "tool_calls": [{"id": "c", "index": 0, "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
            {"role": "assistant", "content": "so", "prefix": True},
        ]  # fmt: skip
        named = {"type": "function", "function": {"name": "find"}}
        await whole(server, CHAT, messages=messages, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, reasoning_effort="none")
        asked = tagged.asked[-1]
        assert asked.messages[0]["content"] == messages[0]["content"]
        assert asked.messages[1] == {
            "role": "assistant", "content": None, "reasoning_content": "why",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        }  # fmt: skip
        assert (asked.tool_choice, asked.parallel_tool_calls, asked.thinking) == ({"name": "find"}, False, False)
        assert (asked.add_generation_prompt, asked.continue_final_message) == (False, True)
        for fields in ({"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}):
            await whole(server, CHAT, **fields)
            assert tagged.asked[-1].thinking is True


async def test_a_worker_that_dies_ends_the_stream_with_an_error() -> None:
    config = engine_config(
        answer_script("word " * 20, end=False, step_s=0.01, kill_at_step=8),
        on_worker_death="restart",
    )
    async with open_server(engine=config, chat_format=TaggedFormat()) as server:
        response = await post(server, CHAT, stream=True, ignore_eos=True, max_tokens=100, n=2)
        assert response.status_code == 200
        data = [value for _, value in events(response.text)]
        assert set(data[-1]["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in data
        assert len(data) > 2
        assert not any(choice["finish_reason"] for chunk in data[:-1] for choice in chunk["choices"])
        await until(lambda: server.gateway.health.ok)
        await assert_idle(server)


async def test_a_client_that_leaves_frees_all_samples() -> None:
    async with open_server(engine=engine_config(answer_script("word ", end=False, step_s=0.01)), chat_format=TaggedFormat()) as server:
        async with begun(server, CHAT, n=3):
            assert server.gateway.num_requests == 3
        await assert_idle(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(post, server, CHAT, n=3))  # not streamed: nothing is written that could fail
            await until(lambda: server.gateway.num_requests == 3)
            nursery.cancel_scope.cancel()
        await assert_idle(server)


async def test_full_queue_is_429_in_both_modes() -> None:
    script = answer_script("word ", end=False, step_s=0.02)
    async with open_server(engine=engine_config(script, scheduler={"max_waiting": 1}), chat_format=TaggedFormat()) as server:
        async with begun(server, CHAT, n=CACHE.max_running + 1, max_tokens=100):
            for stream in (False, True):
                refused = await post(server, CHAT, stream=stream)
                assert (refused.status_code, error_code(refused.content)) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
        await assert_idle(server)


async def test_a_model_without_chat_template() -> None:
    async with open_server() as server:
        for stream in (False, True):
            response = await post(server, CHAT, stream=stream)
            assert (response.status_code, error_code(response.content)) == (400, "no_chat_template")
