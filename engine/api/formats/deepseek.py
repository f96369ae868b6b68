"""DeepSeek V4.1: DeepSeek's own package converts requests, renders and encodes prompts, and parses answers; here it is only driven.

Prompts are token ids: what a client writes is encoded as plain text, so that it cannot smuggle special tokens in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV41Encoding,
    ModelVersion,
    ResponsesRequest,
    Tokenizer,
)

from engine.chat_template import MAX_RENDERED_CHARS
from engine.constraints import AnyJson, JsonSchema
from engine.core.errors import ConfigError, RequestError
from engine.grammar import grammar_of
from engine.tokenizer import refuse_far_too_long

from . import grammars
from .base import ChatInput, PreparedChat
from .deepseek_parser import THINK_END, DeepseekParser
from .dsml import DsmlGrammar
from .limits import check_chat, check_depth, check_text_only

_ALIAS = "served"
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "prefix")
_RESPONSES_KEYS = ("input", "instructions", "tools", "tool_choice", "reasoning", "text", "parallel_tool_calls")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_Result = TypeVar("_Result")


class DeepseekFormat:
    name = "deepseek_v4.1"
    has_reasoning = True
    has_tools = True

    def __init__(self, tokenizer_json: bytes, *, think_end_token: int, dsml_token: int, thinking: bool = True) -> None:
        """``thinking`` is for requests that do not say. Raises ConfigError where the package cannot read the tokenizer."""
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
        except Exception as error:  # the package raises what the tokenizers library does
            raise ConfigError(f"deepseek-recipe cannot read the model's tokenizer.json: {error}") from None
        self._tokenizer = tokenizer
        self._encoding = DeepseekV41Encoding().with_tokenizer(tokenizer)
        self._think_end_token = think_end_token
        self._dsml = DsmlGrammar(dsml_token)
        self._thinking = thinking

    def prepare(self, chat: ChatInput) -> PreparedChat:
        check_chat(chat)
        check_text_only(chat.messages)
        if not chat.add_generation_prompt and not chat.continue_final_message:
            raise RequestError(
                "add_generation_prompt false is only possible with continue_final_message for this model", param="add_generation_prompt"
            )
        body: dict[str, Any] = {"model": _ALIAS, "messages": _messages(chat)}
        if chat.tools:
            choice = chat.tool_choice
            body["tools"] = chat.tools
            body["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": choice}
        if isinstance(chat.constraint, AnyJson):
            body["response_format"] = {"type": "json_object"}
        elif isinstance(chat.constraint, JsonSchema):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": chat.constraint.schema}}
        if chat.reasoning_effort is not None:
            body["reasoning_effort"] = chat.reasoning_effort
        thinking = _thinking(chat)
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        elif chat.template_kwargs.get("reasoning_effort") is not None:
            body["reasoning_effort"] = chat.template_kwargs["reasoning_effort"]
        return self._finish(chat, lambda: ChatCompletionRequest(body).convert(self._options(self._thinking)), "messages")

    def prepare_responses(self, body: dict[str, Any], chat: ChatInput) -> PreparedChat:
        check_chat(chat)
        picked = {"model": _ALIAS} | {key: body[key] for key in _RESPONSES_KEYS if body.get(key) is not None}
        check_depth(picked, "input")
        if isinstance(picked.get("input"), list):
            check_text_only(picked["input"])
        for index, tool in enumerate(picked.get("tools") or ()):
            if not isinstance(tool, dict) or tool.get("type") != "function":
                raise RequestError(f"tools[{index}] is no function; supported: tools of type 'function'", param=f"tools[{index}]")
        thinking = _thinking(chat)
        default = self._thinking if thinking is None else thinking
        return self._finish(chat, lambda: ResponsesRequest(picked).convert(self._options(default)), "input")

    def _options(self, thinking: bool) -> ConversionOptions:
        return ConversionOptions(default_thinking_mode=thinking).with_model_alias(_ALIAS, ModelVersion.DeepseekV41Flash)

    def _finish(self, chat: ChatInput, convert: Callable[[], ConversationRequest], param: str) -> PreparedChat:
        request = _refusing(convert, param)
        if any(message.image_sources for message in request.conversation.messages):
            raise RequestError("images are not supported", param=param)
        text = self._encoding.render_conversation(request.conversation).prompt
        if len(text) > MAX_RENDERED_CHARS:
            raise RequestError(f"{param} renders to {len(text)} characters; allowed: at most {MAX_RENDERED_CHARS}", param=param)
        if chat.context_tokens is not None:
            refuse_far_too_long(text, chat.context_tokens, self._tokenizer.encode, param)
        ids = _refusing(lambda: self._encoding.encode(request.conversation), param)
        return PreparedChat(
            prompt=tuple(ids),
            make_parser=lambda: DeepseekParser(request),
            grammar=self._grammar(chat, request),
        )

    def _grammar(self, chat: ChatInput, request: ConversationRequest) -> str | None:
        stage = request.parsing_options.thinking_initial_stage
        reasons = stage is not None and stage.starts_in_reasoning()
        has_calls = bool(chat.tools) and chat.tool_choice != "none"
        if not has_calls:
            if chat.constraint is None:
                return None
            return grammar_of(chat.constraint, reasoning_end_token=self._think_end_token if reasons else None)
        thoughts = grammars.Thoughts(None, grammars.Marker(THINK_END, self._think_end_token)) if reasons else None
        opened = request.parsing_options.starts_in_tool_calls
        functions = [tool["function"] for tool in chat.tools or () if _chosen(tool["function"], chat)]
        if opened:
            return grammars.forced(self._dsml.calls(functions, parallel=chat.parallel_tool_calls, opened=True))
        if chat.constraint is None and chat.parallel_tool_calls:
            return None
        calls = self._dsml.calls(functions, parallel=chat.parallel_tool_calls, opened=False)
        return grammars.optional(calls, chat.constraint, thoughts)


def _chosen(function: dict[str, Any], chat: ChatInput) -> bool:
    return not isinstance(chat.tool_choice, dict) or function["name"] == chat.tool_choice["name"]


def _messages(chat: ChatInput) -> list[dict[str, Any]]:
    """What the package knows of a message, under the names it knows."""
    messages = []
    for message in chat.messages:
        picked = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
        if message.get("role") == "developer":
            picked["role"] = "system"
        if picked.get("role") == "assistant":
            if "reasoning_content" not in picked and message.get("reasoning") is not None:
                picked["reasoning_content"] = message["reasoning"]
            if "content" not in picked and not picked.get("tool_calls"):
                picked["content"] = ""
        messages.append(picked)
    if chat.continue_final_message:
        messages[-1]["prefix"] = True
    return messages


def _thinking(chat: ChatInput) -> bool | None:
    """What the request says; its own fields before the options of a template, which this model has none of but these."""
    unknown = sorted(set(chat.template_kwargs) - {"thinking", "enable_thinking", "reasoning_effort"})
    if unknown:
        raise RequestError(
            f"chat_template_kwargs has {unknown[0][:80]!r}; this model's format knows thinking, enable_thinking and reasoning_effort",
            param="chat_template_kwargs",
        )
    if chat.reasoning_effort is not None and chat.reasoning_effort not in _EFFORTS:
        raise RequestError(f"reasoning_effort is {chat.reasoning_effort[:80]!r}; allowed: {', '.join(_EFFORTS)}", param="reasoning_effort")
    if chat.thinking is not None:
        return chat.thinking
    if chat.reasoning_effort is not None:
        return chat.reasoning_effort != "none"
    for key in ("thinking", "enable_thinking"):
        value = chat.template_kwargs.get(key)
        if value is not None:
            if not isinstance(value, bool):
                raise RequestError(f"chat_template_kwargs.{key} is {value!r:.80}; allowed: true, false", param="chat_template_kwargs")
            return value
    return None


def _refusing(action: Callable[[], _Result], param: str) -> _Result:
    """The package's refusals as ours. It names no field, but its texts do."""
    try:
        return action()
    except (ConversionError, ValueError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        text = str(error).removeprefix("invalid request body: ")
        fields = {
            "tool_choice": "tool_choice",
            "'tool_call'": "tool_choice",
            "'tools": "tools",
            "Tool names": "tools",
            "effort": "reasoning_effort",
        }
        fields["response_format"] = fields["text.format"] = "response_format"
        named = next((field for part, field in fields.items() if part in text), param)
        if "does not support this tool_choice" in text:
            text = 'tool_choice forces a call, which this model cannot do while thinking; set thinking to {"type": "disabled"}'
        raise RequestError(text, param=named) from None
