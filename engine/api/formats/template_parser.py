"""Answers of models with a Jinja template: thoughts in ``<think>`` tags, then text and tool calls in the model's own form.

A call is given as a whole, when it is complete: only then is it known to be one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from .base import Delta, ToolCallDelta
from .call_readers import ParsedCall, Reader
from .calls import CallForm

THINK_BEGIN = "<think>"
THINK_END = "</think>"
_MAX_LEADING_SPACE = 16  # before a tag that may begin an answer

_SLICE_CHARS = 1024
_SPACE = " \t\r\n"

Thinking = Literal["none", "begun", "possible"]
_State = Literal["start", "thoughts", "text", "call"]
_FIRST: dict[Thinking, _State] = {"none": "text", "begun": "thoughts", "possible": "start"}


class TemplateParser:
    """``thinking``: whether the prompt has opened the thoughts, or the answer may. ``functions`` maps names to their parameters' schemas.

    Leading newlines of thoughts and of what follows them are dropped, and white space after a call. Thoughts that never end are
    thoughts. What begins like a call and is none is text.
    """

    def __init__(self, thinking: Thinking, form: CallForm | None, functions: Mapping[str, Any], *, parallel: bool = True) -> None:
        self._form = form
        self._functions = functions
        self._parallel = parallel
        self._state: _State = _FIRST[thinking]
        self._trim = "\n" if thinking == "begun" else ""  # characters to drop until another comes
        self._may_be_bare = form is not None and form.bare
        self._may_close = False  # right after a call
        self._buffer = ""
        self._reader: Reader | None = None
        self._opened = ""  # what began the call under way
        self._raw: list[str] = []  # of the call under way
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._steps = {"start": self._start, "thoughts": self._think, "text": self._text, "call": self._call}
        self.num_tool_calls = 0

    @property
    def in_reasoning(self) -> bool:
        return self._state == "thoughts"

    def push(self, text: str) -> Delta:
        # In slices: what is no call is looked at again, and that should not be a whole long text each time.
        for begin in range(0, len(text), _SLICE_CHARS):
            self._buffer += text[begin : begin + _SLICE_CHARS]
            self._run(at_end=False)
        return self._take()

    def finish(self) -> Delta:
        self._run(at_end=True)
        return self._take()

    def _take(self) -> Delta:
        delta = Delta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _run(self, *, at_end: bool) -> None:
        """Until nothing more can be decided."""
        while self._steps[self._state](at_end):
            pass

    def _start(self, at_end: bool) -> bool:
        text = self._buffer.lstrip()
        num_space = len(self._buffer) - len(text)
        if num_space <= _MAX_LEADING_SPACE:
            if text.startswith(THINK_BEGIN):
                self._state, self._trim, self._buffer = "thoughts", "\n", text[len(THINK_BEGIN) :]
                return True
            if THINK_BEGIN.startswith(text) and not at_end:
                return False
        self._state = "text"
        return True

    def _think(self, at_end: bool) -> bool:
        self._drop_leading()
        end = self._buffer.find(THINK_END)
        if end >= 0:
            self._reasoning.append(self._buffer[:end])
            self._buffer = self._buffer[end + len(THINK_END) :]
            self._state, self._trim = "text", "\n"
            return True
        self._reasoning.append(self._release(at_end, THINK_END))
        return False

    def _text(self, at_end: bool) -> bool:
        self._drop_leading()
        form = self._form
        if form is None:
            self._show(self._release(True, ""))
            return False
        if self._may_close and form.closing and not at_end and self._buffer != form.closing and form.closing.startswith(self._buffer):
            return False
        if self._may_close and self._buffer:
            self._may_close = False
            if form.closing and self._buffer.startswith(form.closing):
                self._buffer = self._buffer[len(form.closing) :]
                self._trim = _SPACE
                return True
        if self._may_be_bare:
            bare = self._is_bare(at_end)
            if bare is not False:
                return bare is True
        begin = self._buffer.find(form.opening)
        if begin < 0:
            self._show(self._release(at_end, form.opening))
            return False
        self._show(self._buffer[:begin])
        self._buffer = self._buffer[begin + len(form.opening) :]
        self._begin_call(form, form.opening)
        return True

    def _is_bare(self, at_end: bool) -> bool | None:
        """Whether the answer begins with the brace of a call, after little space; None while that is open."""
        text = self._buffer.lstrip()
        num_space = len(self._buffer) - len(text)
        if not text and num_space <= _MAX_LEADING_SPACE and not at_end:
            return None
        self._may_be_bare = False
        if not text.startswith("{") or num_space > _MAX_LEADING_SPACE or self._form is None:
            return False
        opened, self._buffer = self._buffer[:num_space], text
        self._begin_call(self._form, opened)
        return True

    def _begin_call(self, form: CallForm, opened: str) -> None:
        self._may_be_bare = False
        if self.num_tool_calls and not self._parallel:  # one was asked for: the rest is text
            self._show(opened)
            return
        self._state, self._opened, self._raw, self._reader = "call", opened, [], form.reader(self._functions)

    def _call(self, at_end: bool) -> bool:
        text, self._buffer = self._buffer, ""
        assert self._reader is not None
        self._raw.append(text)
        reading = self._reader.feed(text) if text else None
        if reading is None:
            if not at_end:
                return False
            reading = self._reader.finish()
            if reading.calls is None:
                self._show(self._opened + "".join(self._raw))
                self._state = "text"
                return False
        self._state = "text"
        if reading.calls is None:
            self._show(self._opened)
            self._buffer = "".join(self._raw)
        else:
            self._add(reading.calls)
            self._buffer = reading.rest
            self._may_close, self._trim = True, _SPACE
            self._may_be_bare = self._form is not None and self._form.bare
        return True

    def _add(self, calls: tuple[ParsedCall, ...]) -> None:
        for call in calls:
            self._calls.append(ToolCallDelta(self.num_tool_calls, call.arguments, f"call_{secrets.token_hex(12)}", call.name))
            self.num_tool_calls += 1

    def _show(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._may_be_bare = False

    def _drop_leading(self) -> None:
        if self._trim:
            self._buffer = self._buffer.lstrip(self._trim)
            if self._buffer:
                self._trim = ""

    def _release(self, at_end: bool, mark: str) -> str:
        """The buffer, but for an end that ``mark`` may begin with."""
        keep = 0
        if not at_end:
            keep = next(
                (length for length in range(min(len(mark) - 1, len(self._buffer)), 0, -1) if mark.startswith(self._buffer[-length:])), 0
            )
        cut = len(self._buffer) - keep
        shown, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return shown
