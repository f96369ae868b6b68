"""What is sent and when: a pure function of the settings and the seed, request by request, so that the same seed is the same load.

Open loop: arrivals are a renewal process of the given rate; the gaps are gamma distributed with shape ``burstiness`` and mean
1 / rate (1: a Poisson process; below: bursts; above: towards a metronome; the rate may be infinite). Closed loop: no arrivals, a
request is sent when one of the ``max_concurrency`` slots is free. A trace brings its own arrivals, divided by ``trace_speed``.

A prompt is a row of parts (key, tokens). Equal keys are equal text (a part cut short is the beginning of the longer one), which is how a
shared prefix, or a block of a trace, is the same in every request that has it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.bench.traces import read_trace
from engine.core.trace_rows import TRACE_BLOCK_TOKENS, TraceRow

Part = tuple[str, int]


class Lengths(msgspec.Struct, frozen=True):
    """Token counts: uniform from ``low`` to ``high`` where they differ, else normal around ``low`` with ``stddev``, never below 1."""

    low: int
    high: int
    stddev: float = 0.0

    def draw(self, source: random.Random) -> int:
        if self.high > self.low:
            return source.randint(self.low, self.high)
        return max(1, round(source.gauss(self.low, self.stddev))) if self.stddev else self.low


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``request_rate_per_s`` None is the closed loop. ``num_prompts`` None goes on until the duration, or the trace, ends."""

    seed: int = 0
    num_prompts: int | None = 100
    input_tokens: Lengths = Lengths(512, 512)
    output_tokens: Lengths | None = Lengths(128, 128)
    prefix_tokens: int = 0
    request_rate_per_s: float | None = None
    burstiness: float = 1.0
    dataset: str | None = None
    trace_speed: float = 1.0
    cancellation_rate: float = 0.0
    cancellation_delay_s: float = 0.0


class Work(msgspec.Struct, frozen=True):
    """One request to send. ``arrival_s`` counts from the start of the run; None: when a slot is free. ``prompt`` or ``messages`` where the
    dataset has texts, else ``parts``. ``cancel_after_s`` after it was sent the client leaves."""

    index: int
    arrival_s: float | None
    parts: tuple[Part, ...]
    output_tokens: int | None
    cancel_after_s: float | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def input_tokens(self) -> int | None:
        return sum(tokens for _, tokens in self.parts) if self.parts else None


def make_workload(settings: WorkloadSettings) -> Iterator[Work]:
    """Requests in the order they are sent. Arrivals, lengths and cancellations are drawn from generators of their own: changing one does
    not move the others. Raises ConfigError for a dataset that cannot be read."""
    lengths, cancels = (random.Random(f"{settings.seed}:{name}") for name in ("lengths", "cancellations"))
    arrivals_s = _arrivals_s(settings)
    rows = read_trace(settings.dataset) if settings.dataset is not None else itertools.repeat(None)
    for index, row in enumerate(itertools.islice(rows, settings.num_prompts)):
        yield Work(
            index=index,
            arrival_s=_arrival_s(settings, row, arrivals_s),
            parts=_parts(settings, index, row, lengths),
            output_tokens=_output_tokens(settings, row, lengths),
            cancel_after_s=settings.cancellation_delay_s if cancels.random() < settings.cancellation_rate else None,
            prompt=row.prompt if row is not None else None,
            messages=row.messages if row is not None else None,
        )


def _arrivals_s(settings: WorkloadSettings) -> Iterator[float | None]:
    rate_per_s = settings.request_rate_per_s
    if rate_per_s is None:
        yield from itertools.repeat(None)
    elif math.isinf(rate_per_s):
        yield from itertools.repeat(0.0)
    source = random.Random(f"{settings.seed}:arrivals")
    now_s = 0.0
    while True:
        yield now_s
        now_s += source.gammavariate(settings.burstiness, 1.0 / (rate_per_s * settings.burstiness))  # type: ignore[operator]


def _arrival_s(settings: WorkloadSettings, row: TraceRow | None, arrivals_s: Iterator[float | None]) -> float | None:
    drawn_s = next(arrivals_s)
    if row is None or row.arrival_s is None or settings.request_rate_per_s is not None:
        return drawn_s
    return row.arrival_s / settings.trace_speed


def _parts(settings: WorkloadSettings, index: int, row: TraceRow | None, lengths: random.Random) -> tuple[Part, ...]:
    if row is not None and (row.prompt is not None or row.messages is not None):
        return ()
    total = row.input_tokens if row is not None and row.input_tokens is not None else None
    prefix: tuple[Part, ...] = (("prefix", settings.prefix_tokens),) if settings.prefix_tokens else ()
    if total is None:
        return (*prefix, (f"request:{index}", settings.input_tokens.draw(lengths)))
    blocks = row.hash_ids if row is not None else ()
    parts: list[Part] = []
    for block in blocks:
        tokens = min(TRACE_BLOCK_TOKENS, total)
        parts.append((f"block:{block}", tokens))
        total -= tokens
    if total:
        parts.append((f"request:{index}", total))
    return (*prefix, *parts)


def _output_tokens(settings: WorkloadSettings, row: TraceRow | None, lengths: random.Random) -> int | None:
    drawn = settings.output_tokens.draw(lengths) if settings.output_tokens is not None else None
    return row.output_tokens if row is not None and row.output_tokens is not None else drawn
