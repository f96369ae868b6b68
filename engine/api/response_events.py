"""The answer of /v1/responses: an object of items that grows, and the events that tell how.

``ResponseBuilder`` takes the deltas of the one sample and keeps the object; it yields the events in OpenAI's order. An answer that is not
streamed is the same object at its end, so both are the same by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from engine.api.call import named_frame
from engine.api.formats.base import Delta, ToolCallDelta
from engine.api.logprobs import TokenLogprob

_encode = msgspec.json.Encoder().encode

_Kind = Literal["reasoning", "message", "function_call"]
_PREFIX: dict[_Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class _OpenItem:
    """The item that is being written: its object (already in the output), and its text so far."""

    __slots__ = ("body", "delta_begin", "index", "kind", "logprobs", "pieces", "tool_index")

    def __init__(self, kind: _Kind, index: int, body: dict[str, Any], tool_index: int | None) -> None:
        self.kind = kind
        self.index = index
        self.body = body
        self.tool_index = tool_index
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        name = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}[kind]
        fixed: dict[str, Any] = {"type": f"response.{name}.delta", "item_id": body["id"], "output_index": index}
        if kind != "function_call":
            fixed["content_index"] = 0
        event = fixed["type"].encode()
        self.delta_begin = b"event: " + event + b"\ndata: " + _encode(fixed)[:-1] + b',"sequence_number":'


class ResponseBuilder:
    """``response`` is the object's fields but for status, output and usage."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._id = str(response["id"]).removeprefix("resp_")
        self._output: list[dict[str, Any]] = response["output"]
        self._sequence_number = 0
        self._item: _OpenItem | None = None

    # -- events ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self.response)

    def add(self, delta: Delta, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[bytes]:
        """Events of a piece of the answer; ``logprobs`` are those of its text."""
        if delta.reasoning:
            if self._item is None or self._item.kind != "reasoning":
                yield from self._open("reasoning", {"summary": [], "content": []})
            yield self._text_delta(delta.reasoning)
        if delta.content:
            if self._item is None or self._item.kind != "message":
                yield from self._open("message", {"role": "assistant", "content": []})
            yield self._text_delta(delta.content, logprobs)
        for call in delta.tool_calls:
            yield from self._add_call(call)

    def end(self, status: Literal["completed", "incomplete"], usage: dict[str, Any]) -> Iterator[bytes]:
        """The last events. An answer cut by its limit is "incomplete", and so is its last item."""
        yield from self._close(status)
        self.response |= {"status": status, "usage": usage}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, message: str) -> bytes:
        """The event of a fault in mid-stream. Nothing is finished: open items stay in progress."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=self.response)

    # -- items ----------------------------------------------------------------------------------------------------------------

    def _open(self, kind: _Kind, fields: dict[str, Any], tool_index: int | None = None) -> Iterator[bytes]:
        yield from self._close("completed")
        index = len(self._output)
        body = {"type": kind, "id": f"{_PREFIX[kind]}_{self._id}_{index}", "status": "in_progress", **fields}
        self._output.append(body)
        item = self._item = _OpenItem(kind, index, body, tool_index)
        yield self._event("response.output_item.added", output_index=index, item=body)
        if kind != "function_call":
            yield self._event("response.content_part.added", **self._at(item), content_index=0, part=_part(item))

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[bytes]:
        item, self._item = self._item, None
        if item is None:
            return
        text = "".join(item.pieces)
        item.body["status"] = status
        if item.kind == "function_call":
            item.body["arguments"] = text
            name = item.body["name"]
            yield self._event("response.function_call_arguments.done", **self._at(item), arguments=text, name=name)
        else:
            part = _part(item)
            item.body["content"] = [part]
            done = {"text": text, "content_index": 0} | ({"logprobs": item.logprobs} if item.kind == "message" else {})
            event = "output_text" if item.kind == "message" else "reasoning_text"
            yield self._event(f"response.{event}.done", **self._at(item), **done)
            yield self._event("response.content_part.done", **self._at(item), content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=item.index, item=item.body)

    def _add_call(self, call: ToolCallDelta) -> Iterator[bytes]:
        item = self._item
        if item is None or item.kind != "function_call" or item.tool_index != call.index:
            fields = {"call_id": call.id or "", "name": call.name or "", "arguments": ""}
            yield from self._open("function_call", fields, call.index)
        if call.arguments:
            yield self._text_delta(call.arguments)

    def _text_delta(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        item = self._item
        assert item is not None
        item.pieces.append(text)
        number = self._next_number()
        end = b"}\n\n"
        if item.kind == "message":
            item.logprobs.extend(logprobs)
            end = b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]") + end
        return b"".join((item.delta_begin, b'%d,"delta":' % number, _encode(text), end))

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        return named_frame(kind, {"type": kind, "sequence_number": self._next_number(), **fields})

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number

    @staticmethod
    def _at(item: _OpenItem) -> dict[str, Any]:
        return {"item_id": item.body["id"], "output_index": item.index}


def _part(item: _OpenItem) -> dict[str, Any]:
    text = "".join(item.pieces)
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(item.logprobs)}
