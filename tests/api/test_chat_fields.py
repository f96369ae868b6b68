"""Fields of /v1/chat/completions: each mistake's answer, the same in both modes; no-op values; bodies that are no requests."""

from __future__ import annotations

from typing import Any

from engine.api.config import ApiConfig
from tests.api.harness import assert_idle, error_code
from tests.api.openai_server import CHAT, TOOLS, open_answering, post, whole

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
