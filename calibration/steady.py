"""The steps of a closed loop, as plans of the real scheduler: what ``bench steps`` will run, without running it.

Which requests share a step does not depend on how long steps take, so the plans come first and the prices after. The loop keeps the
engine's timing: with overlap a plan is made before the one ahead of it commits, so a newcomer enters two steps after the slot came free.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Literal

import msgspec

from engine.core.acceptance import draw_accepted
from engine.core.cache_config import CacheConfig
from engine.core.errors import DomainError
from engine.core.events import Event, Finished
from engine.core.plan import ItemResult, RankPlan, RankResult, StepPlan, StepResult
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig

Method = Literal["window", "first-batches"]
WINDOW_FINISHED_SHARES = (0.2, 0.9)
REQUESTS_PER_SLOT = 10
FIRST_BATCHES, WARM_UP_STEPS = 9, 2
# Items planned in one simulated loop: beyond it fewer ranks, then fewer requests stand for all of them.
MAX_ITEMS = 1_500_000
_VOCABULARY = 1 << 20


class Load(msgspec.Struct, frozen=True):
    """A closed loop: ``batch`` requests per data rank at any time, prompts of up to ``context`` tokens, up to ``new_tokens`` generated.

    ``acceptance``: of each of the ``draft_tokens``, the probability that it is accepted where all before it were; none: nothing is.
    """

    batch: int
    context: int
    new_tokens: int
    num_ranks: int = 1
    draft_tokens: int = 0
    acceptance: tuple[float, ...] = ()
    method: Method = "window"
    max_batched_tokens: int = 2048
    block_size: int = 128
    has_sequence_state: bool = False
    seed: int = 0


class Loop(msgspec.Struct, frozen=True):
    """Plans of the steps that count, and how many tokens they emit in the mean."""

    plans: list[StepPlan]
    tokens_per_step: float


def closed_loop(load: Load) -> Loop:
    """Plans of the measured window. Raises DomainError where no whole step falls into it."""
    return _ClosedLoop(load).run()


class _ClosedLoop:
    def __init__(self, load: Load) -> None:
        self.load = load
        tokens_each = load.context + load.new_tokens + load.draft_tokens
        blocks = (load.batch + 1) * (-(-tokens_each // load.block_size) + 1)
        cache = CacheConfig(
            num_blocks=blocks,
            block_size=load.block_size,
            max_running=load.batch,
            max_batched_tokens=max(load.max_batched_tokens, load.batch * (1 + load.draft_tokens)),
            context_length=blocks * load.block_size,
            max_draft_tokens=load.draft_tokens,
            num_tails=4 * load.batch if load.has_sequence_state else 0,
        )
        self.core = Scheduler(
            SchedulerConfig(
                cache=cache,
                num_ranks=load.num_ranks,
                draft_tokens=load.draft_tokens,
                has_sequence_state=load.has_sequence_state,
                max_waiting=max(load.batch * load.num_ranks, 1) + 1,
            )
        )
        self.draw = random.Random(load.batch * load.num_ranks + load.seed)
        self.requests = self._requests()
        self.submitted = self.finished = 0

    def _requests(self) -> list[tuple[int, int]]:
        """(prompt, output) lengths."""
        load, concurrency = self.load, self.load.batch * self.load.num_ranks
        if load.method == "first-batches":
            count = concurrency * (FIRST_BATCHES + WARM_UP_STEPS if load.new_tokens == 1 else 1)
            return [(load.context, 1 if load.new_tokens == 1 else max(load.new_tokens, FIRST_BATCHES + WARM_UP_STEPS))] * count
        found = []
        for _ in range(max(concurrency * REQUESTS_PER_SLOT, 10)):
            length = max(1, round(load.context * self.draw.uniform(0.8, 1.0)))
            found.append((length, 1 if load.new_tokens == 1 else max(2, round(load.new_tokens * self.draw.uniform(0.8, 1.0)))))
        return found

    def _submit(self, count: int) -> None:
        for _ in range(count):
            if self.submitted == len(self.requests):
                return
            length, new = self.requests[self.submitted]
            # The first token differs between any two, so nothing is found in the prefix cache.
            prompt = (self.submitted % _VOCABULARY, *([0] * (length - 1)))
            self.core.submit(Request(self.submitted, prompt, SamplingParams(max_tokens=new, ignore_eos=True)), 0.0)
            self.submitted += 1

    def run(self) -> Loop:
        load, plans = self.load, list[tuple[StepPlan, int, int]]()
        self._submit(load.batch * load.num_ranks)
        in_flight: deque[StepPlan] = deque()
        arriving = 0
        while self.finished < len(self.requests):
            while len(in_flight) < 2 and (plan := self.core.plan(0.0)) is not None:
                in_flight.append(plan)
            # Clients run while the plan is sent: who comes now is in the next one.
            self._submit(arriving)
            arriving = 0
            if not in_flight:
                continue
            plan = in_flight.popleft()
            result, emitted = self._result(plan)
            plans.append((plan, self.finished, emitted))
            events = self.core.commit(plan, result, 0.0)
            if not in_flight and (following := self.core.plan(0.0)) is not None:
                in_flight.append(following)
            arriving = self._count_finished(events)
        return self._window(plans)

    def _count_finished(self, events: tuple[Event, ...]) -> int:
        count = sum(isinstance(event, Finished) for event in events)
        self.finished += count
        return count

    def _result(self, plan: StepPlan) -> tuple[StepResult, int]:
        ranks, emitted = [], 0
        for rank in plan.ranks:
            items = []
            for item in rank.items:
                if not item.emits:
                    continue
                accepted = draw_accepted(self.load.acceptance, item.num_draft_tokens, self.draw.random)
                items.append(ItemResult(item.request, (1,) * (1 + accepted)))
                emitted += 1 + accepted
            ranks.append(RankResult(tuple(items)))
        return StepResult(plan.step, tuple(ranks)), emitted

    def _window(self, plans: list[tuple[StepPlan, int, int]]) -> Loop:
        load, total = self.load, len(self.requests)
        later = plans[1:]
        if load.method == "window":
            low, high = WINDOW_FINISHED_SHARES
            chosen = [entry for entry in later if low <= entry[1] / total <= high]
        elif load.new_tokens == 1:
            chosen = later[WARM_UP_STEPS - 1 :][:FIRST_BATCHES]
        else:
            chosen = [entry for entry in later if _is_full_decode(entry[0].ranks[0], load.batch)][WARM_UP_STEPS:][:FIRST_BATCHES]
        if not chosen:
            raise DomainError("no whole step falls into the measured window; ask for more new tokens or a larger batch")
        return Loop([entry[0] for entry in chosen], sum(entry[2] for entry in chosen) / len(chosen))


def _is_full_decode(rank: RankPlan, batch: int) -> bool:
    return len(rank.items) == batch and all(item.num_new_tokens == 1 + item.num_draft_tokens for item in rank.items)


def reduced(load: Load) -> tuple[Load, int]:
    """A loop small enough to be simulated, and how many ranks each of its own stands for."""
    steps = load.new_tokens * REQUESTS_PER_SLOT * (1.0 if load.new_tokens > 1 else 2.0)
    per_rank = load.batch * steps + REQUESTS_PER_SLOT * load.batch * load.context / 64
    ranks = max(1, min(load.num_ranks, int(MAX_ITEMS / max(per_rank, 1))))
    while load.num_ranks % ranks:
        ranks -= 1
    return msgspec.structs.replace(load, num_ranks=ranks), load.num_ranks // ranks
