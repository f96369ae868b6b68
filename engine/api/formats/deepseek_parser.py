"""Answers of DeepSeek V4.1, by the parser of DeepSeek's own package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    InferenceChunk,
    InferenceFinishReason,
    StreamProcessor,
    ThinkingInitialStage,
)

from .base import Delta, ToolCallDelta

THINK_END = "</think>"
_END_OF_CALLS = re.compile("</｜DSML｜ ?(?:tool_)?calls>")


class _HasJson(Protocol):
    def to_json(self) -> str: ...


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _ChunkDelta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Chunk)


class DeepseekParser:
    """The package drops what it takes for markup that never became a call; here it is remembered and given back at the end."""

    def __init__(self, request: ConversationRequest) -> None:
        options = request.parsing_options
        # A grammar sees to the JSON, and the engine to stop strings.
        options.parse_json_output = False
        options.stop_sequences = []
        if request.conversation.messages[-1].prefix and options.thinking_initial_stage is None:
            options.thinking_initial_stage = ThinkingInitialStage.ContentContinuation  # keeps leading newlines
        self._processor = StreamProcessor(ChatCompletionRequest.chunk_generator(request, "", ""), options)
        self._processor.push(InferenceChunk.ready())
        stage = options.thinking_initial_stage
        self.in_reasoning = stage is not None and stage.starts_in_reasoning() and not options.starts_in_tool_calls
        self.num_tool_calls = 0
        self._unseen: list[str] = []  # text the package took and has not given back
        self._tail = ""  # of the reasoning, as long as an end tag but for one character

    def push(self, text: str) -> Delta:
        if not text:
            return Delta()
        self._unseen.append(text)
        if self.in_reasoning:
            self._tail += text
            self.in_reasoning = THINK_END not in self._tail
            self._tail = self._tail[1 - len(THINK_END) :]
        return self._take(self._processor.push(InferenceChunk.text(text, 1)))

    def finish(self) -> Delta:
        chunks = self._processor.push(InferenceChunk.finish(InferenceFinishReason.Stop))
        delta = self._take(chunks + self._processor.finish())
        rest = self._dropped()
        if not rest:
            return delta
        if self.in_reasoning:
            return Delta(delta.content, delta.reasoning + rest, delta.tool_calls)
        return Delta(delta.content + rest, delta.reasoning, delta.tool_calls)

    def _take(self, chunks: Sequence[_HasJson]) -> Delta:
        content = reasoning = ""
        calls: list[ToolCallDelta] = []
        for chunk in chunks:
            for choice in _decoder.decode(chunk.to_json()).choices:
                delta = choice.delta
                for shown in (delta.reasoning_content, delta.content):
                    if shown:
                        self._mark_shown(shown)
                reasoning += delta.reasoning_content or ""
                content += delta.content or ""
                for call in delta.tool_calls or ():
                    self._add_call(calls, call)
        return Delta(content, reasoning, tuple(calls))

    def _add_call(self, calls: list[ToolCallDelta], call: _Call) -> None:
        self.in_reasoning = False
        self.num_tool_calls = max(self.num_tool_calls, call.index + 1)
        piece = ToolCallDelta(call.index, call.function.arguments or "", call.id, call.function.name)
        if calls and calls[-1].index == piece.index and piece.id is None:
            last = calls[-1]
            calls[-1] = ToolCallDelta(last.index, last.arguments + piece.arguments, last.id, last.name)
        else:
            calls.append(piece)

    def _mark_shown(self, shown: str) -> None:
        """Forget the text up to and including ``shown``. Before it, there can be only what the format trims: end tags, newlines."""
        text = "".join(self._unseen)
        begin = 0
        while begin < len(text):
            if text.startswith(THINK_END, begin):  # never shown
                begin += len(THINK_END)
            elif text.startswith(shown, begin):
                break
            else:
                begin += 1
        self._unseen = [text[begin + len(shown) :]]

    def _dropped(self) -> str:
        text = "".join(self._unseen)
        if self.num_tool_calls:
            end = _END_OF_CALLS.search(text)
            text = text[end.end() :] if end else ""
            return text if text.strip() else ""
        text = text.replace(THINK_END, "")
        return text if text.strip("\n") else ""
