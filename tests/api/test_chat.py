"""/v1/chat/completions: chunks, ends, counts, log-probabilities, reasoning and tools, streamed and whole."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import trio

from engine.api.config import ApiConfig
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


MISTAKES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"model": ...}, 400, "model"),
    ({"model": 3}, 400, "model"),
    ({"messages": ...}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "Hi"}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "assistant"}]}, 400, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, 400, "messages[0].refusal"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, 400, "messages[0].extra"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, 400, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, 400, "messages"),
    ({"unheard_of": 1}, 400, "unheard_of"),
    ({"audio": {}}, 400, "audio"),
    ({"modalities": ["text", "audio"]}, 400, "modalities"),
    ({"functions": []}, 400, "functions"),
    ({"service_tier": "flex"}, 400, "service_tier"),
    ({"store": True}, 400, "store"),
    ({"store": 0}, 400, "store"),
    ({"prediction": {"type": "content"}}, 400, "prediction"),
    ({"web_search_options": {}}, 400, "web_search_options"),
    ({"n": 0}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"n": 2**63}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"n": "2"}, 400, "n"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 2**63}, 400, "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 101}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 1.1}, 400, "min_p"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"seed": -1}, 400, "seed"),
    ({"seed": 2**63}, 400, "seed"),
    ({"priority": 2**40}, 400, "priority"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": "x" * 257}, 400, "cache_salt"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop": ["x" * 1025]}, 400, "stop"),
    ({"stop": 3}, 400, "stop"),
    ({"stop_token_ids": [1000]}, 400, "stop_token_ids"),
    ({"logit_bias": {"1000": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"01": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, 400, "logit_bias"),
    ({"top_logprobs": 1}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"user": "x" * 1025}, 400, "user"),
    ({"metadata": {"k" * 65: "v"}}, 400, "metadata"),
    ({"metadata": {str(number): "v" for number in range(17)}}, 400, "metadata"),
    ({"tools": [{"type": "retrieval"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, 400, "tools[1]"),
    ({"tools": [TOOLS[0]] * 129}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, 400, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": "always"}, 400, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, 400, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}}, 400, "response_format.json_schema.schema"),
    ({"response_format": {"type": "regex"}}, 400, "response_format.regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, 400, "structured_outputs"),
    ({"structured_outputs": {}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, 400, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, 400, "structured_outputs.json"),
    ({"structured_outputs": {"json": 0}}, 400, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "x" * (257 << 10)}}, 400, "structured_outputs.regex"),
    ({"reasoning_effort": "huge"}, 400, "reasoning_effort"),
    ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, 400, "thinking"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": [1]}}, 400, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"thinking": "yes"}}, 400, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"date_string": "x" * 5000}}, 400, "chat_template_kwargs.date_string"),
    ({"continue_final_message": True}, 400, "continue_final_message"),
    ({"stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    ({"stream_options": {"include_usages": True}}, 400, "stream_options.include_usages"),
]  # fmt: skip


async def test_mistakes_have_the_same_answer_in_both_modes() -> None:
    async with open_answering("ok") as server:
        for fields, status, param in MISTAKES:
            whole_answer = await post(server, CHAT, **fields)
            error_code(whole_answer.content)
            error = whole_answer.json()["error"]
            assert (whole_answer.status_code, error["param"]) == (status, param), (str(fields)[:200], error)
            assert len(error["message"]) < 500
            stream_answer = await post(server, CHAT, stream=True, **fields)
            assert (stream_answer.status_code, stream_answer.json()) == (status, whole_answer.json()), str(fields)[:200]
        needs_stream = await post(server, CHAT, stream_options={"include_usage": True})
        assert (needs_stream.status_code, needs_stream.json()["error"]["param"]) == (400, "stream_options")
        await assert_idle(server)


NO_OPS: dict[str, Any] = {
    "audio": None, "modalities": ["text"], "prediction": None, "service_tier": "auto", "store": False, "functions": None, "user": "me",
    "metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k", "verbosity": "medium", "stop": None, "seed": None,
    "logit_bias": {}, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "top_k": -1, "echo": False,
    "stream_options": None, "logprobs": False, "chat_template_kwargs": {}, "stop_token_ids": [], "parallel_tool_calls": True,
    "temperature": 0, "add_generation_prompt": True, "skip_special_tokens": True, "add_special_tokens": False, "priority": 0,
}  # fmt: skip


async def test_values_that_ask_for_nothing_are_taken() -> None:
    async with open_answering("ok") as server:
        for name, value in NO_OPS.items():
            assert (await whole(server, CHAT, **{name: value}))["choices"][0]["message"]["content"] == "ok", name
        assert (await whole(server, CHAT, **NO_OPS))["choices"][0]["message"]["content"] == "ok"


RAW_BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[]", "invalid_type"),
    (b"null", "invalid_type"),
    (b'{"model": "scripted", "temperature": NaN}', "invalid_json"),
    (b'{"model": "scripted", "temperature": 1e999}', "invalid_value"),
    (b'{"model": "scripted", "temperature": Infinity}', "invalid_json"),
    (b'{"model": "\xff"}', "invalid_json"),
    (b'{"model": "scripted", "user": "\\ud800", "messages": []}', "invalid_json"),
    (b'{"model": "scripted", "n": ' + b"9" * 5000 + b"}", "invalid_value"),
    (b'{"model": "scripted", "audio": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    (b'{"model": "scripted", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", '
     b'"parameters": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}}]}", "invalid_request"),
]  # fmt: skip


async def test_bodies_that_are_no_requests() -> None:
    async with open_answering("ok") as server:
        for body, code in RAW_BODIES:
            response = await server.client.post(CHAT, content=body)
            assert (response.status_code, error_code(response.content)) == (400, code), body[:100]
        # Of a key that is there twice the last one counts.
        twice = b'{"model": "other", "model": "scripted", "messages": [{"role": "user", "content": ""}]}'
        assert (await server.client.post(CHAT, content=twice)).status_code == 200


async def test_choices_beyond_what_the_engine_holds() -> None:
    async with open_answering("ok", config=ApiConfig(port=0, max_samples=4)) as server:
        response = await post(server, CHAT, n=5)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
