"""The contract of a chat format. One per server, chosen from the model; stateless but for the parsers it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from engine.constraints import Constraint


class ChatInput(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation and what shapes its prompt, checked for types and bounds but not for what a format can do.

    ``messages`` and ``tools`` are in the form of Chat Completions. ``tool_choice`` is "auto", "none", "required" or a function's name
    in a dict ``{"name": ...}``. ``thinking`` None is the format's default. ``template_kwargs`` are the client's options for a jinja
    template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, str] = "auto"
    parallel_tool_calls: bool = True
    constraint: Constraint | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # What a format that makes token ids need not go beyond; the limit itself is checked later. None: no limit.
    context_tokens: int | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a tool call: ``id`` and ``name`` once, with the first piece; ``arguments`` concatenate to one JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """What a piece of generated text adds to the answer; all empty while a parser holds text back."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(Protocol):
    """Takes one sample's text in pieces, in order. Whatever the pieces are, what they add up to is the same."""

    def push(self, text: str) -> Delta: ...

    def finish(self) -> Delta:
        """The end of the text: what was held back, interpreted as well as it can be. Called once."""
        ...

    @property
    def num_tool_calls(self) -> int:
        """Calls begun so far. More than 0 makes the finish reason of a sample that stopped by itself "tool_calls"."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning: what is generated meanwhile counts as reasoning tokens."""
        ...


class PreparedChat(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt ready to be generated from. ``grammar`` is an llguidance grammar over the generated text, or None."""

    prompt: str | tuple[int, ...]
    make_parser: Callable[[], OutputParser]
    grammar: str | None = None
    add_special_tokens: bool = False
    skip_special_tokens: bool = True


class ChatFormat(Protocol):
    """``prepare`` is pure computation and may take a while (templates, tokenising): it is called in a thread."""

    @property
    def name(self) -> str:
        """For the start-up summary: "deepseek_v4.1", "jinja"."""
        ...

    @property
    def has_reasoning(self) -> bool: ...

    @property
    def has_tools(self) -> bool: ...

    def prepare(self, chat: ChatInput) -> PreparedChat:
        """Raises RequestError, naming the field, for what the format or the model's template cannot do."""
        ...

    def prepare_responses(self, body: dict[str, Any], chat: ChatInput) -> PreparedChat:
        """The same for /v1/responses: ``body`` is the request as it came, ``chat`` its translation into messages. A format that has a
        converter of its own takes the former.
        """
        ...


class PlainParser:
    """For models without reasoning or tools: all text is content."""

    num_tool_calls = 0
    in_reasoning = False

    def push(self, text: str) -> Delta:
        return Delta(content=text)

    def finish(self) -> Delta:
        return Delta()
