"""/v1/responses: events in order, the object they add up to, items of the input as messages."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.actors.harness import CACHE, engine_config, until
from tests.api.harness import Server, assert_idle, error_code, open_server, tokenizer
from tests.api.openai_server import RESPONSES, TaggedFormat, answer_script, events, open_answering, post, whole

ANSWER = '<think>two sums</think>Let me see.<call add>{"a": 1}</call><call find>{"b": "ä🐈"}</call>'
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("add", "find")]


async def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events, whose names, numbers and places are checked."""
    response = await post(server, RESPONSES, stream=True, **fields)
    assert response.status_code == 200, response.text
    found = events(response.text)
    for number, (name, data) in enumerate(found):
        assert (data["type"], data["sequence_number"]) == (name, number)
    return [data for _, data in found]


def without_ids(value: Any) -> Any:
    """Two answers to one request differ by their ids and times only."""
    if isinstance(value, dict):
        return {name: without_ids(entry) for name, entry in value.items() if name not in ("id", "created_at")}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


async def test_events_in_order_and_equal_to_the_whole() -> None:
    async with open_answering(ANSWER) as server:
        found = await streamed(server, tools=TOOLS)
        order = [data["type"].removeprefix("response.") for data in found]
        steps = [name for index, name in enumerate(order) if index == 0 or name != order[index - 1]]
        part = ["content_part.done", "output_item.done"]
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
        assert steps == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", *part,
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", *part,
            *call, *call, "completed",
        ]  # fmt: skip
        assert (found[0]["response"]["status"], found[0]["response"]["output"], found[0]["response"]["usage"]) == ("in_progress", [], None)
        final = found[-1]["response"]
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
        added = [data for data in found if data["type"] == "response.output_item.added"]
        done = [data for data in found if data["type"] == "response.output_item.done"]
        assert [data["output_index"] for data in added] == [data["output_index"] for data in done] == [0, 1, 2, 3]
        assert [data["item"] for data in done] == final["output"]
        assert {data["item"]["status"] for data in added} == {"in_progress"}
        for data in found:  # every piece belongs to the item at its index
            if "item_id" in data:
                assert data["item_id"] == final["output"][data["output_index"]]["id"]
        for index, item in enumerate(final["output"]):
            text = "".join(data["delta"] for data in found if data["type"].endswith(".delta") and data["output_index"] == index)
            assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "two sums"}]
        assert [json.loads(item["arguments"]) for item in final["output"][2:]] == [{"a": 1}, {"b": "ä🐈"}]
        assert [(item["name"], item["call_id"]) for item in final["output"][2:]] == [("add", "call_0"), ("find", "call_1")]
        body = await whole(server, RESPONSES, tools=TOOLS)
        assert without_ids(body) == without_ids(final)
        num_tokens = len(tokenizer().encode(ANSWER)) + 1
        assert body["usage"] == {
            "input_tokens": 1, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": len(tokenizer().encode("two sums</think>"))}, "total_tokens": 1 + num_tokens,
        }  # fmt: skip
        await assert_idle(server)


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with open_answering("abcdef") as server:
        found = await streamed(server, max_output_tokens=3)
        assert found[-1]["type"] == "response.incomplete"
        final = found[-1]["response"]
        assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (final["output"][0]["status"], final["output"][0]["content"][0]["text"]) == ("incomplete", "abc")
        assert without_ids(await whole(server, RESPONSES, max_output_tokens=3)) == without_ids(final)


async def test_logprobs() -> None:
    async with open_answering("ab") as server:
        plain = await whole(server, RESPONSES)
        assert plain["output"][0]["content"][0]["logprobs"] == []
        for fields in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}):
            body = await whole(server, RESPONSES, **fields)
            logprobs = body["output"][0]["content"][0]["logprobs"]
            assert [(entry["token"], entry["bytes"], len(entry["top_logprobs"])) for entry in logprobs] == [
                ("a", [97], fields.get("top_logprobs", 0)),
                ("b", [98], fields.get("top_logprobs", 0)),
            ]
            found = await streamed(server, **fields)
            deltas = [data for data in found if data["type"] == "response.output_text.delta"]
            assert [entry for data in deltas for entry in data["logprobs"]] == logprobs


async def test_a_worker_that_dies_fails_the_response() -> None:
    config = engine_config(answer_script("word " * 20, end=False, step_s=0.01, kill_at_step=8), on_worker_death="restart")
    async with open_server(engine=config, chat_format=TaggedFormat()) as server:
        found = await streamed(server)
        assert found[-1]["type"] == "response.failed"
        final = found[-1]["response"]
        assert (final["status"], final["error"]["code"], final["usage"]) == ("failed", "server_error", None)
        assert "worker" in final["error"]["message"]
        assert final["output"][0]["status"] == "in_progress"
        await until(lambda: server.gateway.health.ok)
        await assert_idle(server)


async def test_input_as_messages() -> None:
    tagged = TaggedFormat()
    async with open_answering("ok", chat_format=tagged) as server:
        await whole(server, RESPONSES, instructions="Be brief.")
        assert tagged.asked[-1].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        items = [
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "user", "content": "q"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
             "content": [{"type": "reasoning_text", "text": "why"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "hm", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "find", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
            {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
            {"role": "user", "content": "go on"},
            {"type": "function_call", "call_id": "c4", "name": "add", "arguments": "{}"},
        ]  # fmt: skip
        await whole(
            server, RESPONSES, input=items, tools=TOOLS, tool_choice={"type": "function", "name": "find"}, reasoning={"effort": "none"}
        )

        def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

        assert tagged.asked[-1].messages == [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "text", "text": "hm"}], "reasoning_content": "why",
             "tool_calls": [call("c1", "add", "{}"), call("c2", "find", '{"x": 1}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "4"}]},
            {"role": "assistant", "content": None, "tool_calls": [call("c3", "add", "{}")]},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": None, "tool_calls": [call("c4", "add", "{}")]},
        ]  # fmt: skip
        assert tagged.asked[-1].tools == [{"type": "function", "function": tool} for tool in _functions()]
        assert (tagged.asked[-1].tool_choice, tagged.asked[-1].thinking) == ({"name": "find"}, False)
        assert tagged.bodies[-1]["input"] == items


def _functions() -> list[dict[str, Any]]:
    return [{name: value for name, value in tool.items() if name != "type"} for tool in TOOLS]


MISTAKES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"input": ...}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": [3]}, 400, "input[0]"),
    ({"input": [{"role": "user"}]}, 400, "input[0].content"),
    ({"input": [{"role": "user", "content": "x", "extra": 1}]}, 400, "input[0].extra"),
    ({"input": [{"type": "web_search_call"}]}, 400, "input[0].type"),
    ({"input": [{"type": ["x"]}]}, 400, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, 400, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, 400, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "input[0].encrypted_content"),
    ({"input": "refuse"}, 400, "input"),
    ({"messages": []}, 400, "messages"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": CACHE.context_length}, 400, "max_output_tokens"),
    ({"max_tokens": 3}, 400, "max_tokens"),
    ({"n": 2}, 400, "n"),
    ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ({"store": True}, 400, "store"),
    ({"background": True}, 400, "background"),
    ({"conversation": "c"}, 400, "conversation"),
    ({"truncation": "auto"}, 400, "truncation"),
    ({"prompt": {"id": "p"}}, 400, "prompt"),
    ({"max_tool_calls": 1}, 400, "max_tool_calls"),
    ({"include": ["reasoning.encrypted_content"]}, 400, "include"),
    ({"reasoning": {"summary": "auto"}}, 400, "reasoning.summary"),
    ({"reasoning": {"effort": "huge"}}, 400, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    ({"text": {"format": {"type": "yaml"}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools[0].function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "gone"}}, 400, "tool_choice"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"top_logprobs": 21}, 400, "top_logprobs"),
    ({"temperature": 101}, 400, "temperature"),
    ({"stop": ""}, 400, "stop"),
]


async def test_mistakes_have_the_same_answer_in_both_modes() -> None:
    async with open_answering("ok") as server:
        for fields, status, param in MISTAKES:
            answers: list[httpx.Response] = [await post(server, RESPONSES, stream=stream, **fields) for stream in (False, True)]
            error_code(answers[0].content)
            error = answers[0].json()["error"]
            assert (answers[0].status_code, error["param"]) == (status, param), (str(fields)[:200], error)
            assert (answers[1].status_code, answers[1].json()) == (status, answers[0].json()), str(fields)[:200]
        await assert_idle(server)


async def test_values_that_ask_for_nothing_are_taken() -> None:
    no_ops = {
        "store": False, "background": False, "truncation": "disabled", "previous_response_id": None, "include": [], "tools": [],
        "reasoning": {}, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "metadata": {"a": "b"}, "user": "me",
        "stop": None, "ignore_eos": False, "top_logprobs": 0, "parallel_tool_calls": True, "service_tier": "default",
    }  # fmt: skip
    async with open_answering("ok") as server:
        for fields in (*({name: value} for name, value in no_ops.items()), no_ops):
            body = await whole(server, RESPONSES, **fields)
            assert body["output"][0]["content"][0] == {"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}
        assert (body["metadata"], body["user"], body["store"]) == ({"a": "b"}, "me", False)


async def test_nothing_is_stored() -> None:
    async with open_answering("ok") as server:
        body = await whole(server, RESPONSES)
        assert (await server.client.get(f"{RESPONSES}/{body['id']}")).status_code == 404
        assert (await server.client.get(RESPONSES)).status_code == 405
