"""The input of /v1/responses as a conversation: items to messages in the form of Chat Completions."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.api.chat_input import tool_choice_of, tools_of
from engine.api.config import ApiConfig
from engine.api.formats.base import ChatInput
from engine.api.sampling import constraint_of, regex_constraint, schema_constraint
from engine.api.schema.chat import MAX_MESSAGES, Function, Tool
from engine.api.schema.common import convert, not_implemented, refuse_unimplemented, shown
from engine.api.schema.responses import (
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    FunctionTool,
    InputText,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from engine.constraints import AnyJson, Constraint
from engine.core.errors import RequestError

Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_input_of(request: ResponsesRequest, config: ApiConfig, context_tokens: int) -> ChatInput:
    """Raises RequestError for what the types of the fields do not express."""
    tools = tools_of(request.tools, config, _tool)
    effort = request.reasoning.effort if request.reasoning is not None else None
    return ChatInput(
        messages=_messages(request),
        tools=tools,
        tool_choice=tool_choice_of(request.tool_choice, tools, _chosen_name),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        constraint=_constraint(request, config),
        thinking=False if effort == "none" else None,
        reasoning_effort=None if effort == "none" else effort,
        context_tokens=context_tokens,
    )


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not 1 <= len(request.input) <= MAX_MESSAGES:
        raise RequestError(f"input has {len(request.input)} items; allowed: 1 to {MAX_MESSAGES}", param="input")
    # An answer comes back as up to three kinds of items, in this order: they are one message.
    answer: dict[str, Any] | None = None
    for index, raw in enumerate(request.input):
        item = _item(raw, f"input[{index}]")
        match item:
            case ReasoningItem():
                if answer is None or answer["content"] is not None or "tool_calls" in answer:
                    answer = _begin_answer(messages)
                answer.setdefault("reasoning_content", []).extend(part.text for part in item.content or item.summary)
            case MessageItem(role="assistant"):
                if answer is None or answer["content"] is not None or "tool_calls" in answer:
                    answer = _begin_answer(messages)
                answer["content"] = _content(item.content, f"input[{index}].content")
            case FunctionCallItem():
                answer = _begin_answer(messages) if answer is None else answer
                function = {"name": item.name, "arguments": item.arguments}
                answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case MessageItem():
                answer = None
                messages.append({"role": item.role, "content": _content(item.content, f"input[{index}].content")})
            case FunctionOutputItem():
                answer = None
                output = _content(item.output, f"input[{index}].output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _begin_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _item(raw: dict[str, Any], at: str) -> Item:
    kind = raw.get("type", "message")
    item_type = _ITEMS.get(kind) if isinstance(kind, str) else None
    if item_type is None:
        raise not_implemented(f"{at}.type", f": {shown(kind)}; allowed: {', '.join(_ITEMS)}")
    return convert(raw, item_type, at)


def _content(content: str | list[dict[str, Any]], at: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for index, raw in enumerate(content):
        kind = raw.get("type")
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise not_implemented(f"{at}[{index}].type", f": {shown(kind)}; allowed: {', '.join(_TEXT_PARTS)}")
        parts.append({"type": "text", "text": convert(raw, InputText, f"{at}[{index}]").text})
    return parts


def _tool(tool: dict[str, Any], at: str) -> Tool:
    flat = convert(tool, FunctionTool, at)
    function = Function(name=flat.name, description=flat.description, parameters=flat.parameters, strict=flat.strict)
    return Tool(type="function", function=function)


def _chosen_name(choice: dict[str, Any]) -> str:
    return convert(choice, FunctionChoice, "tool_choice").name


def _constraint(request: ResponsesRequest, config: ApiConfig) -> Constraint | None:
    form = request.text.format if request.text is not None else None
    asked = None if form is None else _of_text_format(form, config)
    structured = constraint_of(None, request.structured_outputs, config)
    if asked is not None and structured is not None:
        raise RequestError("text.format and structured_outputs are both given; allowed: one of them", param="structured_outputs")
    return structured if asked is None else asked


def _of_text_format(form: TextFormat, config: ApiConfig) -> Constraint | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return AnyJson()
        case "regex":
            return regex_constraint(form.regex, "text.format.regex", config)
        case "json_schema":
            if form.schema is None:
                raise RequestError("text.format.schema is required", param="text.format.schema", code="missing_required_parameter")
            return schema_constraint(form.schema, "text.format.schema", config)


def check_parts(request: ResponsesRequest) -> None:
    """Raise RequestError for what is not implemented inside ``text``, ``reasoning`` and ``include``."""
    for name in ("text", "reasoning"):
        part: Any = getattr(request, name)
        if part is not None:
            refuse_unimplemented(part, part.not_implemented, name)
    for entry in request.include or ():
        if entry != "message.output_text.logprobs":
            raise not_implemented("include", f" for {shown(entry)}; allowed: message.output_text.logprobs")


def raw_body(body: bytes) -> dict[str, Any]:
    """The body as it came, for formats with a converter of their own. It was decoded and checked before."""
    decoded: dict[str, Any] = msgspec.json.decode(body)
    return decoded
