"""What one sample of a chat adds up to: its text through the format's parser, its log-probabilities, its end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.actors.stream import Output
from engine.api.formats.base import Delta, OutputParser, ToolCallDelta
from engine.api.logprobs import TokenLogprob, TokenNames, chat_entries
from engine.api.streams import OpenStreams

_NOTHING = Delta()


class ChatSample:
    """``push`` each output, in order. Log-probabilities gather until ``take_logprobs``: a parser may hold their text back."""

    __slots__ = ("_names", "_num_top", "_pending", "finish_reason", "index", "parser", "stop_reason")

    def __init__(self, index: int, parser: OutputParser, names: TokenNames, num_top_logprobs: int | None) -> None:
        self.index = index
        self.parser = parser
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._names = names
        self._num_top = num_top_logprobs
        self._pending: list[TokenLogprob] = []

    def push(self, output: Output, streams: OpenStreams) -> Delta:
        """What the output adds to the answer. Sets ``finish_reason`` with the last one."""
        parser = self.parser
        streams.count(output, reasoning=parser.in_reasoning)
        if self._num_top is not None:
            self._pending += chat_entries(self._names, output.token_ids, output.logprobs, self._num_top)
        delta = parser.push(output.text) if output.text else _NOTHING
        if output.finish_reason is not None:
            delta = _joined(delta, parser.finish())
            called = output.finish_reason == "stop" and parser.num_tool_calls > 0
            self.finish_reason = "tool_calls" if called else output.finish_reason
            self.stop_reason = output.stop_reason
        return delta

    def take_logprobs(self) -> list[TokenLogprob] | None:
        """The entries of the tokens since the last call; None where none were asked for."""
        if self._num_top is None:
            return None
        taken, self._pending = self._pending, []
        return taken


class FunctionBody(msgspec.Struct):
    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    id: str
    type: str
    function: FunctionBody


class Answer:
    """Deltas added up: the answer that is not streamed."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, ToolCallBody] = {}

    def add(self, delta: Delta) -> None:
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            known = self._tool_calls.get(call.index)
            if known is None:
                known = self._tool_calls[call.index] = ToolCallBody("", "function", FunctionBody("", ""))
            known.id += call.id or ""
            known.function.name += call.name or ""
            known.function.arguments += call.arguments

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCallBody]:
        return [self._tool_calls[index] for index in sorted(self._tool_calls)]


def _joined(first: Delta, second: Delta) -> Delta:
    if not second:
        return first
    calls: Sequence[ToolCallDelta] = (*first.tool_calls, *second.tool_calls)
    return Delta(first.content + second.content, first.reasoning + second.reasoning, tuple(calls))
