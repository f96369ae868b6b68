"""The scheduler against the shadow worker: any order of arrivals, plans, commits, aborts, stops and failures, in any configuration."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.cache_config import CacheConfig
from engine.core.errors import CapacityError, RequestError
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler_config import SchedulerConfig
from tests.core.core_harness import EOS, Replica

EXAMPLES = int(os.environ.get("TWINFER_TEST_EXAMPLES", "60"))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    state = draw(st.booleans())
    drafts = draw(st.sampled_from([0, 0, 0, 1, 3, 5]))
    max_running = draw(st.integers(1, 5))
    return SchedulerConfig(
        cache=CacheConfig(
            num_blocks=draw(st.sampled_from([4, 6, 9, 14, 40])),
            block_size=draw(st.sampled_from([2, 4])),
            max_running=max_running,
            max_batched_tokens=max_running + draw(st.sampled_from([0, 1, 3, 8, 40])),
            context_length=draw(st.sampled_from([12, 24, 48])),
            max_draft_tokens=drafts,
            num_tails=draw(st.sampled_from([0, 1, 3, 12])) if state else 0,
            num_host_blocks=draw(st.sampled_from([0, 4, 20])),
            num_host_states=draw(st.sampled_from([0, 1, 4])) if state else 0,
        ),
        num_ranks=draw(st.sampled_from([1, 1, 2, 3])),
        eos_token_ids=(EOS,),
        chunked_prefill_size=draw(st.sampled_from([None, 1, 3, 8])),
        draft_tokens=drafts,
        has_sequence_state=state,
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        order_policy=draw(st.sampled_from(["fcfs", "priority", "longest-prefix"])),
        eviction_policy=draw(st.sampled_from(["lru", "lfu", "slru", "priority"])),
        rank_policy=draw(st.sampled_from(["shortest-queue", "round-robin", "prefix-aware"])),
        max_waiting=draw(st.sampled_from([3, 30])),
        max_passes=draw(st.sampled_from([1, 4])),
        watermark_blocks=draw(st.sampled_from([None, 0, 2])),
        max_preemptions=draw(st.sampled_from([1, 3])),
        swap_threshold_tokens=draw(st.sampled_from([None, 1, 6])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        self.replica = Replica(config)
        self.next_id = 0
        self.overlap_allowed = config.draft_tokens == 0
        self.cut: set[int] = set()

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 14),
        own=st.integers(0, 6),
        max_tokens=st.sampled_from([1, 1, 2, 5, 9, 30]),
        samples=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 2),
    )
    def submit(
        self,
        family: int,
        shared: int,
        own: int,
        max_tokens: int,
        samples: int,
        priority: int,
        salt: str | None,
        ignore_eos: bool,
        min_tokens: int,
    ) -> None:
        prompt = tuple([2 + family] * min(shared, 4) + [(index * (family + 3)) % 40 for index in range(shared)] + [own] * own)
        ids = tuple(range(self.next_id, self.next_id + samples))
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), ignore_eos=ignore_eos, stop_token_ids=(9,))
        try:
            request = Request(ids[0], prompt, params, priority, ids if samples > 1 else (), salt)
            self.replica.submit(request)
        except RequestError:
            assert len(prompt) == 0 or len(prompt) + 1 > self.replica.config.context_tokens
        except CapacityError:
            assert self.replica.scheduler.num_waiting + samples > self.replica.config.max_waiting
        self.next_id += samples

    @rule()
    def plan(self) -> None:
        before = len(self.replica.plans)
        plan = self.replica.plan()
        if before >= (2 if self.overlap_allowed else 1):
            assert plan is None
        elif before == 0 and self.replica.scheduler.sequences:
            assert plan is not None

    @precondition(lambda self: self.replica.plans)
    @rule(accept=st.integers(0, 5))
    def commit(self, accept: int) -> None:
        self.replica.commit(accept)

    @precondition(lambda self: self.replica.scheduler.sequences)
    @rule(pick=st.integers(0, 100), stop=st.booleans())
    def cut_short(self, pick: int, stop: bool) -> None:
        alive = sorted(self.replica.scheduler.sequences)
        chosen = alive[pick % len(alive)]
        self.cut.add(chosen)
        (self.replica.stop if stop else self.replica.abort)(chosen)
        assert chosen not in self.replica.scheduler.sequences

    @precondition(lambda self: self.replica.scheduler.sequences)
    @rule(pick=st.integers(0, 100))
    def fail_one(self, pick: int) -> None:
        alive = sorted(self.replica.scheduler.sequences)
        self.cut |= self.replica.doom(alive[pick % len(alive)])

    @rule(dice=st.integers(0, 12))
    def fail(self, dice: int) -> None:
        if dice == 0:
            self.cut.update(self.replica.scheduler.sequences)
            self.replica.fail()
            assert not self.replica.scheduler.sequences
            assert all(rank.pool.num_held == 0 for rank in self.replica.scheduler.ranks)

    @invariant()
    def conserved(self) -> None:
        self.replica.check_memory()

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        replica.drain(accept=2, overlap=self.overlap_allowed)
        replica.check_memory()
        assert set(replica.reasons) == set(replica.requests), "a request was lost"
        for rank in replica.scheduler.ranks:
            assert rank.pool.num_held == rank.tree.num_blocks, "blocks leaked"
            assert rank.tree.num_evictable_blocks == rank.tree.num_blocks, "a node stayed locked"
            assert rank.host_pool.num_held == 0
            assert not rank.fork_sources
        for request, output in replica.outputs.items():
            tokens, reason = replica.expected_output(request)
            if request in self.cut:
                assert output == tokens[: len(output)]
            else:
                assert (output, replica.reasons[request]) == (tokens, reason)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
