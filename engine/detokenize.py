"""Tokens to text, one at a time: UTF-8 is never split, stop strings never leak, streamed text equals the whole.

``IncrementalDecoder`` turns tokens into text as soon as their characters are complete. ``StopMatcher`` holds back the
longest end of the text that may still become a stop string. Both work in amortised constant time per token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# A character's bytes may be spread over tokens; after this many without a result the text is invalid and is let go as it is.
MAX_PENDING_TOKENS = 16
# Tokens of context that a decoder which looks at its neighbours gets to see.
_CONTEXT_TOKENS = 6
_REPLACEMENT = "�"


class Decoder(Protocol):
    """Text of one sequence's new tokens."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty where a character is still under way."""
        ...

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        ...


class ByteDecoder:
    """For vocabularies in which every token is a byte string (byte-level BPE, byte fallback): exact at every split.

    Bytes are replaced only when proven invalid or at the end, as by Python's incremental UTF-8 decoder; the result equals
    decoding all bytes at once. A prompt may end inside a character: its first bytes are remembered, so that the first delta
    is the completed character and nothing of the prompt.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], prompt: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token in reversed(prompt[-MAX_PENDING_TOKENS:]):
            tail = token_bytes(token) + tail
            if len(tail) >= 4:  # no UTF-8 character is longer
                break
        self._utf8.decode(unfinished_utf8(tail))

    def push(self, token: int) -> str:
        return self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDecoder:
    """For decoders that look at neighbouring tokens (WordPiece, Metaspace): decodes a short window twice and takes the difference."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._num_shown = len(self._window)  # tokens of the window whose text is out
        self._shown = decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_shown < MAX_PENDING_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode(self._window)) if self._num_shown < len(self._window) else ""

    def _take(self, text: str) -> str:
        common = len(self._shown) if text.startswith(self._shown) else _common_prefix_len(self._shown, text)
        delta = text[common:]
        self._num_shown = len(self._window)
        if len(self._window) > 2 * _CONTEXT_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._num_shown = len(self._window)
            text = self._decode(self._window)
        self._shown = text
        return delta


def unfinished_utf8(data: bytes) -> bytes:
    """The end of ``data`` that begins a character and does not finish it; empty where there is none."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # continuation: look further back
            continue
        needed = 2 if 0xC2 <= byte <= 0xDF else 3 if 0xE0 <= byte <= 0xEF else 4 if 0xF0 <= byte <= 0xF4 else 1
        return data[-back:] if needed > back else b""
    return b""


def _common_prefix_len(a: str, b: str) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class StopMatcher:
    """Cuts text at the first stop string, whatever the chunks.

    The stop that is complete first wins; of two that complete at the same character, the longer one. That is what reading
    the text one character at a time would give, so the chunks make no difference.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._max_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be shown now. After a match (``matched``) everything later is dropped.

        ``may_stop`` false lets the text pass unmatched (before ``min_tokens``); a stop string must then begin after it.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        if not may_stop:
            shown, self._held = self._held + text, ""
            return shown
        # What is held is shorter than any stop and holds none, so a match always ends in the new text.
        held = self._held + text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            begin = held.find(stop)
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best):
                best = (begin + len(stop), begin)
        if best is not None:
            end, begin = best
            self.matched, self._held = held[begin:end], ""
            return held[: end if self._include_stop else begin]
        keep = self._num_held(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The end of the text has come: what was held back was no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
