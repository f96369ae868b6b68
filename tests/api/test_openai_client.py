"""The openai client, unmodified, against ``twinfer serve`` with the embedded model; it validates what it reads with OpenAI's types.

What a trained model says is its own affair: here it is what the types, the counts and the two modes have to say. Tool calls are exact
with a scripted worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from tests.api.conftest import LiveServer
from tests.api.openai_server import TOOLS, open_answering, serve_in_thread

MODEL = "tiny-v41"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


class Verdict(BaseModel):
    ok: bool


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live_server.base_url + "/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def text_of(found: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in found for choice in chunk.choices)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24, "reasoning_effort": "none"}
    whole = client.chat.completions.create(**options)
    found = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.role == "assistant"
    assert text_of(found) == whole.choices[0].message.content != ""
    assert found[-1].usage is not None
    assert whole.usage is not None
    assert found[-1].usage.completion_tokens == whole.usage.completion_tokens <= 24
    assert found[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert [choice.finish_reason for chunk in found for choice in chunk.choices if choice.finish_reason] == [whole.choices[0].finish_reason]


def test_seeds_samples_and_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 2}
    first, second = client.chat.completions.create(**options), client.chat.completions.create(**options)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert [choice.message for choice in first.choices] == [choice.message for choice in second.choices]
    for choice in first.choices:
        assert choice.logprobs is not None
        for entry in choice.logprobs.content or ():
            assert -9999.0 <= entry.logprob <= 0.0
            assert len(entry.top_logprobs) == 2
            assert bytes(entry.bytes or ()).decode(errors="replace") == entry.token


def test_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": ["Once upon a time", "The"], "temperature": 0, "max_tokens": 8, "logprobs": 1}
    whole = client.completions.create(**options)
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or ()) == 8


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "Say hello.", "temperature": 0, "max_output_tokens": 16, "reasoning": {"effort": "none"}}
    whole = client.responses.create(**options)
    found = list(client.responses.create(**options, stream=True))
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == whole.output_text != ""
    last = found[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.usage == whole.usage


def test_structured_output(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
    # Blanks between the tokens of JSON are free, up to 64 of them: room for a model that likes them.
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 600, "reasoning_effort": "none"}
    answer = client.chat.completions.create(**options, response_format=form).choices[0]
    assert set(json.loads(answer.message.content or "")) == {"ok"}
    parsed = client.chat.completions.parse(**options, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    response = client.responses.parse(model=MODEL, input="True?", max_output_tokens=600, reasoning={"effort": "none"}, text_format=Verdict)
    assert isinstance(response.output_parsed, Verdict)
    choice: Any = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert client.completions.create(model=MODEL, prompt="Well?", max_tokens=20, extra_body=choice).choices[0].text in ("yes", "no")


def test_constraints_that_cannot_be(client: openai.OpenAI) -> None:
    for extra in ({"regex": "("}, {"json": {"type": "nothing"}}, {"grammar": "start: nowhere"}):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=MODEL, prompt="x", max_tokens=4, stream=stream, extra_body={"structured_outputs": extra})
            assert refused.value.param == "structured_outputs"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gone", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=0)
    assert invalid.value.param == "n"


def test_tool_calls() -> None:
    answer = '<think>sum</think><call add>{"a": 1}</call><call find>{"b": 2}</call>'
    with (
        serve_in_thread(lambda: open_answering(answer)) as server,
        openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0) as client,
    ):
        tools: Any = TOOLS
        whole = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools).choices[0]
        assert whole.finish_reason == "tool_calls"
        calls = [call.function for call in whole.message.tool_calls or () if call.type == "function"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1}), ("find", {"b": 2})]
        with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=tools) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert [call.function.arguments for call in final.message.tool_calls or ()] == [call.arguments for call in calls]
        # The answer goes back as it came.
        messages = [*MESSAGES, whole.message.model_dump(), {"role": "tool", "tool_call_id": "call_0", "content": "3"}]
        client.chat.completions.create(model="scripted", messages=messages, tools=tools)
        flat: Any = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "find")]
        response = client.responses.create(model="scripted", input="Hi", tools=flat)
        assert [(item.name, item.arguments) for item in response.output if item.type == "function_call"] == [
            (call.name, call.arguments) for call in calls
        ]
        with client.responses.stream(model="scripted", input="Hi", tools=flat) as events:
            assert [item.type for item in events.get_final_response().output] == ["reasoning", "function_call", "function_call"]
        back: Any = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in response.output)]
        back += [{"type": "function_call_output", "call_id": "call_0", "output": "3"}]
        client.responses.create(model="scripted", input=back, tools=flat)
