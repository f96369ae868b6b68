"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec
from msgspec import Meta

from engine.api.schema.common import FunctionName, ResponseFormat, SamplingFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[str, Meta(max_length=64)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
# More than a template can be made to render.
MAX_MESSAGES = 16_384


class TextPart(msgspec.Struct, tag="text", kw_only=True, forbid_unknown_fields=True):
    text: str


class ImagePart(msgspec.Struct, tag="image_url", kw_only=True):
    """Not implemented, like the two below: known, to be refused in these words."""


class AudioPart(msgspec.Struct, tag="input_audio", kw_only=True):
    pass


class FilePart(msgspec.Struct, tag="file", kw_only=True):
    pass


Content = Union[str, list[Union[TextPart, ImagePart, AudioPart, FilePart]]]


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: CallId
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None  # clients send back what they were streamed


class _Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="role"):
    content: Content
    name: Name | None = None


class SystemMessage(_Message, tag="system"):
    pass


class DeveloperMessage(_Message, tag="developer"):
    pass


class UserMessage(_Message, tag="user"):
    pass


class ReminderMessage(_Message, tag="latest_reminder"):
    """DeepSeek's: instructions that count from here on."""


class ToolMessage(_Message, tag="tool"):
    tool_call_id: CallId


class AssistantMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="assistant", tag_field="role"):
    """``reasoning`` is another name of ``reasoning_content``; ``prefix`` (DeepSeek) continues the message instead of answering it."""

    content: Content | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None
    # Not implemented; clients send them back as null.
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None

    not_implemented: ClassVar[dict[str, tuple[Any, ...]]] = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}


Message = Union[SystemMessage, DeveloperMessage, UserMessage, ReminderMessage, AssistantMessage, ToolMessage]


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"]


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: NamedFunction
    type: Literal["function"]


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled"]


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``tools`` and an object in ``tool_choice`` are converted one by one, so that kinds which are not implemented are named."""

    messages: list[Message]
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    # Not implemented.
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    verbosity: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    echo: Any = None

    not_implemented: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingFields.not_implemented,
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "functions": (),
        "function_call": (),
        "moderation": (),
        "verbosity": ("medium",),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "echo": (False,),
    }


CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
