"""With and without fast-forward: the same events, in the same order of each replica, and the same result."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.cost_model import CalibratedCost
from engine.core.events import DecodeStretch, Event, LogEvent, expand
from engine.core.layout import parse_layout
from engine.core.metrics import Slo
from engine.core.plan import StepPlan, StepResult
from engine.core.specs import ModelSpec
from engine.core.step_cost import StepCost
from engine.core.stretch import StretchCost
from tests.calibration.synthetic import tiny, true_fit
from tests.core.test_tensors import dense_spec
from tests.twin.twin_support import GivenWorkload, sim_request, twin_config
from twin.cluster import simulate
from twin.config import TwinConfig
from twin.given_cost import GivenCost
from twin.result import SimResult
from twin.workload.types import SimRequest

SPEC = tiny()
FIT = true_fit(SPEC)
LAYOUTS = {1: "tp1dp1ep1", 2: "tp1dp2ep2"}


class Onlooker:
    """With whom no step is skipped and no tokens are written as one."""

    def __init__(self) -> None:
        self.by_replica: dict[int, list[Event]] = defaultdict(list)

    def planned(self, _replica: int, _plan: StepPlan, _now_s: float) -> None: ...

    def committed(self, _replica: int, _plan: StepPlan, _result: StepResult, _now_s: float) -> None: ...

    def events(self, replica: int, events: Sequence[Event]) -> None:
        self.by_replica[replica] += events


class Events:
    """Listens."""

    def __init__(self) -> None:
        self.by_replica: dict[int, list[LogEvent]] = defaultdict(list)

    def events(self, replica: int, events: Sequence[LogEvent]) -> None:
        self.by_replica[replica] += events


def run(config: TwinConfig, workload: GivenWorkload, cost: StepCost) -> tuple[SimResult, Events]:
    events = Events()
    result = simulate(config, workload, cost, listeners=[events])
    return msgspec.structs.replace(result, wall_s=0.0), events


def compare(config: TwinConfig, requests: Sequence[SimRequest], following: dict[int, SimRequest], cost: StepCost) -> float:
    """Returns the share of steps that were skipped."""
    assert isinstance(cost, StretchCost)
    pause_s = 0.003
    fast, leaps = run(config, GivenWorkload(requests, following, pause_s), cost)
    slow, steps = run(msgspec.structs.replace(config, fast_forward=False), GivenWorkload(requests, following, pause_s), cost)
    onlooker = Onlooker()
    watched = simulate(config, GivenWorkload(requests, following, pause_s), cost, observers=[onlooker])
    for listener in (leaps, steps):
        assert {replica: list(expand(events)) for replica, events in listener.by_replica.items()} == onlooker.by_replica
    assert fast == slow == msgspec.structs.replace(watched, wall_s=0.0)
    skipped = [len(event.committed_s) for events in leaps.by_replica.values() for event in events if isinstance(event, DecodeStretch)]
    return sum(skipped) / fast.steps


def random_case(seed: int) -> tuple[TwinConfig, list[SimRequest], dict[int, SimRequest], StepCost]:
    rng = random.Random(seed)
    ranks = rng.choice([1, 1, 2])
    options: dict[str, Any] = {
        "num_ranks": ranks,
        "num_blocks": rng.choice([20, 40, 200]),
        "max_running": rng.choice([2, 4, 8]),
        "chunked_prefill_size": rng.choice([None, 7, 16]),
        "has_sequence_state": rng.random() < 0.5,
        "num_tails": rng.choice([1, 6, 30]),
        "max_waiting": rng.choice([3, 50]),
        "watermark_blocks": rng.choice([0, 1]),
        "num_replicas": rng.choice([1, 2, 3]),
        "routing": rng.choice(["round-robin", "least-tokens", "prefix-aware"]),
        "door_s": rng.choice([0.0, 0.002]),
        "reply_s": rng.choice([0.0, 0.001]),
        "slo": Slo(ttft_s=0.05, itl_s_max=0.02),
        "seed": seed,
    }
    if rng.random() < 0.4:  # equal times everywhere
        cost: StepCost = GivenCost(1 / 64, 0.0, 0.0)
    elif rng.random() < 0.3:
        cost = GivenCost(0.004, 3e-5, 1e-6)
    else:
        cost = CalibratedCost(FIT, SPEC, parse_layout(LAYOUTS[ranks]).decode.unit)
    prefixes = [array("i", [3 + number] * 60) for number in range(2)]
    gap_s, now_s, requests = rng.choice([0.0, 1 / 64, 0.05, 0.3]), 0.0, list[SimRequest]()
    for index in range(rng.randint(1, 14)):
        prompt = rng.choice(prefixes)[: rng.randint(0, 50)] + array("i", [rng.randint(0, 9) for _ in range(rng.randint(1, 9))])
        output = rng.choice([1, 5, 40, 66])
        cancel_s = rng.choice([1 / 64, 0.1]) * rng.randint(0, 9) if rng.random() < 0.2 else None
        limit = output if rng.random() < 0.5 else output + rng.randint(0, 3)
        requests.append(sim_request(index, now_s, 0, output, limit, prompt=prompt, cancel_after_s=cancel_s, priority=rng.randint(0, 1)))
        now_s += gap_s * rng.choice([0, 1, 1, 2, rng.random()])
    following = {number: sim_request(100 + number, 0.0, rng.randint(1, 30), rng.randint(1, 60)) for number in range(0, len(requests), 3)}
    return twin_config(**options), requests, following, cost


def test_same_as_stepping() -> None:
    shares = [compare(*random_case(seed)) for seed in range(16)]
    assert sum(shares) / len(shares) > 0.3


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9))
def test_same_as_stepping_anywhere(seed: int) -> None:
    compare(*random_case(seed))


def test_long_answers_are_skipped_over() -> None:
    config = twin_config(context_length=2000, num_blocks=2000)
    requests = [sim_request(index, 0.01 * index, 20, 1000) for index in range(4)]
    assert compare(config, requests, {}, GivenCost(0.01, 1e-4, 1e-7)) > 0.97


@pytest.mark.parametrize(("spec", "ranks"), [(SPEC, 1), (SPEC, 2), (dense_spec(), 1)])
def test_prices_of_a_stretch_are_those_of_its_steps(spec: ModelSpec, ranks: int) -> None:
    """To the last bit, or simulated times would differ."""
    config = twin_config(num_ranks=ranks, has_sequence_state=True, num_tails=9, block_size=8, num_blocks=400, context_length=1000)
    cost = CalibratedCost(true_fit(spec), spec, parse_layout(LAYOUTS[ranks]).decode.unit)
    requests = [sim_request(index, 0.0, 40 + 31 * index, 300) for index in range(4)]
    assert compare(config, requests, {}, cost) > 0.9
