"""The simulator against a plain loop over the core, without SimPy: the same arrivals and draws give the same plans, byte for byte."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import CapacityError, RequestError
from engine.core.events import Event, Finished, Rejected, encode_lines
from engine.core.plan import ItemResult, RankResult, StepPlan, StepResult
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from tests.twin.twin_support import GivenWorkload, Log, at, constant, sim_request, twin_config
from twin.cluster import simulate
from twin.config import TwinConfig
from twin.outcomes import STOP_TOKEN
from twin.workload.types import SimRequest

STEP_S = 1.0
Message = tuple[float, int, SimRequest]  # when it reaches the scheduler; 0: a request, 1: its client has left


class PlainLoop:
    """Time goes in steps of STEP_S. What reaches the scheduler up to the end of a step is seen by the plan that is made there."""

    def __init__(self, config: TwinConfig, requests: list[SimRequest], following: dict[int, SimRequest]) -> None:
        self.config, self.following = config, following
        self.core = Scheduler(msgspec.structs.replace(config.scheduler, max_waiting=config.requests_per_replica))
        self.coming: list[Message] = []
        self.mailbox: list[Message] = []
        self.draw = random.Random(f"{config.seed}:0")
        self.truth: dict[int, SimRequest] = {}
        self.emitted: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.log: list[Event] = []
        self.gone: set[int] = set()  # clients that have their answer, or do not want it any more
        self.now_s = 0.0
        for request in requests:
            self.send(request)

    def send(self, request: SimRequest) -> None:
        self.coming.append((request.arrival_s + self.config.door_s, 0, request))
        if request.cancel_after_s is not None:
            self.coming.append((request.arrival_s + request.cancel_after_s, 1, request))
        self.coming.sort(key=lambda message: message[:2])

    def over(self, request: int, end_s: float) -> None:
        self.gone.add(request)
        if request in self.following:
            self.send(at(self.following[request], end_s))

    def door(self) -> None:
        """Who comes up to now, and is not one too many for the engine as it was after its last turn."""
        while self.coming and self.coming[0][0] <= self.now_s:
            message = self.coming.pop(0)
            time_s, is_leaving, request = message
            if request.index in self.gone:
                continue
            if is_leaving:
                self.over(request.index, time_s)
                self.mailbox.append(message)
            elif len(self.core.sequences) + sum(not leaving for _, leaving, _ in self.mailbox) >= self.config.requests_per_replica:
                self.over(request.index, time_s + self.config.reply_s)
            else:
                self.mailbox.append(message)

    def read(self) -> None:
        for time_s, is_leaving, request in self.mailbox:
            if is_leaving:
                self.see(self.core.abort(request.index, self.now_s))
            elif request.index not in self.gone:
                self.submit(request, time_s)
        self.mailbox.clear()

    def submit(self, request: SimRequest, arrived_s: float) -> None:
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, stop_token_ids=(STOP_TOKEN,))
        self.truth[request.index], self.emitted[request.index] = request, 0
        try:
            self.see(self.core.submit(Request(request.index, tuple(request.prompt), params), arrived_s))
        except (RequestError, CapacityError):
            self.see(self.core.take_events())

    def see(self, events: tuple[Event, ...]) -> None:
        self.log += events
        for event in events:
            if isinstance(event, (Finished, Rejected)) and event.request not in self.gone:
                self.over(event.request, self.now_s + self.config.reply_s)

    def run(self) -> None:
        in_flight: deque[StepPlan] = deque()
        while True:
            self.read()
            while len(in_flight) < 2 and (plan := self.core.plan(self.now_s)) is not None:
                in_flight.append(plan)
                self.plans.append(plan)
            if not in_flight:
                if not self.coming:
                    return
                self.now_s = self.coming[0][0]
                self.door()
                continue
            self.now_s += STEP_S
            self.door()
            plan = in_flight.popleft()
            self.see(self.core.commit(plan, self.result(plan), self.now_s))

    def result(self, plan: StepPlan) -> StepResult:
        ranks = [
            RankResult(tuple(self.outcome(item.request, item.num_draft_tokens) for item in rank.items if item.emits)) for rank in plan.ranks
        ]
        return StepResult(plan.step, tuple(ranks), STEP_S)

    def outcome(self, request: int, num_drafts: int) -> ItemResult:
        accepted = 0
        while accepted < num_drafts and self.draw.random() < self.config.acceptance[accepted]:
            accepted += 1
        truth, tokens = self.truth[request], list[int]()
        for _ in range(1 + accepted):
            self.emitted[request] += 1
            ends_here = self.emitted[request] == truth.output_tokens < truth.max_tokens
            tokens.append(STOP_TOKEN if ends_here else truth.output_token)
            if self.emitted[request] >= min(truth.output_tokens, truth.max_tokens):
                break
        return ItemResult(request, tuple(tokens))


@st.composite
def cases(draw: st.DrawFn) -> tuple[TwinConfig, list[SimRequest], dict[int, SimRequest]]:
    drafts = draw(st.sampled_from([0, 0, 2]))
    options: dict[str, Any] = {
        "num_blocks": draw(st.integers(8, 24)),
        "max_running": draw(st.integers(1, 4)),
        "num_ranks": draw(st.integers(1, 2)),
        "max_waiting": draw(st.integers(1, 4)),
        "chunked_prefill_size": draw(st.sampled_from([None, 3, 8])),
        "draft_tokens": drafts,
        "acceptance": tuple(draw(st.floats(0, 1)) for _ in range(drafts)),
        "num_host_blocks": draw(st.sampled_from([0, 16])),
        "swap_threshold_tokens": 6,
        "context_length": 48,
        "door_s": draw(st.sampled_from([0.25, 1.75])),
        "reply_s": 0.25,
        "seed": draw(st.integers(0, 3)),
    }
    number, now_s = draw(st.integers(1, 12)), 0.0
    requests: list[SimRequest] = []
    for index in range(2 * number):
        now_s += draw(st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0, 20.0])) if index < number else 0.0
        max_tokens = draw(st.integers(1, 16))
        output_tokens = draw(st.integers(1, max_tokens))
        leaves_s = draw(st.sampled_from([None, None, 0.125, 2.0, 6.25]))
        if leaves_s is not None:
            leaves_s += 0.5 ** (10 + index)  # at no instant at which anything else happens: no order is defined there
        requests.append(sim_request(index, now_s, draw(st.integers(1, 30)), output_tokens, max_tokens, cancel_after_s=leaves_s))
    following = {index: requests[number + index] for index in range(number) if draw(st.booleans())}
    return twin_config(**options), requests[:number], following


@settings(max_examples=50, deadline=None)
@given(cases())
def test_plans_are_those_of_a_plain_loop(case: tuple[TwinConfig, list[SimRequest], dict[int, SimRequest]]) -> None:
    config, requests, following = case
    loop, log = PlainLoop(config, requests, following), Log()
    loop.run()
    result = simulate(config, GivenWorkload(requests, following), constant(STEP_S), observers=[log])
    encode = msgspec.json.encode
    assert [encode(plan) for plan in log.plans[0]] == [encode(plan) for plan in loop.plans]
    assert log.encoded() == encode_lines(loop.log)
    assert result.requests == len(requests) + len(following)
