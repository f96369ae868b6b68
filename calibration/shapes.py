"""Which steps to measure: shapes spread over the range asked for, and the messages between a campaign and its measuring processes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.core.cache_config import CacheConfig
from engine.core.plan import PlanItem, RankPlan, StepPlan
from engine.core.specs import ModelSpec, V41Spec

BLOCK_SIZE = 128
# Tokens in cache of one measured step: bounds the memory of a measuring process.
MAX_CACHED_TOKENS = 40_960
MARGIN = 64  # decode steps a shape may be advanced by in one command


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """One step of one rank: (tokens in cache, new tokens) of each item. ``draft_tokens`` of each item's new ones are drafts."""

    items: tuple[tuple[int, int], ...]
    draft_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.items)

    @property
    def cached_tokens(self) -> int:
        return sum(computed + new for computed, new in self.items)

    @property
    def kind(self) -> Literal["decode", "prefill", "mixed"]:
        longest = max(new for _, new in self.items)
        if longest <= 1 + self.draft_tokens:
            return "decode"
        return "prefill" if all(new > 1 + self.draft_tokens for _, new in self.items) else "mixed"

    def plan(self, num_ranks: int = 1) -> StepPlan:
        """The same on each of ``num_ranks`` data ranks."""
        items = tuple(
            PlanItem(index, index, computed, new, self.draft_tokens if new == 1 + self.draft_tokens else 0, True)
            for index, (computed, new) in enumerate(self.items)
        )
        return StepPlan(0, (RankPlan(items=items),) * num_ranks)


class Job(msgspec.Struct, frozen=True):
    """What a measuring process loads. ``stand_in``: the collectives of ``layout`` return at once, with made-up rows of the right size, so
    that one rank's work can be timed without its peers."""

    model: str
    dtype: str
    layout: str
    rank: int
    cores: tuple[int, ...]
    num_threads: int
    cache: CacheConfig
    load_format: Literal["auto", "random"]
    stand_in: bool
    rendezvous: str | None = None


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Execute a shape ``repeats`` times plain and as often with component timers, in turn; ``warm_ups`` before that."""

    shape: Shape
    repeats: int
    warm_ups: int
    num_ranks: int  # data ranks that have the same work


class Collectives(msgspec.Struct, frozen=True, tag=True):
    """Time all-to-all of ``sizes`` bytes to each peer, with a little work before each call, as in a step."""

    sizes: tuple[int, ...]
    repeats: int


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Time gathering the Engram rows of ``num_tokens`` tokens out of tables in host memory, as the engine's side thread does."""

    num_tokens: int
    repeats: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Seconds of each plain execution, and of components by the timed ones (a dict for each)."""

    forward_s: tuple[float, ...]
    timed_s: tuple[float, ...] = ()
    components: tuple[dict[str, float], ...] = ()


class Failure(msgspec.Struct, frozen=True, tag=True):
    message: str


Command = Measure | Collectives | Gather
Reply = Measured | Failure


def shapes(
    spec: ModelSpec, count: int, *, max_batch: int, max_context: int, max_tokens: int, draft_tokens: int, seed: int = 0
) -> list[Shape]:
    """About ``count`` shapes, log-spaced over batch, context and chunk length: half decode steps, the rest prompts and mixtures of both.

    Corners come first, so that the range is covered whatever the budget; the rest fills it evenly (a low-discrepancy sequence).
    """
    draw = random.Random(seed)
    context = min(max_context, max(1, spec.max_positions - 1 - draft_tokens - MARGIN))
    decode = _decodes(count - count // 2, max_batch, context, draft_tokens, draw)
    prompts = [
        *_prompts(count // 4, max_batch, context, max_tokens),
        *_mixed(count // 4, max_batch, context, max_tokens, draft_tokens, draw),
    ]
    found: list[Shape] = []
    for index in range(max(len(decode), len(prompts))):
        found += [part[index] for part in (decode, prompts) if index < len(part)]
    return list(dict.fromkeys(shape for shape in found if shape.cached_tokens <= MAX_CACHED_TOKENS))


def _halton(index: int, base: int) -> float:
    result, share = 0.0, 1.0
    while index:
        share /= base
        result += share * (index % base)
        index //= base
    return result


def _log_between(low: float, high: float, share: float) -> int:
    return round(math.exp(math.log(low) + share * math.log(high / low)))


def _decodes(count: int, max_batch: int, context: int, drafts: int, draw: random.Random) -> list[Shape]:
    low = min(16, context)
    corners = [(1, low), (max_batch, low), (1, context), (2, context), (max_batch, min(context, 256)), (max_batch // 2, context)]
    inner = [(_log_between(1, max_batch, _halton(index, 2)), _log_between(low, context, _halton(index, 3))) for index in range(1, count)]
    found = []
    for batch, longest in [*corners, *inner][:count]:
        batch = max(1, min(batch, MAX_CACHED_TOKENS // (longest + 1 + drafts)))
        # Lengths spread as they are among running requests, the longest one known.
        lengths = [longest, *(max(1, round(longest * draw.uniform(0.7, 1.0))) for _ in range(batch - 1))]
        found.append(Shape(tuple((length, 1 + drafts) for length in lengths), drafts))
    return found


def _prompts(count: int, max_batch: int, context: int, max_tokens: int) -> list[Shape]:
    corners = [(1, 8), (1, min(context, max_tokens)), (max_batch, max(2, min(max_tokens // max_batch, context))), (2, 64)]
    inner = []
    for index in range(1, count):
        length = max(2, _log_between(8, min(context, max_tokens), _halton(index, 2)))
        inner.append((max(1, _log_between(1, max(1, min(max_batch, max_tokens // length)), _halton(index, 3))), length))
    return [Shape(((0, min(length, context)),) * max(1, min(batch, max_tokens // length))) for batch, length in [*corners, *inner][:count]]


def _mixed(count: int, max_batch: int, context: int, max_tokens: int, drafts: int, draw: random.Random) -> list[Shape]:
    found = []
    for index in range(1, count + 1):
        batch = max(1, _log_between(1, max_batch, _halton(index, 2)))
        longest = _log_between(16, context, _halton(index, 3))
        chunk = max(2 + drafts, _log_between(8, min(context, max_tokens), _halton(index, 5)))
        chunks = max(1, min(draw.choice((1, 1, 2, 4)), (max_tokens - batch * (1 + drafts)) // chunk))
        batch = max(1, min(batch, (MAX_CACHED_TOKENS - chunks * chunk) // (longest + 1 + drafts)))
        lengths = [longest, *(max(1, round(longest * draw.uniform(0.7, 1.0))) for _ in range(batch - 1))]
        if batch * (1 + drafts) + chunks * chunk <= max_tokens + max_batch:
            found.append(Shape((*((length, 1 + drafts) for length in lengths), *((0, chunk),) * chunks), drafts))
    return found


def cache_for(spec: ModelSpec, measured: Sequence[Shape], draft_tokens: int, margin: int = MARGIN) -> CacheConfig:
    """Room for every shape, advanced by ``margin`` tokens."""
    blocks = max(sum(-(-(computed + new + margin) // BLOCK_SIZE) + 1 for computed, new in shape.items) for shape in measured)
    longest = max(computed + new for shape in measured for computed, new in shape.items) + margin + draft_tokens
    running = max(len(shape.items) for shape in measured)
    return CacheConfig(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_running=running,
        max_batched_tokens=max(max(shape.num_tokens for shape in measured), running * (1 + draft_tokens)),
        context_length=min(longest, spec.max_positions) if isinstance(spec, V41Spec) else longest,
        max_draft_tokens=draft_tokens,
    )
