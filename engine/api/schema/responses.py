"""The body of /v1/responses, and the items of its input."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from engine.api.schema.chat import CallId, Effort
from engine.api.schema.common import FunctionName, SamplingFields


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "regex"]
    name: FunctionName | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None
    regex: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None

    not_implemented: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None

    not_implemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        "summary": (),
        "generate_summary": (),
        "context": ("auto",),
        "mode": ("standard",),
    }


class InputText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message: of the client ("input_text"), or of an answer that is sent back ("output_text")."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class ReasoningText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None


class FunctionOutputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: CallId
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: None = None


class ResponsesRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Items, tools and an object in ``tool_choice`` are converted one by one, so that kinds which are not implemented are named."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    # Not implemented.
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    truncation: Any = None
    access_programs: Any = None
    image: Any = None

    not_implemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingFields.not_implemented,
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "truncation": ("disabled",),
        "access_programs": (),
        "image": (),
    }


RESPONSES_DECODER = msgspec.json.Decoder(ResponsesRequest)
