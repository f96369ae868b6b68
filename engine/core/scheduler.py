"""The scheduler: which tokens of which requests are computed in the next step. Pure; driven by the actors and by the twin alike.

    plan = scheduler.plan(now_s)            what to do next, or None
    result = execute(plan)                  the driver's business
    events = scheduler.commit(plan, result, now_s)

There are no phases: a request has tokens to compute until num_computed has caught up with num_tokens (vLLM's scheduler note). Each plan
takes the running requests first, then forks, then admissions. At most two plans are uncommitted, one with drafts.

Every verb but ``plan`` returns the events that happened since the last one that did, those of ``plan`` included.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine.core.admission import admit
from engine.core.errors import CapacityError, ConfigError, InvariantError, RequestError
from engine.core.events import (
    Admitted,
    Arrived,
    DecodesEmitted,
    Event,
    Finished,
    FinishReason,
    Rejected,
    StepCommitted,
    StepPlanned,
    TokensEmitted,
)
from engine.core.plan import ItemResult, PlanItem, RankPlan, RankResult, RequestId, StepPlan, StepResult
from engine.core.policies import ORDER_POLICIES
from engine.core.rank import RankState
from engine.core.rank_build import RankBuild
from engine.core.request import MAX_TOKEN_ID, Request, Sequence, are_token_ids
from engine.core.scheduler_config import SchedulerConfig
from engine.core.scheduler_state import Stats, check, stats
from engine.core.slo_policy import SloPolicy
from engine.core.states import State, Transition
from engine.core.steady import SteadyDecode
from engine.core.step_cost import StepCost
from engine.core.waiting import WaitingQueue


class Uncommitted(msgspec.Struct):
    """A plan that was handed out, and whom its items, tail saves and pinned tails belong to. ``num_decodes``: of each rank, how many of
    the first items are one token of a request that decodes."""

    plan: StepPlan
    num_tokens: int
    sequences: list[list[Sequence]]
    tail_saves: list[list[tuple[Sequence, int, int]]]
    pins: list[list[int]]
    num_decodes: list[int]
    steady: list[SteadyDecode | None]  # whose these decodes are


class Scheduler:
    """One replica. Not thread-safe; every call is synchronous and short."""

    def __init__(self, config: SchedulerConfig, cost: StepCost | None = None) -> None:
        """``cost`` prices steps for the policy that keeps ``config.tpot_slo_s``. Raises ConfigError where that is asked for without it."""
        config.validate()
        if config.tpot_slo_s is not None and cost is None:
            raise ConfigError(f"tpot_slo_s is {config.tpot_slo_s:g} and there is no cost model to keep it by; needed: a calibration")
        self.config = config
        self.price_factor = 1.0  # of the cost model's prices; a driver that knows better may set it between plans
        self._slo = None if config.tpot_slo_s is None or cost is None else SloPolicy(cost, config)
        self.ranks = [RankState(rank, config) for rank in range(config.num_ranks)]
        self.waiting = WaitingQueue(ORDER_POLICIES[config.order_policy], config.max_passes)
        self.sequences: dict[RequestId, Sequence] = {}
        self.last_rank = config.num_ranks - 1
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.events: list[Event] = []
        self.joins_decodes = False  # emit DecodesEmitted: for a driver that asks nothing of single tokens
        self.build = 0  # counts calls that built a plan, also such as came out empty
        self.uncommitted: deque[Uncommitted] = deque()
        self.next_step = 0
        self.next_sequence_number = 0
        self.num_forking = 0
        self.num_preemptions = 0
        self.num_output_tokens = 0

    # --- requests --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> tuple[Event, ...]:
        """Queue a request and its samples. Raises RequestError where no rank could ever serve it, CapacityError where the queue is full."""
        samples = request.sample_ids or (request.id,)
        try:
            self._refuse_unservable(request, samples)
            if self.num_waiting + len(samples) > self.config.max_waiting:
                raise CapacityError(f"{self.num_waiting} requests are waiting; at most {self.config.max_waiting} may")
        except (RequestError, CapacityError) as error:
            code = "queue_full" if isinstance(error, CapacityError) else "invalid_request"
            self.events.append(Rejected(now_s, request.id, code, str(error)))
            raise
        limit = min(len(request.prompt) + request.params.max_tokens, self.config.context_tokens)
        created: list[Sequence] = []
        for sample in samples:
            sequence = Sequence(request, sample, self.next_sequence_number, limit, self.config.eos_token_ids)
            self.next_sequence_number += 1
            self.sequences[sample] = sequence
            created.append(sequence)
            self.events.append(Arrived(now_s, sample, sequence.num_prompt, None if sample == request.id else request.id))
        first, others = created[0], created[1:]
        first.children = others
        for child in others:
            child.state, child.parent = State.FORKING, first.id
        self.num_forking += len(others)
        self.waiting.add(first)
        return self.take_events()

    def _refuse_unservable(self, request: Request, samples: tuple[RequestId, ...]) -> None:
        if samples[0] != request.id or len(set(samples)) != len(samples):
            raise RequestError(f"sample_ids {samples} do not begin with {request.id}, each once", param="n")
        for sample in samples:
            if sample in self.sequences:
                raise RequestError(f"request id {sample} is in use", param="id", code="duplicate_id")
        if not request.prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        if not are_token_ids(request.prompt):
            raise RequestError(f"prompt tokens must be from 0 to {MAX_TOKEN_ID}", param="prompt")
        if request.params.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.params.max_tokens}; allowed: 1 or more", param="max_tokens")
        count, limit = len(request.prompt), self.config.context_tokens
        if count + 1 > limit:
            cache = self.config.cache
            why = (
                f"the context length is {limit} tokens"
                if limit == cache.context_length
                else f"the KV cache holds {limit} tokens ({cache.num_blocks} blocks of {cache.block_size})"
            )
            raise RequestError(
                f"{why}, prompt and output together; the prompt has {count} tokens and max_tokens is {request.params.max_tokens}",
                param="prompt",
                code="context_length_exceeded",
            )

    def abort(self, request_id: RequestId, now_s: float) -> tuple[Event, ...]:
        """The client left. In any state; an id that is not alive any more is nothing to do. Ends one sample."""
        return self._end_early(request_id, Transition.ABORT, "abort", now_s)

    def stop(self, request_id: RequestId, now_s: float) -> tuple[Event, ...]:
        """The gateway found a stop string in the text so far: finish with "stop". As lenient about the id as ``abort``."""
        return self._end_early(request_id, Transition.STOP, "stop", now_s)

    def _end_early(self, request_id: RequestId, transition: Transition, reason: FinishReason, now_s: float) -> tuple[Event, ...]:
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, transition, reason, now_s)
        return self.take_events()

    def fail_all(self, message: str, now_s: float) -> tuple[Event, ...]:
        """A worker died: every request ends with an error, uncommitted plans are void, and the cache is empty, as device memory is gone."""
        for sequence in list(self.sequences.values()):
            self._end(sequence, Transition.FAIL, "error", now_s, message=message)
        for record in self.uncommitted:
            self._settle_tails(record, attach=False)
        self.uncommitted.clear()
        for rank in self.ranks:
            for source in rank.fork_sources:
                rank.release(source)
            rank.fork_sources = []
            rank.tree.evict(rank.tree.num_blocks)
        return self.take_events()

    def take_events(self) -> tuple[Event, ...]:
        """Events since they were last taken."""
        events = tuple(self.events)
        self.events.clear()
        return events

    # --- plan ------------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing on a device: queued, preempted, swapped out, or to be forked."""
        return len(self.waiting) + self.num_forking

    @property
    def num_uncommitted(self) -> int:
        return len(self.uncommitted)

    def may_still_be_computed(self, sequence: Sequence) -> bool:
        """An uncommitted plan may have an item of this preempted request, or this very build preempted it: it must not start again yet."""
        if sequence.deferred_build == self.build:
            return True
        step = sequence.deferred_step
        return step is not None and bool(self.uncommitted) and self.uncommitted[0].plan.step < step

    @property
    def has_work(self) -> bool:
        """There are live requests, or plans to commit."""
        return bool(self.sequences or self.uncommitted)

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None: nothing to do, or (``num_uncommitted`` > 0) nothing before a commit."""
        if len(self.uncommitted) >= (1 if self.config.draft_tokens else 2):
            return None
        plan, again = self._build_plan(now_s)
        if plan is None and again and not self.uncommitted:
            # Nothing to compute came out, but memory was given back (a preemption, a fork source): now something fits.
            plan, _ = self._build_plan(now_s)
        if plan is None and self.sequences and not self.uncommitted:
            raise InvariantError(f"no progress: {len(self.sequences)} requests are alive and none can run")
        return plan

    def _build_plan(self, now_s: float) -> tuple[StepPlan | None, bool]:
        self.build += 1
        builds = [RankBuild(rank, self.config, now_s, self.build, self.next_step, self.events) for rank in self.ranks]
        gave_back = False
        for build in builds:
            build.plan_decodes()
            self._queue_victims(build)
        if self._slo is not None:
            limits = self._slo.limits([build.load() for build in builds], self.price_factor)
            for build in builds:
                build.limit(limits)
        for build in builds:
            build.plan_prompts()
            gave_back = gave_back or bool(build.victims or build.rank.fork_sources)
        for build in builds:
            if build.rank.fork_sources:
                for child in build.plan_forks():
                    self.num_forking -= 1
                    child.started = True
                    child.cached_tokens_first = child.num_prompt - 1
                    self.events.append(Admitted(now_s, child.id, build.rank.rank, child.num_prompt, child.num_prompt - 1, "fork"))
                self._queue_unforked(build)
        if self.waiting:
            admit(self, builds, now_s)
        for build in builds:
            build.release_read()
        if not any(build.num_items or build.swap_outs for build in builds):
            return None, gave_back
        finished = [build.finish() for build in builds]
        plan = StepPlan(self.next_step, tuple(rank_plan for rank_plan, _ in finished))
        self.next_step += 1
        num_items, num_running = sum(build.num_items for build in builds), sum(len(rank.running) for rank in self.ranks)
        num_tokens = sum(build.num_tokens for build in builds)
        sequences, saves = [build.sequences for build in builds], [saves for _, saves in finished]
        self.uncommitted.append(
            Uncommitted(
                plan,
                num_tokens,
                sequences,
                saves,
                [build.pins for build in builds],
                [build.num_decodes for build in builds],
                [build.steady for build in builds],
            )
        )
        self.events.append(StepPlanned(now_s, plan.step, num_items, num_tokens, num_running, self.num_waiting))
        return plan, gave_back

    def _queue_victims(self, build: RankBuild) -> None:
        for victim in build.victims:
            self.num_preemptions += 1
            self.waiting.add(victim)
        self._queue_unforked(build)

    def _queue_unforked(self, build: RankBuild) -> None:
        for child in build.unforked:
            self.num_forking -= 1
            self.waiting.add(child)
        build.unforked.clear()

    # --- commit ----------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        """Take in what came of the oldest uncommitted plan. Raises InvariantError where plan and result do not belong together."""
        if not self.uncommitted or self.uncommitted[0].plan is not plan:
            expected = self.uncommitted[0].plan.step if self.uncommitted else None
            raise InvariantError(f"commit of step {plan.step}; the oldest uncommitted is {expected}")
        if result.step != plan.step or len(result.ranks) != len(plan.ranks):
            raise InvariantError(f"the result of step {result.step} ({len(result.ranks)} ranks) is not of step {plan.step}")
        record = self.uncommitted.popleft()
        before = self.num_output_tokens
        for rank, rank_plan, rank_result in zip(self.ranks, plan.ranks, result.ranks, strict=True):
            sequences, count, steady = record.sequences[rank.rank], record.num_decodes[rank.rank], record.steady[rank.rank]
            decodes = rank_result.items[:count]
            if steady is not None and steady is rank.steady and self._commit_steady(steady, decodes, now_s):
                done = count
            else:
                if steady is rank.steady:
                    rank.settle()
                done = count if count and self._commit_decodes(decodes, sequences[:count], now_s) else 0
            if done < len(sequences) or done < len(rank_result.items):
                self._commit_rank(rank_plan, rank_result, sequences, done, now_s)
        self._settle_tails(record, attach=True)
        verified, drafts, accepted = self._verifications(plan, result) if self.config.draft_tokens else (0, (), ())
        self.events.append(
            StepCommitted(
                now_s,
                plan.step,
                result.forward_s,
                record.num_tokens,
                num_emitted_tokens=self.num_output_tokens - before,
                num_verified_items=verified,
                drafts_by_position=drafts,
                accepted_by_position=accepted,
            )
        )
        return self.take_events()

    @staticmethod
    def _verifications(plan: StepPlan, result: StepResult) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Items that verified drafts, and of these the drafts proposed and accepted at each position."""
        pairs = [
            (item.num_draft_tokens, len(outcome.tokens) - 1)
            for rank_plan, rank_result in zip(plan.ranks, result.ranks, strict=True)
            for item, outcome in zip((item for item in rank_plan.items if item.emits), rank_result.items, strict=True)
            if item.num_draft_tokens and outcome.error is None
        ]
        positions = range(max((proposed for proposed, _ in pairs), default=0))
        drafts = tuple(sum(proposed > position for proposed, _ in pairs) for position in positions)
        return len(pairs), drafts, tuple(sum(accepted > position for _, accepted in pairs) for position in positions)

    def _commit_rank(self, plan: RankPlan, result: RankResult, sequences: list[Sequence], begin: int, now_s: float) -> None:
        """From item ``begin`` on; all before it emit."""
        items, results = plan.items, result.items
        next_result = begin
        events = self.events
        running, finished = State.RUNNING, State.FINISHED
        for index in range(begin, len(sequences)):
            item, sequence = items[index], sequences[index]
            outcome: ItemResult | None = None
            if item.emits:
                if next_result >= len(results):
                    raise InvariantError(f"the result has {len(results)} items; request {item.request} has none")
                outcome = results[next_result]
                next_result += 1
                count = len(outcome.tokens)
                possible = count == 0 if outcome.error is not None else 1 <= count <= 1 + item.num_draft_tokens
                if outcome.request != item.request or not possible:
                    raise InvariantError(
                        f"a result of request {outcome.request} with {count} tokens for an item of {item.request} with "
                        f"{item.num_draft_tokens} drafts"
                    )
            state = sequence.state
            if state is finished:
                continue  # it ended while this ran: the result is of no use to anybody
            if outcome is not None and outcome.error is not None:
                sequence.failed = True
                self._end(sequence, Transition.FAIL, "error", now_s, message=outcome.error)
                continue
            if outcome is not None and state is running and item.num_computed_tokens >= sequence.target:
                # The common case: decoded tokens, the last of which may end the request.
                new, tokens = outcome.tokens, sequence.tokens
                if count == 1 or (len(tokens) + count < sequence.limit and sequence.stop_ids.isdisjoint(new)):
                    tokens.extend(new)
                    sequence.num_computed += count
                    sequence.num_planned += count - 1
                    sequence.num_expected += count - 1
                    self.num_output_tokens += count
                    events.append(TokensEmitted(now_s, sequence.id, new, outcome.logprobs))
                    if len(tokens) >= sequence.limit or new[-1] in sequence.stop_ids:
                        self._finish_if_done(sequence, now_s)
                    continue
            self._commit_item(sequence, item, outcome, now_s)
        if next_result != len(results):
            raise InvariantError(f"the result has {len(results)} items for {next_result} that emit")

    def _commit_decodes(self, results: tuple[ItemResult, ...], sequences: list[Sequence], now_s: float) -> bool:
        """What ``_commit_rank`` does with one token for each of ``sequences``; false, and nothing done, where the results are others."""
        running = State.RUNNING
        if len(results) != len(sequences):
            return False
        for outcome, sequence in zip(results, sequences, strict=True):
            if sequence.state is not running or outcome.request != sequence.id or len(outcome.tokens) != 1:
                return False
        emit = self.events.append
        for outcome, sequence in zip(results, sequences, strict=True):
            new, tokens = outcome.tokens, sequence.tokens
            token = new[0]
            tokens.append(token)
            sequence.num_computed += 1
            emit(TokensEmitted(now_s, outcome.request, new, outcome.logprobs))
            if token in sequence.stop_ids or len(tokens) >= sequence.limit:
                self._finish_if_done(sequence, now_s)
        self.num_output_tokens += len(results)
        return True

    def _commit_steady(self, steady: SteadyDecode, results: tuple[ItemResult, ...], now_s: float) -> bool:
        """What ``_commit_decodes`` does where no request ends; false, and nothing done, where one might."""
        tokens = steady.commit(results)
        if tokens is None:
            return False
        if self.joins_decodes:
            self.events.append(DecodesEmitted(now_s, steady.requests, tokens))
        else:
            self.events += [TokensEmitted(now_s, outcome.request, outcome.tokens) for outcome in results]
        self.num_output_tokens += len(results)
        return True

    def _commit_item(self, sequence: Sequence, item: PlanItem, outcome: ItemResult | None, now_s: float) -> None:
        """Prompt chunks, drafts, and what was preempted while it ran (its tokens count, what it computed is gone)."""
        accepted = 0 if outcome is None else len(outcome.tokens) - 1
        if sequence.state is not State.PREEMPTED:
            sequence.num_computed = item.num_computed_tokens + item.num_new_tokens - item.num_draft_tokens + accepted
            sequence.num_planned += accepted
        is_prompt = item.num_computed_tokens < sequence.target
        if outcome is not None:
            sequence.num_expected += accepted
            self._emit(sequence, outcome, now_s)
        if is_prompt and sequence.state is State.RUNNING:
            rank = self._rank_of(sequence)
            rank.insert_computed(sequence)
            for child in sequence.children:
                # Samples forked before this commit share the prompt's blocks: they hold its new place in the tree too.
                if child.state is State.RUNNING and sequence.lock_node is not None:
                    rank.relock(child, sequence.lock_node, sequence.num_locked_blocks)
        if outcome is not None:
            self._finish_if_done(sequence, now_s)

    def _emit(self, sequence: Sequence, outcome: ItemResult, now_s: float) -> None:
        """Append tokens up to the one that ends the request; what was accepted behind it does not exist."""
        count = 0
        for token in outcome.tokens:
            sequence.tokens.append(token)
            count += 1
            if self._end_reason(sequence) is not None:
                break
        self.num_output_tokens += count
        self.events.append(TokensEmitted(now_s, sequence.id, outcome.tokens[:count], outcome.logprobs[:count]))

    @staticmethod
    def _end_reason(sequence: Sequence) -> FinishReason | None:
        tokens = sequence.tokens
        if tokens[-1] in sequence.stop_ids and len(tokens) >= sequence.min_tokens_end:
            return "stop"
        return "length" if len(tokens) >= sequence.limit else None

    def _finish_if_done(self, sequence: Sequence, now_s: float) -> None:
        reason = self._end_reason(sequence)
        if reason is not None:
            # Accepted drafts behind a stop token were computed but are not part of the request.
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - 1)
            stop_token = sequence.tokens[-1] if reason == "stop" else None
            self._end(sequence, Transition.FINISH, reason, now_s, stop_token=stop_token)

    def _settle_tails(self, record: Uncommitted, *, attach: bool) -> None:
        for rank, saves, pins in zip(self.ranks, record.tail_saves, record.pins, strict=True):
            if rank.tails is None:
                continue
            for tail in pins:
                rank.tails.unpin(tail)
            for sequence, position, tail in saves:
                # Window rows of a failed sequence may hold what made it fail, and a tail is found by tokens alone.
                if attach and not sequence.failed:
                    rank.attach_tail(sequence, position, tail)
                else:
                    rank.tails.release(tail)

    # --- ends ------------------------------------------------------------------------------------------------------------

    def _end(
        self,
        sequence: Sequence,
        transition: Transition,
        reason: FinishReason,
        now_s: float,
        *,
        stop_token: int | None = None,
        message: str = "",
    ) -> None:
        before = sequence.state
        if before is State.RUNNING:
            self._rank_of(sequence).settle()
        sequence.move(transition)
        del self.sequences[sequence.id]
        kept_for_forks = False
        if before is State.RUNNING:
            rank = self._rank_of(sequence)
            rank.running.remove(sequence)
            if transition is not Transition.FAIL:
                rank.insert_computed(sequence)
            # A prompt that was computed and ended with its first token, before the plan in which its other samples fork.
            forking = any(child.state is State.FORKING for child in sequence.children)
            kept_for_forks = forking and transition is Transition.FINISH and sequence in rank.fork_sources
            if not kept_for_forks:
                rank.fork_sources = [source for source in rank.fork_sources if source is not sequence]
                rank.release(sequence)
        elif before is State.FORKING:
            self.num_forking -= 1
            self._release_idle_sources()
        else:
            self.waiting.remove(sequence)
            if before is State.SWAPPED:
                self._rank_of(sequence).release_host(sequence)
        if not kept_for_forks:
            self._unfork_children(sequence)
        self.events.append(
            Finished(
                now_s, sequence.id, reason, sequence.num_prompt, sequence.num_output, sequence.cached_tokens_first, stop_token, message
            )
        )

    def _release_idle_sources(self) -> None:
        """A finished sequence that was kept only for forks that are not wanted any more."""
        for rank in self.ranks:
            for source in list(rank.fork_sources):
                if source.state is State.FINISHED and all(child.state is not State.FORKING for child in source.children):
                    rank.fork_sources.remove(source)
                    rank.release(source)

    def _unfork_children(self, sequence: Sequence) -> None:
        for child in sequence.children:
            if child.state is State.FORKING:
                child.move(Transition.UNFORK)
                self.num_forking -= 1
                self.waiting.add(child)
        sequence.children = []

    def _rank_of(self, sequence: Sequence) -> RankState:
        if sequence.rank is None:
            raise InvariantError(f"request {sequence.id} is on no rank")
        return self.ranks[sequence.rank]

    def check(self) -> None:
        """Every conservation law of the scheduler, its ranks, pools and trees; raises InvariantError."""
        check(self)

    def stats(self) -> Stats:
        """Gauges of this moment and counters since the start."""
        return stats(self)
