"""Steady decode, step by step and in stretches, against steps whose counts are kept request by request.

State, plans, events and metrics are the same, to the last block id and tick.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from typing import Any, Literal, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.block_pool import BlockPool
from engine.core.cache_config import CacheConfig
from engine.core.errors import InvariantError
from engine.core.events import DecodeStretch, LogEvent, StepPlanned, TokensEmitted, expand
from engine.core.features import features
from engine.core.metrics import MetricsLog, Slo, distribution, weighted_distribution
from engine.core.plan import DecodeItems, ItemResult, RankResult, RequestId, StepPlan, StepResult, step_peers
from engine.core.prefix_tree import Node, PrefixTree
from engine.core.request import Request, Sequence
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.stretch import Answer, Stretch, find_stretch
from engine.core.tail_pool import TailPool
from tests.calibration.synthetic import tiny
from tests.core.core_harness import EOS
from tests.core.test_scheduler_fuzz import random_config, random_request
from tests.core.test_tensors import dense_spec

TOKEN = 3
SPECS = (dense_spec(), tiny())
How = Literal["settled", "steady", "stretching"]


class Arrival(msgspec.Struct):
    arrival_s: float
    request: Request
    output_tokens: int
    abort_s: float | None


class Driver:
    """One replica whose answers and step times are known beforehand. ``settled``: no sequence ever lags behind; ``stretching``: goes by
    stretches where it may."""

    def __init__(self, config: SchedulerConfig, arrivals: list[Arrival], depth: int, how: How) -> None:
        self.scheduler = Scheduler(config)
        self.depth, self.how = depth, how
        self.scheduler.joins_decodes = how == "steady"
        self.num_output: dict[RequestId, int] = defaultdict(int)
        self.num_steady = 0  # ranks' plans that went on with the one before
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.plan_log: dict[int, StepPlan] = {}
        self.log: list[LogEvent] = []
        self.snapshots: dict[int, Any] = {}
        self.stretches: list[tuple[int, int]] = []  # step, rounds
        self.num_waited = 0  # stretches while somebody waited
        self.output_tokens: dict[RequestId, int] = {}
        outside: list[tuple[float, bool, Arrival]] = []  # time, whether it is an abort
        for arrival in arrivals:
            for sample in arrival.request.sample_ids or (arrival.request.id,):
                self.output_tokens[sample] = arrival.output_tokens + sample % 3
            outside.append((arrival.arrival_s, False, arrival))
            if arrival.abort_s is not None:
                outside.append((arrival.abort_s, True, arrival))
        self.outside = sorted(outside, key=lambda entry: entry[:2])

    @staticmethod
    def step_s(step: int) -> float:
        return 0.1 + step * 37 % 11 * 0.013

    def run(self) -> Driver:
        while self.outside or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now_s = max(self.now_s, self.outside[0][0])
            while self.outside and self.outside[0][0] <= self.now_s:
                _, is_abort, arrival = self.outside.pop(0)
                if is_abort:
                    self.log += self.scheduler.abort(arrival.request.id, self.now_s)
                else:
                    self.log += self.scheduler.submit(arrival.request, self.now_s)
            while len(self.plans) < self.depth:
                if len(self.plans) == self.depth - 1:
                    self._turn()
                if self.how == "settled":
                    never_steady(self.scheduler)
                plan = self.scheduler.plan(self.now_s)
                if plan is None:
                    break
                self.num_steady += sum(isinstance(rank.items, DecodeItems) for rank in plan.ranks)
                self.plans.append(plan)
                self.plan_log[plan.step] = plan
            if self.plans:
                self._commit()
        return self

    def _turn(self) -> None:
        """The planner's turn: where a stretch may begin, and where states of both drivers are compared."""
        stretch = find_stretch(self.scheduler, self.answer_of, 1000) if self.how == "stretching" else None
        if stretch is not None:
            self._advance(stretch)
        self.snapshots[self.scheduler.next_step] = None if self.scheduler.build % 11 else snapshot(self.scheduler)

    def _advance(self, stretch: Stretch) -> None:
        until_s = self.outside[0][0] if self.outside else float("inf")
        step, committed_s, now_s = self.scheduler.next_step - len(self.plans), list[float](), self.now_s
        while len(committed_s) < stretch.num_steps:
            now_s += self.step_s(step + len(committed_s))
            if now_s >= until_s:
                break
            committed_s.append(now_s)
        if committed_s:
            waited = self.scheduler.num_waiting > 0
            self._note(stretch.advance(self.now_s, committed_s, [0.5] * len(committed_s)))
            self.scheduler.check()
            self.now_s = committed_s[-1]
            self.stretches.append((step, len(committed_s)))
            self.num_waited += waited
            self.plans = [record.plan for record in self.scheduler.uncommitted]

    def _commit(self) -> None:
        plan = self.plans.pop(0)
        self.now_s += self.step_s(plan.step)
        ranks = tuple(RankResult(tuple(self._result(item.request) for item in rank.items if item.emits)) for rank in plan.ranks)
        self._note(self.scheduler.commit(plan, StepResult(plan.step, ranks, 0.5), self.now_s))
        self.scheduler.check()

    def _note(self, events: tuple[LogEvent, ...]) -> None:
        self.log += events
        for event in expand(events):
            if isinstance(event, TokensEmitted):
                self.num_output[event.request] += len(event.tokens)

    def answer_of(self, sequence: Sequence) -> Answer:
        return Answer(TOKEN, self.output_tokens[sequence.id] - sequence.num_output)

    def _result(self, request: RequestId) -> ItemResult:
        ends = request not in self.scheduler.sequences or self.num_output[request] + 1 == self.output_tokens[request]
        return ItemResult(request, (EOS if ends else TOKEN,))


def settle(scheduler: Scheduler) -> None:
    for rank in scheduler.ranks:
        rank.settle()


def never_steady(scheduler: Scheduler) -> None:
    """Before every plan: each is then made request by request."""
    settle(scheduler)
    for rank in scheduler.ranks:
        rank.decoded([])


def snapshot(scheduler: Scheduler) -> Any:
    """Everything a scheduler knows, with names instead of references; but for what it knows of the plans before."""
    settle(scheduler)
    nodes = {}
    for rank in scheduler.ranks:
        for root in rank.tree._roots.values():
            stack: list[tuple[Node, tuple[Any, ...]]] = [(root, (rank.rank, root.namespace))]
            while stack:
                node, path = stack.pop()
                nodes[id(node)] = path
                stack += [(child, (*path, key)) for key, child in node.children.items()]

    def plain(value: Any) -> Any:
        match value:
            case Node():
                return nodes.get(id(value), (value.creation_tick,))
            case Sequence():
                return ("sequence", value.id)
            case array():
                return value.tolist()
            case dict():
                return [(plain(key), plain(entry)) for key, entry in value.items()]
            case list() | tuple():
                return [plain(entry) for entry in value]
            case BlockPool() | TailPool():
                return fields(value)
            case PrefixTree():
                return [fields(value), [(plain(node), fields(node)) for node in value.nodes()]]
            case _ if type(value).__module__ == "engine.core.tail_pool":
                return fields(value)
            case _:
                return value

    def fields(value: Any) -> list[tuple[str, Any]]:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*slots, *getattr(value, "__dict__", {})]
        left_out = {"_policy", "pool", "tails", "tree", "_roots", "events", "steady", "_decoded", "_num_alike"}
        return [(name, plain(getattr(value, name))) for name in names if isinstance(value, Node) or name not in left_out]

    records = [(r.plan, r.num_tokens, plain(r.sequences), plain(r.tail_saves), r.pins) for r in scheduler.uncommitted]
    ranks = [(fields(r), fields(r.pool), plain(r.tree), fields(r.tails) if r.tails else None) for r in scheduler.ranks]
    counters = [(name, value) for name, value in vars(scheduler).items() if type(value) is int]
    waiting = [sequence.id for sequence in scheduler.waiting.in_order()]
    return records, ranks, counters, waiting, [fields(sequence) for sequence in scheduler.sequences.values()]


def random_case(seed: int, kind: str) -> tuple[SchedulerConfig, list[Arrival]]:
    rng = random.Random(f"stretch {kind} {seed}")
    config = random_config(rng, kind)
    long = rng.random() < 0.6
    if long:
        cache = msgspec.structs.replace(
            config.cache, context_length=160, num_blocks=rng.choice([40, 80, 300]), num_tails=config.cache.num_tails * 2
        )
        config = msgspec.structs.replace(config, cache=cache)
    arrivals, now_s = [], 0.0
    for number in range(rng.randint(1, 16)):
        request = random_request(rng, 4 * number, config.context_tokens)
        params = msgspec.structs.replace(request.params, max_tokens=rng.choice([3, 20, 90]))
        if rng.random() < 0.5:  # the very answer of an earlier one goes on in the tree
            prompt = (*request.prompt, *[TOKEN] * rng.randint(1, 30))[: config.context_tokens - 1]
            request = msgspec.structs.replace(request, prompt=prompt)
        now_s += rng.choice([0.0, 0.4, 3.0, 12.0]) * rng.random()
        abort_s = now_s + 4 * rng.random() if rng.random() < 0.15 else None
        arrivals.append(Arrival(now_s, msgspec.structs.replace(request, params=params), rng.randint(1, 120), abort_s))
    return config, arrivals


def compare(config: SchedulerConfig, arrivals: list[Arrival], depth: int) -> Driver:
    slow, steady, fast = (Driver(config, arrivals, depth, how).run() for how in get_args(How))
    assert list(expand(steady.log)) == list(expand(fast.log)) == slow.log
    assert steady.plan_log == slow.plan_log
    assert steady.snapshots == slow.snapshots
    assert slow.num_steady == 0
    for plan in list(steady.plan_log.values())[::7]:
        plain = StepPlan(plan.step, tuple(msgspec.structs.replace(rank, items=tuple(rank.items)) for rank in plan.ranks))
        assert step_peers(plan) == step_peers(plain)
        assert plan.num_tokens == plain.num_tokens
        assert all(features(plan, spec) == features(plain, spec) for spec in SPECS)
    fast.num_steady = steady.num_steady
    assert fast.plan_log.items() <= slow.plan_log.items()
    for step, state in fast.snapshots.items():
        assert state == slow.snapshots[step], f"before step {step}"
    metrics = MetricsLog(), MetricsLog()
    metrics[0].extend(slow.log)
    metrics[1].extend(fast.log)
    for slo in (None, Slo(itl_s_max=0.21), Slo(tpot_s=0.2)):
        assert metrics[0].summary(slo) == metrics[1].summary(slo)
    for request, found in metrics[0].requests.items():
        assert found.itl_s == metrics[1].requests[request].itl_s
    assert snapshot(slow.scheduler) == snapshot(fast.scheduler)
    return fast


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "state", "swap", "ranks"])
def test_same_as_stepping(kind: str, depth: int) -> None:
    """And the runs reach what matters: long stretches, growth, eviction, tails, queues."""
    rounds = steps = waited = stepped = 0
    for seed in range(16):
        fast = compare(*random_case(seed, kind), depth)
        rounds += sum(count for _, count in fast.stretches)
        steps += fast.scheduler.next_step
        waited += fast.num_waited
        stepped += fast.num_steady
    assert stepped > 0.05 * steps
    assert rounds > 0.08 * steps
    assert waited > 3


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["dense", "state", "swap", "ranks"]), st.sampled_from([1, 2]))
def test_same_as_stepping_anywhere(seed: int, kind: str, depth: int) -> None:
    compare(*random_case(seed, kind), depth)


def steady(depth: int = 1, num_blocks: int = 40, **options: Any) -> Driver:
    """Two requests that decode, one plan under way with overlap."""
    cache = CacheConfig(num_blocks=num_blocks, block_size=4, max_running=2, max_batched_tokens=32, context_length=100)
    config = SchedulerConfig(cache=cache, **options)
    driver = Driver(config, [], depth, "stretching")
    for request in (0, 1):
        driver.output_tokens[request] = 30
        driver.scheduler.submit(Request(request, (5, 6, 7 + request), SamplingParams(max_tokens=50)), 0.0)
    for _ in range(2):
        while len(driver.plans) < depth:
            plan = driver.scheduler.plan(0.0)
            assert plan is not None
            driver.plans.append(plan)
        driver._commit()
    return driver


def test_ends_before_the_last_token_the_driver_knows_of() -> None:
    for depth in (1, 2):
        driver = steady(depth)
        stretch = find_stretch(driver.scheduler, driver.answer_of, 1000)
        assert stretch is not None
        done = driver.scheduler.sequences[0].num_output
        assert stretch.num_steps == 29 - done
        assert stretch.contexts == [[3 + done + depth - 1, 3 + done + depth - 1]]
        assert find_stretch(driver.scheduler, driver.answer_of, 7).num_steps == 7  # type: ignore[union-attr]


def test_ends_before_a_preemption() -> None:
    driver = steady(num_blocks=5, watermark_blocks=0)  # 2 + 2 blocks are held; the next two boundaries need one each
    stretch = find_stretch(driver.scheduler, driver.answer_of, 1000)
    assert stretch is not None
    position = driver.scheduler.sequences[0].num_planned
    assert position + stretch.num_steps == 8  # at position 8 both need a block, and there is one


def test_refuses_what_it_does_not_handle() -> None:
    driver = steady()
    assert find_stretch(driver.scheduler, lambda _: Answer(EOS, 30), 9) is not None  # no end token is configured here
    assert find_stretch(driver.scheduler, lambda _: Answer(TOKEN, 1), 9) is None
    stopping = steady(eos_token_ids=(EOS,))
    assert find_stretch(stopping.scheduler, lambda _: Answer(EOS, 30), 9) is None
    drafts = Scheduler(SchedulerConfig(cache=CacheConfig(9, 4, 2, 32, 30, max_draft_tokens=1), draft_tokens=1))
    assert find_stretch(drafts, driver.answer_of, 9) is None
    assert find_stretch(Scheduler(driver.scheduler.config), driver.answer_of, 9) is None  # nobody runs


def test_a_stretch_is_good_once_and_no_longer_than_proved() -> None:
    driver = steady()
    stretch = find_stretch(driver.scheduler, driver.answer_of, 3)
    assert stretch is not None
    with pytest.raises(InvariantError, match="4 rounds"):
        stretch.advance(0.0, [1.0] * 4, [0.0] * 4)
    events = stretch.advance(0.0, [1.0, 2.0], [0.1, 0.2])
    assert isinstance(events[-1], DecodeStretch)
    assert [event.step for event in expand(events) if isinstance(event, StepPlanned)] == [2, 3]
    with pytest.raises(InvariantError, match="plans step 4"):
        stretch.advance(2.0, [3.0], [0.1])


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 9)), max_size=30))
def test_weighted_distribution_is_that_of_the_values_written_out(values: list[tuple[float, int]]) -> None:
    assert weighted_distribution(values) == distribution(value for value, count in values for _ in range(count))
