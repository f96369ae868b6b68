"""Bounds on what shapes a prompt. Checked before anything walks the values, so that neither nesting nor size can hurt what comes after."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from engine.chat_template import MAX_MESSAGES
from engine.constraints import JsonSchema
from engine.core.errors import RequestError

from .base import ChatInput

MAX_TOOLS = 128
MAX_TOOL_BYTES = 256 << 10  # all definitions together: they become prompt and grammar
MAX_TOOL_NAME_CHARS = 64  # as OpenAI
MAX_DEPTH = 64  # of messages, tools and schemas; converters and grammars recurse

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]+")


def check_chat(chat: ChatInput) -> None:
    """Raises RequestError naming the field for whatever is over its bound, or contradicts the rest."""
    if not chat.messages:
        raise RequestError("messages is empty; needed: at least one", param="messages")
    if len(chat.messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(chat.messages)} entries; allowed: at most {MAX_MESSAGES}", param="messages")
    check_depth(chat.messages, "messages")
    if isinstance(chat.constraint, JsonSchema):
        check_depth(chat.constraint.schema, "response_format")
    _check_tools(chat)
    if chat.continue_final_message and chat.messages[-1].get("role") != "assistant":
        raise RequestError("continue_final_message needs an assistant message at the end", param="continue_final_message")


def _check_tools(chat: ChatInput) -> None:
    tools = chat.tools or []
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; allowed: at most {MAX_TOOLS}", param="tools")
    check_depth(tools, "tools")
    size = len(json.dumps(tools))
    if size > MAX_TOOL_BYTES:
        raise RequestError(f"tools take {size} bytes; allowed: at most {MAX_TOOL_BYTES}", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        names.add(_check_tool(tool, f"tools[{index}]"))
    if len(names) < len(tools):
        raise RequestError("tools has two functions of one name", param="tools")
    choice = chat.tool_choice
    if isinstance(choice, dict):
        if choice.get("name") not in names:
            raise RequestError(f"tool_choice names {choice.get('name')!r}, which is not among the tools", param="tool_choice")
    elif choice == "required" and not tools:
        raise RequestError("tool_choice is 'required', but there are no tools", param="tool_choice")


def _check_tool(tool: dict[str, Any], where: str) -> str:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(f"{where}.type is {kind!r}; supported: 'function'", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function is missing; needed: an object with the function's name", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or len(name) > MAX_TOOL_NAME_CHARS or not _TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {str(name)[:80]!r}; allowed: 1 to {MAX_TOOL_NAME_CHARS} of a-z, A-Z, 0-9, '_', '-' and '.'",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise RequestError(f"{where}.function.parameters is no JSON Schema object", param=f"{where}.function.parameters")
    return name


def check_depth(value: Any, param: str) -> None:
    """No recursion: the value may be deeper than the interpreter's stack."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise RequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def check_text_only(messages: Iterable[Any]) -> None:
    """Nothing but text is understood, and nothing is ever fetched. Raises RequestError naming the part that is something else."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for position, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "output_text", "reasoning_text", "refusal"):
                where = f"messages[{index}].content[{position}]"
                raise RequestError(f"{where} is of type {kind!r}; supported: text", param=where)
