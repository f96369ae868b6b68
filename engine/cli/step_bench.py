"""Closed loops in an engine, and which of their steps count: what ``bench steps`` prints and calibration fits on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from engine.core.errors import ConfigError
from engine.core.events import Admitted, Event, Finished, StepCommitted
from engine.core.plan import StepPlan, StepResult
from engine.core.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.actors.gateway import Gateway

WINDOW_FINISHED_SHARES = (0.2, 0.9)
# So many that at the window's end as many are left as run at once: the batch is full in all of it.
WINDOW_REQUESTS_PER_SLOT = 10
FIRST_BATCHES = 9
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepLoad:
    """``batch`` requests per DP rank at a time: prompts of ``context`` tokens, of which the first ``shared_prefix`` are the same in all of
    them and in the cache before the measurement begins. ``new_tokens`` 1 measures prompt steps. The more ``requests_per_slot``, the longer
    the window."""

    batch: int
    context: int
    new_tokens: int
    method: str = "window"
    shared_prefix: int = 0
    requests_per_slot: int = WINDOW_REQUESTS_PER_SLOT


class StepRecorder:
    """An observer: every step with its commit time, how many requests were finished by then, and what was found in the prefix cache."""

    def __init__(self) -> None:
        self.commit_s: list[float] = []
        self.results: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self.verifications: list[StepCommitted] = []
        self.num_finished: list[int] = []
        self.finished = 0
        self.admitted: list[Admitted] = []

    def planned(self, plan: StepPlan, now_s: float) -> None: ...

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self.commit_s.append(now_s)
        self.plans.append(plan)
        self.results.append(result)
        self.num_finished.append(self.finished)

    def events(self, events: Sequence[Event]) -> None:
        self.finished += sum(isinstance(event, Finished) for event in events)
        self.admitted += [event for event in events if isinstance(event, Admitted)]
        self.verifications += [event for event in events if isinstance(event, StepCommitted)]


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps of one load. ``first`` is its first one, ``chosen`` are those that count; ``admitted`` are all its requests."""

    recorder: StepRecorder
    chosen: list[int]
    first: int
    admitted: list[Admitted]

    def step_s(self, index: int) -> float:
        """From the commit before to this one."""
        return self.recorder.commit_s[index] - self.recorder.commit_s[index - 1]


def with_room(options: Any, load: StepLoad) -> Any:
    """The options with slots and KV for the load, unless they were set by hand."""
    values = dict(options.values)
    if options.origins["max_running_requests"] == "default":
        values["max_running_requests"] = load.batch
    if values["max_total_tokens"] is None:
        block = values["block_size"]
        shared = load.shared_prefix // block
        own = -(-(load.context + load.new_tokens) // block) + 1 - shared
        values["max_total_tokens"] = ((load.batch + 1) * own + shared) * block
    if values["max_running_requests"] < load.batch:
        raise ConfigError(f"--max-running-requests is {values['max_running_requests']}; the batch has {load.batch}")
    return type(options)(values, options.origins)


async def record_in(engine: Gateway, recorder: StepRecorder, num_ranks: int, load: StepLoad) -> Recording:
    """Run the load in an engine of ``num_ranks`` DP ranks that ``recorder`` observes; nothing else may run in it.

    Raises ConfigError where no step counts.
    """
    draw = random.Random(f"{num_ranks} {load}")  # loads share no prompts, or one would find the other's in the prefix cache
    shared = _tokens(draw, load.shared_prefix, engine.vocab_size)
    requests = _requests(draw, load, num_ranks, shared, engine.vocab_size)
    await _warm_up(engine, num_ranks, load, shared)
    engine.begin_recording()
    first, finished_before, admitted_before = len(recorder.commit_s), recorder.finished, len(recorder.admitted)
    limiter = trio.CapacityLimiter(load.batch * num_ranks)
    async with trio.open_nursery() as nursery:
        for prompt, new_tokens in requests:
            nursery.start_soon(_one, engine, prompt, new_tokens, limiter)
    chosen = _chosen_steps(recorder, first, finished_before, len(requests), load)
    if not chosen and engine.stop_signal is None:
        raise ConfigError("no whole step fell into the measured window; raise --new-tokens or the batch size")
    return Recording(recorder, chosen, first, recorder.admitted[admitted_before:])


def _tokens(draw: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocab_size) for _ in range(count))


def _requests(
    draw: random.Random, load: StepLoad, num_ranks: int, shared: tuple[int, ...], vocab_size: int
) -> list[tuple[tuple[int, ...], int]]:
    """Prompts (as token ids) and output lengths, the same for the same load."""
    concurrency, own = load.batch * num_ranks, load.context - load.shared_prefix
    if load.method == "first-batches":
        repeated = _tokens(draw, own, vocab_size)
        prefill = load.new_tokens == 1
        count = concurrency * (FIRST_BATCHES + WARM_UP_STEPS if prefill else 1)
        # Distinct first tokens: the same work in every request, without a prefix hit that would skip it.
        return [
            (
                (*shared, *_tokens(draw, 1, vocab_size), *repeated[1:]),
                1 if prefill else max(load.new_tokens, FIRST_BATCHES + WARM_UP_STEPS),
            )
            for _ in range(count)
        ]
    requests = []
    for _ in range(max(concurrency * load.requests_per_slot, 10)):
        # Lengths uniform from 80 % of the nominal one up to it, as in the public closed-loop benchmarks; the means are reported.
        length = max(1, round(own * draw.uniform(0.8, 1.0)))
        new = load.new_tokens if load.new_tokens == 1 else max(2, round(load.new_tokens * draw.uniform(0.8, 1.0)))
        requests.append(((*shared, *_tokens(draw, length, vocab_size)), new))
    return requests


async def _one(engine: Gateway, prompt: tuple[int, ...], new_tokens: int, limiter: trio.CapacityLimiter | None = None) -> None:
    from engine.actors.gateway import Generation

    generation = Generation(prompt=prompt, params=SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    if limiter is None:
        await engine.complete(generation)
        return
    async with limiter:
        await engine.complete(generation)


async def _warm_up(engine: Gateway, num_ranks: int, load: StepLoad, shared: tuple[int, ...]) -> None:
    """A few steps, which also compute the shared prefix: a request a rank, side by side, goes to the shortest queue each."""
    beginning = shared or tuple(index % engine.vocab_size for index in range(min(load.context, 32) - 1))
    async with trio.open_nursery() as nursery:
        for rank in range(num_ranks):
            nursery.start_soon(_one, engine, (*beginning, rank % engine.vocab_size), WARM_UP_STEPS + 1)


def _chosen_steps(recorder: StepRecorder, first: int, finished_before: int, num_requests: int, load: StepLoad) -> list[int]:
    """Indices of the steps that count; the gap before a step belongs to it, so the very first one has none."""
    later = range(first + 1, len(recorder.commit_s))
    if load.method == "window":
        low, high = WINDOW_FINISHED_SHARES
        return [index for index in later if low <= (recorder.num_finished[index] - finished_before) / num_requests <= high]
    if load.new_tokens == 1:
        return list(later)[WARM_UP_STEPS - 1 :][:FIRST_BATCHES]
    full = [index for index in later if _is_full_decode(recorder.plans[index], load.batch)]
    return full[WARM_UP_STEPS:][:FIRST_BATCHES]


def _is_full_decode(plan: StepPlan, batch: int) -> bool:
    """All requests of rank 0 decode, none still computes its prompt."""
    items = plan.ranks[0].items
    return len(items) == batch and all(item.num_new_tokens == 1 + item.num_draft_tokens for item in items)
