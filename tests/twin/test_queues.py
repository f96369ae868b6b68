"""The simulator against queueing theory: waiting times, Little's law, the bound of a batch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from engine.core.events import Arrived, Finished
from engine.core.plan import StepPlan
from tests.twin.twin_support import ClosedLoop, Cost, GivenWorkload, Log, constant, sim_request, twin_config
from twin.cluster import simulate
from twin.result import SimResult
from twin.workload.types import SimRequest

REPLICATIONS, REQUESTS = 10, 300
ONE_AT_A_TIME = {"max_running": 1, "num_blocks": 4096, "context_length": 16384, "max_batched_tokens": 16384, "max_waiting": 10_000}


def prompt_seconds(plan: StepPlan) -> float:
    return plan.num_tokens / 1000.0


def mean_wait_s(draw_request: Callable[[random.Random, int, float], SimRequest], cost: Cost, service_s: float, rate: float) -> list[float]:
    """Mean E2E less the mean service, of several runs of one server."""
    waits_s = []
    for seed in range(REPLICATIONS):
        draw, now_s, requests = random.Random(seed), 0.0, []
        for index in range(REQUESTS):
            now_s += draw.expovariate(rate)
            requests.append(draw_request(draw, index, now_s))
        result = simulate(twin_config(**ONE_AT_A_TIME, prefix_caching=False), GivenWorkload(requests), cost)
        assert result.finished == REQUESTS
        assert result.e2e_s.mean is not None
        waits_s.append(result.e2e_s.mean - service_s)
    return waits_s


def agrees(found: list[float], wanted: float) -> None:
    """Within 3.5 standard errors, which are a small part of it."""
    error = statistics.stdev(found) / math.sqrt(len(found))
    assert error < 0.2 * wanted
    assert abs(statistics.mean(found) - wanted) < 3.5 * error


def test_m_m_1() -> None:
    """Exponential service by the length of the prompt; W = rho / (mu - lambda)."""
    mu, rate = 2.0, 1.0

    def draw_request(draw: random.Random, index: int, now_s: float) -> SimRequest:
        return sim_request(index, now_s, min(16_000, 1 + int(draw.expovariate(mu) * 1000)), 1)

    agrees(mean_wait_s(draw_request, Cost(prompt_seconds), 1 / mu, rate), (rate / mu) / (mu - rate))


def test_m_d_1() -> None:
    """Five steps each; W = rho / (2 mu (1 - rho))."""
    step_s, steps, rate = 0.1, 5, 1.4
    service_s = step_s * steps
    rho = rate * service_s

    def draw_request(_draw: random.Random, index: int, now_s: float) -> SimRequest:
        return sim_request(index, now_s, 3, steps)

    agrees(mean_wait_s(draw_request, constant(step_s), service_s, rate), rho * service_s / (2 * (1 - rho)))


def test_m_g_1_of_answers_that_nobody_knows_the_length_of() -> None:
    """Geometric answers of mean m that end through a stop token: with overlap each costs a step more, planned before its end was seen.

    Pollaczek and Khinchine: W = lambda E[S^2] / (2 (1 - lambda E[S])).
    """
    step_s, share, rate = 0.05, 0.25, 2.4

    def draw_request(draw: random.Random, index: int, now_s: float) -> SimRequest:
        length = 1 + int(math.log(1.0 - draw.random()) / math.log(1.0 - share))
        return sim_request(index, now_s, 3, length, max_tokens=500)

    mean = 1 / share + 1
    square = (1 - share) / share**2 + mean**2
    service_s, service_s2 = step_s * mean, step_s**2 * square
    waits_s = mean_wait_s(draw_request, constant(step_s), step_s / share, rate)
    agrees(waits_s, rate * service_s2 / (2 * (1 - rate * service_s)))


def run(log: Log, seed: int = 3) -> SimResult:
    draw, now_s, requests = random.Random(seed), 0.0, []
    for index in range(400):
        now_s += draw.expovariate(8.0)
        requests.append(sim_request(index, now_s, draw.randint(1, 30), draw.randint(1, 20), max_tokens=40))
    config = twin_config(num_replicas=2, door_s=0.25, reply_s=0.5)
    return simulate(config, GivenWorkload(requests), constant(0.05), observers=[log])


def test_littles_law() -> None:
    """The number in the system over time is the arrival rate times the time in it; clients wait at the door and for the reply besides."""
    log = Log()
    result = run(log)
    changes = sorted((event.now_s, 1 if isinstance(event, Arrived) else -1) for event in log.all if isinstance(event, (Arrived, Finished)))
    area = number = last_s = 0.0
    for now_s, change in changes:
        area += number * (now_s - last_s)
        number, last_s = number + change, now_s
    assert number == 0
    assert result.e2e_s.mean is not None
    assert area / result.finished == pytest.approx(result.e2e_s.mean - 0.75)
    # As the law is usually written, L = lambda W over the time of the run.
    assert area / result.sim_s == pytest.approx(result.finished / result.sim_s * (result.e2e_s.mean - 0.75))


def test_a_batch_serves_no_more_than_its_slots_a_step() -> None:
    """A closed loop fills every slot in every step but the first and the last ones."""
    step_s, slots, num_requests, length = 0.02, 4, 80, 25
    full = simulate(twin_config(), ClosedLoop(num_requests, 3 * slots, 2, length), constant(step_s))
    assert full.output_tokens == num_requests * length
    assert full.output_tokens_per_s is not None
    assert full.output_tokens_per_s <= slots / step_s * (1 + 1e-9)
    assert full.output_tokens_per_s == pytest.approx(slots / step_s)
    assert full.steps == num_requests * length / slots
    half = simulate(twin_config(), ClosedLoop(num_requests, slots // 2, 2, length), constant(step_s))
    assert half.output_tokens_per_s is not None
    assert half.output_tokens_per_s == pytest.approx(slots / 2 / step_s)
