"""Messages of Chat Completions in the form a Jinja template takes: texts joined, arguments of calls as the template prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.chat_template import ChatTemplate
from engine.core.errors import RequestError

from .call_readers import parse_json
from .limits import check_text_only

_TEXT_KEYS = ("name", "tool_call_id", "reasoning_content")
# Options that switch thinking, by the templates that have them: Qwen3 the first, Granite and DeepSeek V3.1 the second.
THINKING_OPTIONS = ("enable_thinking", "thinking")
MAX_OPTION_CHARS = 4096


class Replay(NamedTuple):
    """How a template wants the calls of the past: arguments as an object or as JSON text, no content as None or as an empty text."""

    arguments_as_text: bool = False
    empty_content: str | None = ""


def probe_replay(template: ChatTemplate) -> Replay:
    """The first way in which the template prints a call's arguments as JSON."""
    for replay in (Replay(), Replay(empty_content=None), Replay(arguments_as_text=True), Replay(True, None)):
        call = {"id": "call_000000000", "type": "function", "function": {"name": "probe_name", "arguments": '{"probe_key": "probe_value"}'}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_000000000", "name": "probe_name", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        try:
            text = template.render(normalise(messages, template, replay), tools=None)
        except RequestError:
            continue
        printed = '"probe_key": "probe_value"' in text or "<parameter=probe_key>" in text
        if "probe_name" in text and printed and r"\"" not in text:
            return replay
    return Replay()


def normalise(messages: Sequence[dict[str, Any]], template: ChatTemplate, replay: Replay) -> list[dict[str, Any]]:
    """Raises RequestError naming the message for what is not text or not a call. The roles are the template's business."""
    check_text_only(messages)
    result = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{where}.role is {role!r:.80}; needed: a text such as 'user'", param=f"{where}.role")
        if role == "developer" and "developer" not in template.source:
            role = "system"
        if message.get("function_call") is not None:
            raise RequestError(f"{where}.function_call is not supported; use tool_calls", param=f"{where}.function_call")
        calls = message.get("tool_calls")
        normal: dict[str, Any] = {
            "role": role,
            "content": _content(message.get("content"), where, optional=bool(calls) or role == "assistant"),
        }
        if calls:
            normal["tool_calls"] = _tool_calls(calls, where, replay)
            normal["content"] = normal["content"] or replay.empty_content
        for key in _TEXT_KEYS:
            value = message.get(key)
            if key == "reasoning_content" and value is None:
                value = message.get("reasoning")
            if value is None:
                continue
            if not isinstance(value, str):
                raise RequestError(f"{where}.{key} is no text", param=f"{where}.{key}")
            normal[key] = value
        result.append(normal)
    return result


def _content(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, list):
        texts = [part.get("text", part.get("refusal")) for part in content]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
        content = None
        optional = False
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    raise RequestError(f"{where}.content is no text and no list of text parts", param=f"{where}.content")


def _tool_calls(calls: Any, where: str, replay: Replay) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls is no list", param=f"{where}.tool_calls")
    result = []
    for index, call in enumerate(calls):
        field = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field} has no function with a name", param=field)
        arguments: Any = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if not isinstance(arguments, dict):
            raise RequestError(f"{field}.function.arguments is no JSON object", param=f"{field}.function.arguments")
        if replay.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        result.append({"id": str(call.get("id") or ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return result


def checked_options(options: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """The client's options for the template: only what it asks for by name, and only single values."""
    for name, value in options.items():
        if name not in template.options and name not in THINKING_OPTIONS:
            known = ", ".join(sorted(template.options)) or "none"
            raise RequestError(
                f"chat_template_kwargs has {name[:80]!r}; this model's template has these options: {known}", param="chat_template_kwargs"
            )
        if not isinstance(value, (str, int, float, bool, type(None))) or len(str(value)) > MAX_OPTION_CHARS:
            raise RequestError(
                f"chat_template_kwargs.{name} must be a text of at most {MAX_OPTION_CHARS} characters, a number, true, false or null",
                param="chat_template_kwargs",
            )
    return options
