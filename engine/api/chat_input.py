"""A chat request as the chat format takes it: fields checked, tools and options converted, the prompt made in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from engine.api.config import ApiConfig
from engine.api.context import ApiContext
from engine.api.formats.base import ChatFormat, ChatInput, PreparedChat
from engine.api.sampling import constraint_of, in_thread
from engine.api.schema.chat import (
    MAX_MESSAGES,
    AssistantMessage,
    ChatRequest,
    Message,
    NamedToolChoice,
    TextPart,
    Tool,
)
from engine.api.schema.common import check_depth, convert, not_implemented, refuse_unimplemented, shown
from engine.core.errors import RequestError

# Variables of templates in use that only say how to render. Values are scalars: nothing a template could call or iterate.
TEMPLATE_OPTIONS = (
    "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "clear_thinking", "preserve_thinking", "date_string",
    "custom_instructions", "model_identity",
)  # fmt: skip
_MAX_OPTION_CHARS = 4096


async def prepare(context: ApiContext, work: Callable[[ChatFormat], PreparedChat]) -> PreparedChat:
    """Make a prompt with the model's chat format. Raises RequestError where the model has none."""
    chat_format = context.chat_format
    if chat_format is None:
        raise RequestError("the model has no chat template: use /v1/completions", param="messages", code="no_chat_template")
    return await in_thread(lambda: work(chat_format))


def chat_input_of(request: ChatRequest, config: ApiConfig, context_tokens: int) -> ChatInput:
    """Raises RequestError for what the types of the fields do not express."""
    check_messages(request.messages)
    last = request.messages[-1]
    prefix = isinstance(last, AssistantMessage) and bool(last.prefix)
    continues = bool(request.continue_final_message) or prefix
    if continues and request.add_generation_prompt:
        raise RequestError("add_generation_prompt and continue_final_message are both true", param="add_generation_prompt")
    if continues and not isinstance(last, AssistantMessage):
        raise RequestError("continue_final_message is true, and the last message is not the assistant's", param="continue_final_message")
    tools = tools_of(request.tools, config, _chat_tool)
    template_kwargs = _template_kwargs(request.chat_template_kwargs)
    return ChatInput(
        messages=[_message_dict(message) for message in request.messages],
        tools=tools,
        tool_choice=tool_choice_of(request.tool_choice, tools, _chat_tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        constraint=constraint_of(request.response_format, request.structured_outputs, config),
        thinking=_thinking(request, template_kwargs),
        reasoning_effort=None if request.reasoning_effort == "none" else request.reasoning_effort,
        template_kwargs=template_kwargs,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        context_tokens=context_tokens,
    )


def check_messages(messages: Sequence[Message]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries; allowed: 1 to {MAX_MESSAGES}", param="messages")
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message.content, str) and message.content is not None:
            for number, part in enumerate(message.content):
                if not isinstance(part, TextPart):
                    raise not_implemented(f"{at}.content[{number}]", f": a part of the type {shown(part.__struct_config__.tag)}")
        if isinstance(message, AssistantMessage):
            refuse_unimplemented(message, message.not_implemented, at)
            if message.prefix and index != len(messages) - 1:
                raise RequestError(f"{at}.prefix is true; allowed: in the last message", param=f"{at}.prefix")
            if message.content is None and not message.tool_calls and not message.reasoning_content and not message.reasoning:
                raise RequestError(f"{at} has neither content nor tool_calls", param=at)


def _message_dict(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message, AssistantMessage):
        fields.setdefault("content", None)
        reasoning = fields.pop("reasoning", None)
        if reasoning is not None:
            fields.setdefault("reasoning_content", reasoning)
        fields.pop("prefix", None)  # said by continue_final_message
        fields.pop("annotations", None)
        for call in fields.get("tool_calls") or ():
            call.pop("index", None)
    return fields


def _thinking(request: ChatRequest, template_kwargs: Mapping[str, Any]) -> bool | None:
    """Whether the model is to think, by whichever of its names was used; None is the format's default."""
    said: dict[str, bool] = {}
    if request.thinking is not None:
        said["thinking"] = request.thinking.type == "enabled"
    for name in ("enable_thinking", "thinking"):
        value = template_kwargs.get(name)
        if value is not None:
            if not isinstance(value, bool):
                at = f"chat_template_kwargs.{name}"
                raise RequestError(f"{at} is {shown(value)}; allowed: true or false", param=at)
            said[f"chat_template_kwargs.{name}"] = value
    if request.reasoning_effort == "none":
        said["reasoning_effort"] = False
    if len(set(said.values())) > 1:
        raise RequestError(f"{' and '.join(said)} contradict each other: think, or do not", param=next(iter(said)))
    return next(iter(said.values()), None)


def _template_kwargs(options: Mapping[str, Any] | None) -> dict[str, Any]:
    for name, value in (options or {}).items():
        at = "chat_template_kwargs"
        if name not in TEMPLATE_OPTIONS:
            raise RequestError(f"{at} has the key {shown(name)}; allowed: {', '.join(TEMPLATE_OPTIONS)}", param=at)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise RequestError(f"{at}.{name} is no scalar; allowed: text, a number, true or false", param=f"{at}.{name}")
        if isinstance(value, (str, int)) and len(str(value)) > _MAX_OPTION_CHARS:
            raise RequestError(f"{at}.{name} is longer than {_MAX_OPTION_CHARS} characters", param=f"{at}.{name}")
    return dict(options or {})


# -- tools ------------------------------------------------------------------------------------------------------------------------


def tools_of(
    tools: list[dict[str, Any]] | None, config: ApiConfig, convert_tool: Callable[[dict[str, Any], str], Tool]
) -> list[dict[str, Any]] | None:
    """Tools in the form of Chat Completions; None for none."""
    if not tools:
        return None
    if len(tools) > config.max_tools:
        raise RequestError(f"tools has {len(tools)} entries; allowed: at most {config.max_tools}", param="tools")
    names: set[str] = set()
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "function":
            raise not_implemented(f"{at}.type", f": a tool of the type {shown(kind)}")
        converted = convert_tool(tool, at)
        name = converted.function.name
        if name in names:
            raise RequestError(f"{at} has the name {name}, as an earlier one has", param=at)
        names.add(name)
        check_depth(converted.function.parameters, f"{at}.parameters")
        found.append(msgspec.to_builtins(converted))
    return found


def tool_choice_of(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None, name_of: Callable[[dict[str, Any]], str]
) -> Literal["auto", "none", "required"] | dict[str, str]:
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if not isinstance(choice, dict):
        return "required"
    kind = choice.get("type")
    if isinstance(kind, str) and kind != "function":
        raise not_implemented("tool_choice.type", f": {shown(kind)}")
    name = name_of(choice)
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError(f"tool_choice names {name}; tools has {', '.join(names[:20])}", param="tool_choice")
    return {"name": name}


def _chat_tool(tool: dict[str, Any], at: str) -> Tool:
    return convert(tool, Tool, at)


def _chat_tool_choice(choice: dict[str, Any]) -> str:
    return convert(choice, NamedToolChoice, "tool_choice").function.name
