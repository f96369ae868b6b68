"""What one request's stream tells about its tokens, and when.

Times are of trio's clock (monotonic), taken when the bytes are handed to us; a read that brings several events gives them one time.
TTFT, TPOT, ITL and E2E are those of engine.core.metrics with the client's points in time:

Arrived      the moment before the request is written to the connection (connecting included)
TokensEmitted an event with content, reasoning or a piece of a tool call; the role chunk is none
Finished     the last event with output or with the finish reason; without a finish reason the moment the request was given up

The number of tokens of an event comes, in this order, from
"usage_per_chunk"  the server's running count (continuous_usage_stats): an event of k tokens has k - 1 gaps of 0 after its own gap
"usage"            the total at the end: one token an event, more are gaps of 0; where there are fewer tokens than events, the events that
                   followed closest are merged into the ones before, whose time the token has
"events"           one each, where the server counts nothing
Always len(itl_s) = tokens - 1, and the gaps sum to last token - first token. Tokens whose text is held back (stop strings, half a
character) count with the event that shows it; those without any (an end of text alone) with the finish reason.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.bench.endpoints import Piece
from engine.core.events import FinishReason
from engine.core.metrics import RequestMetrics

CountSource = Literal["usage_per_chunk", "usage", "events"]


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as the client saw it. ``error`` is a kind (see engine.bench.client) or None; times are seconds of trio's clock."""

    metrics: RequestMetrics
    asked_input_tokens: int | None
    asked_output_tokens: int | None
    scheduled_s: float | None
    prompt_digest: bytes
    count_source: CountSource | None = None
    num_events: int = 0
    status: int | None = None
    error: str | None = None
    message: str = ""
    cancelled: bool = False


class TokenCounter:
    """Folds the pieces of one stream into its request's metrics."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self.metrics = metrics
        self.finish: FinishReason | None = None
        self._events_s: list[float] = []  # arrival of every event with output
        self._counts: list[int] = []  # tokens of each, by the running count
        self._counted = 0
        self._is_running = False  # the server sends a running count
        self._total: int | None = None
        self._last_s: float | None = None

    def add(self, piece: Piece, now_s: float) -> None:
        if piece.prompt_tokens is not None:
            self.metrics.num_prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            self.metrics.num_cached_tokens = piece.cached_tokens
        if piece.completion_tokens is not None:
            self._total = piece.completion_tokens
        if piece.finish is not None:
            self.finish = piece.finish
            self._last_s = now_s
        if piece.has_output:
            self._last_s = now_s
            new = 1
            if piece.completion_tokens is not None:
                self._is_running = True
                # Text without a token of its own is the rest of one already counted, but the first text always is a token.
                new = max(piece.completion_tokens - self._counted, 0 if self._events_s else 1)
            self._counted += new
            self._events_s.append(now_s)
            self._counts.append(new)

    def close(self, now_s: float, reason: FinishReason) -> CountSource | None:
        """The stream is over: fill the metrics. Returns where the number of tokens came from, None where there are none."""
        metrics = self.metrics
        metrics.reason = reason
        metrics.finished_s = self._last_s if reason in ("stop", "length") and self._last_s is not None else now_s
        if self._is_running:
            for event_s, count in zip(self._events_s, self._counts, strict=True):
                metrics.emitted(event_s, count)
            if self._total is not None and self._total > self._counted:  # tokens without text, an end of text above all
                metrics.emitted(self._last_s if self._last_s is not None else now_s, self._total - self._counted)
            return "usage_per_chunk"
        events_s = self._events_s or ([self._last_s] if self._last_s is not None else [])
        total = self._total if self._total is not None else len(self._events_s)
        for event_s, count in zip(*_spread(events_s, total), strict=True):
            metrics.emitted(event_s, count)
        if not metrics.num_output_tokens:
            return None
        return "events" if self._total is None else "usage"


def _spread(events_s: list[float], total: int) -> tuple[list[float], list[int]]:
    """``total`` tokens over the events: at least one each, what is over with the last; where there are fewer tokens than events, those that
    followed their predecessor closest are merged into it."""
    surplus = total - len(events_s)
    if not events_s or total <= 0:
        return [], []
    if surplus >= 0:
        return events_s, [*[1] * (len(events_s) - 1), 1 + surplus]
    gaps = sorted(range(1, len(events_s)), key=lambda index: events_s[index] - events_s[index - 1])
    merged = set(gaps[:-surplus])
    kept = [event_s for index, event_s in enumerate(events_s) if index not in merged]
    return kept, [1] * len(kept)
