"""Chats by a model's own Jinja template. What the template does not have (tools, thinking) is refused.

The prompt is text: a client that writes a model's special tokens gets them, as with every engine that renders templates.
"""

from __future__ import annotations

import secrets
from typing import Any

from engine.core.errors import ConfigError, RequestError
from engine.grammar import grammar_of
from engine.tokenizer import Tokenizer

from . import grammars
from .base import ChatInput, PlainParser, PreparedChat
from .calls import detect_form
from .grammars import Marker, Thoughts
from .limits import check_chat
from .template_messages import THINKING_OPTIONS, checked_options, normalise, probe_replay
from .template_parser import THINK_BEGIN, THINK_END, TemplateParser, Thinking

_MAX_EFFORT_CHARS = 32


class TemplateFormat:
    name = "jinja"

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None) -> None:
        """``thinking`` is for requests that do not say, None leaves it to the template. Raises ConfigError where that cannot be."""
        if tokenizer.chat_template is None:
            raise ConfigError("the model has no chat template")
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        source = self._template.source
        self._form = detect_form(source) if self._template.uses_tools else None
        self._replay = probe_replay(self._template)
        self.has_tools = self._form is not None
        self.has_reasoning = THINK_END in source
        self._switches = [name for name in THINKING_OPTIONS if name in self._template.options]
        self._thinking = thinking
        if thinking is not None and not self._switches and thinking != self.has_reasoning:
            state = "on" if thinking else "off"
            raise ConfigError(f"thinking cannot be switched {state}: the model's chat template has no option for it; use 'auto'")
        marks = [THINK_BEGIN, THINK_END] if self.has_reasoning else []
        if self._form is not None:
            marks += [text for text in (self._form.opening, self._form.closing) if text]
        ids = [tokenizer.token_id(text) for text in marks]
        # What the parser looks for must be in the text.
        self._skip_special_tokens = not any(token is not None and tokenizer.is_special(token) for token in ids)

    def prepare(self, chat: ChatInput) -> PreparedChat:
        check_chat(chat)
        tools = self._tools(chat)
        variables = self._variables(chat)
        messages = normalise(chat.messages, self._template, self._replay)
        prompt = self._render(chat, messages, tools, variables)
        thinking = self._thinking_after(prompt, variables)
        if thinking == "none" and not tools:
            return PreparedChat(
                prompt=prompt,
                make_parser=PlainParser,
                grammar=None if chat.constraint is None else grammar_of(chat.constraint),
            )
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()}
        form = self._form if tools else None
        return PreparedChat(
            prompt=prompt,
            make_parser=lambda: TemplateParser(thinking, form, functions, parallel=chat.parallel_tool_calls),
            grammar=self._grammar(chat, tools, thinking),
            skip_special_tokens=self._skip_special_tokens,
        )

    def prepare_responses(self, body: dict[str, Any], chat: ChatInput) -> PreparedChat:
        del body
        return self.prepare(chat)

    def _tools(self, chat: ChatInput) -> list[dict[str, Any]] | None:
        if not chat.tools or chat.tool_choice == "none":
            return None
        if self._form is None:
            why = "whose form of tool calls is not known" if self._template.uses_tools else "which has none"
            raise RequestError(f"tools are not supported with this model's chat template, {why}", param="tools")
        if isinstance(chat.tool_choice, dict):
            return [tool for tool in chat.tools if tool["function"]["name"] == chat.tool_choice["name"]]
        return chat.tools

    def _variables(self, chat: ChatInput) -> dict[str, Any]:
        """Options of the template: the client's, then the fields of the API, which mean the same for every model."""
        variables = dict(checked_options(chat.template_kwargs, self._template))
        asked = [variables.pop(name) for name in THINKING_OPTIONS if name in variables]
        thinking = chat.thinking
        if thinking is None and asked:
            thinking = bool(asked[0])
        effort = chat.reasoning_effort
        if effort is not None:
            if len(effort) > _MAX_EFFORT_CHARS:
                raise RequestError(f"reasoning_effort has more than {_MAX_EFFORT_CHARS} characters", param="reasoning_effort")
            if thinking is None:
                thinking = effort != "none"
            if "reasoning_effort" in self._template.options:
                variables["reasoning_effort"] = effort
            elif not self._switches and not (effort == "none" and not self.has_reasoning):
                raise RequestError("reasoning_effort is not supported with this model's chat template", param="reasoning_effort")
        elif thinking is not None and not self._switches and thinking != self.has_reasoning:
            raise RequestError("thinking cannot be switched with this model's chat template", param="thinking")
        if thinking is None:
            thinking = self._thinking
        if thinking is not None:
            variables |= dict.fromkeys(self._switches, thinking)
        return variables

    def _render(
        self, chat: ChatInput, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> str:
        if not chat.continue_final_message:
            return self._template.render(messages, tools=tools, variables=variables, add_generation_prompt=chat.add_generation_prompt)
        # A mark that no client can foresee shows where the message ends in the prompt, and keeps its spaces from being trimmed.
        mark = f"<{secrets.token_hex(16)}>"
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": (last["content"] or "") + mark}]
        rendered = self._template.render(messages, tools=tools, variables=variables, add_generation_prompt=False)
        begin, found, _ = rendered.rpartition(mark)
        if not found:
            raise RequestError("the model's chat template does not print the final message as it is", param="continue_final_message")
        return begin

    def _thinking_after(self, prompt: str, variables: dict[str, Any]) -> Thinking:
        """What the answer begins with, by what the prompt ends with."""
        if not self.has_reasoning:
            return "none"
        begun, ended = prompt.rfind(THINK_BEGIN), prompt.rfind(THINK_END)
        if begun > ended and not prompt[begun + len(THINK_BEGIN) :].strip():
            return "begun"
        off = any(variables.get(name) is False for name in self._switches)
        return "none" if off or (ended > begun and not prompt[ended + len(THINK_END) :].strip()) else "possible"

    def _grammar(self, chat: ChatInput, tools: list[dict[str, Any]] | None, thinking: Thinking) -> str | None:
        if not tools and chat.constraint is None:
            return None
        thoughts = None
        if thinking != "none":
            thoughts = Thoughts(self._mark(THINK_BEGIN) if thinking == "possible" else None, self._mark(THINK_END))
        if not tools:
            assert chat.constraint is not None
            return grammar_of(chat.constraint) if thoughts is None else grammars.after_thoughts(chat.constraint, thoughts)
        assert self._form is not None
        is_forced = chat.tool_choice != "auto"
        if not is_forced and chat.constraint is None and (chat.parallel_tool_calls or self._form.bare):
            return None
        functions = [tool["function"] for tool in tools]
        calls = self._form.grammar(functions, self._mark, parallel=chat.parallel_tool_calls)
        return grammars.forced(calls, thoughts) if is_forced else grammars.optional(calls, chat.constraint, thoughts)

    def _mark(self, text: str) -> Marker:
        token = self._tokenizer.token_id(text)
        return Marker(text, token if token in self._tokenizer.control_ids else None)
