"""Open and closed loops, sessions, prefixes, leaving: what the requests of drawn workloads are."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.core.errors import ConfigError
from tests.twin.workload.workload_support import digest, serve
from twin.workload.spec import WORKLOAD_OPTIONS, WorkloadSpec, make_workload
from twin.workload.types import SimRequest

ROOT = Path(__file__).parents[3]


def arrivals(**values: Any) -> list[SimRequest]:
    return list(make_workload(WorkloadSpec(**values)).arrivals())


def test_the_spec_has_the_options_and_their_defaults() -> None:
    spec = WorkloadSpec()
    assert {option.key: getattr(spec, option.key) for option in WORKLOAD_OPTIONS} == {
        option.key: option.default for option in WORKLOAD_OPTIONS
    }
    assert set(WorkloadSpec.__struct_fields__) == {option.key for option in WORKLOAD_OPTIONS} | {"token_ids"}


# -- open loop ----------------------------------------------------------------------------------------------------------------


def test_an_open_loop_does_not_wait_for_the_server() -> None:
    spec = WorkloadSpec(request_rate=5.0, requests=200, isl="20:60", osl="8", prefix=30, cancel_share=0.5)
    slow, fast = (serve(make_workload(spec), service_s=lambda _, took_s=took_s: took_s) for took_s in (50.0, 0.01))  # type: ignore[misc]
    assert digest(slow.requests) == digest(fast.requests) == digest(make_workload(spec).arrivals())
    assert [request.index for request in slow.requests] == list(range(200))


def test_a_request_is_what_its_options_say() -> None:
    for request in arrivals(request_rate=2.0, requests=300, isl="100", osl="50", range_ratio=0.5, prefix=7, token_ids=(10, 20)):
        assert 57 <= len(request.prompt) <= 107
        assert 25 <= request.output_tokens <= 50
        assert request.max_tokens == request.output_tokens
        assert all(10 <= token < 20 for token in (*request.prompt, request.output_token))
    assert {len(request.prompt) for request in arrivals(request_rate=2.0, requests=2000, isl="10", range_ratio=0.5)} == set(range(5, 11))


def test_max_tokens_hides_the_lengths_and_cuts_the_answers() -> None:
    found = arrivals(request_rate=2.0, requests=300, osl="1:100", max_tokens=60)
    assert {request.max_tokens for request in found} == {60}
    free = arrivals(request_rate=2.0, requests=300, osl="1:100")
    assert [request.output_tokens for request in found] == [min(request.output_tokens, 60) for request in free]


def test_what_is_changed_does_not_move_the_rest() -> None:
    base = arrivals(request_rate=2.0, requests=50, isl="5:50", osl="5:50")
    other = arrivals(request_rate=2.0, requests=50, isl="5:50", osl="1:9", cancel_share=0.5, prefix=4)
    assert [request.arrival_s for request in base] == [request.arrival_s for request in other]
    assert [request.prompt for request in base] == [request.prompt[4:] for request in other]
    gamma = arrivals(request_rate=2.0, requests=50, isl="5:50", osl="5:50", arrival="gamma", cv=2.0)
    assert [(request.prompt, request.output_tokens) for request in base] == [(request.prompt, request.output_tokens) for request in gamma]


def test_a_burst_and_a_ramp_reach_the_arrivals() -> None:
    burst = arrivals(request_rate=10.0, requests=500, arrival="burst", burst_period=4.0, burst_share=0.25)
    assert all(request.arrival_s % 4.0 <= 1.0 for request in burst)
    ramp = arrivals(request_rate=1.0, requests=60, arrival="constant", ramp_to=5.0, ramp_time=20.0)
    assert ramp[-1].arrival_s == pytest.approx(20.0 - 1 / 5, abs=0.01)  # 1 to 5 requests/s over 20 s are 60 in all
    assert arrivals(request_rate=math.inf, requests=3)[2].arrival_s == 0.0


# -- closed loop --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 60), st.integers(1, 4), st.integers(0, 1000))
def test_a_closed_loop_keeps_its_concurrency(concurrency: int, requests: int, turns: int, seed: int) -> None:
    workload = make_workload(WorkloadSpec(concurrency=concurrency, requests=requests, turns=turns, isl="3", osl="2"))
    served = serve(workload, seed)
    assert sorted(request.index for request in served.requests) == list(range(requests))
    assert workload.num_requests == requests
    sessions = -(-requests // turns)
    assert served.peak == min(concurrency, sessions)
    # As many as there are clients, until the last session has begun.
    last_begin_s = max(request.arrival_s for request in served.requests if request.index % turns == 0)
    points_s = sorted({request.arrival_s for request in served.requests} | set(served.ends_s.values()))
    for earlier_s, later_s in itertools.pairwise(time_s for time_s in points_s if time_s <= last_begin_s):
        assert served.at((earlier_s + later_s) / 2) == min(concurrency, sessions)


def test_think_time_is_exponential_and_between_a_clients_requests() -> None:
    workload = make_workload(WorkloadSpec(concurrency=3, requests=2000, think_time=2.0, isl="1", osl="1"))
    followers = [(request, workload.follow_up(request, 10.0)) for request in [*workload.arrivals()]]
    waits_s = []
    while any(following for _, following in followers):
        waits_s += [following.arrival_s - 10.0 for _, following in followers if following is not None]
        followers = [(following, workload.follow_up(following, 10.0)) for _, following in followers if following is not None]
    assert len(waits_s) == 1997
    assert stats.kstest(waits_s, stats.expon(scale=2.0).cdf).pvalue > 1e-3
    assert serve(make_workload(WorkloadSpec(concurrency=3, requests=200, think_time=2.0))).peak <= 3


def test_clients_begin_one_after_the_other() -> None:
    first = arrivals(concurrency=4, requests=10, ramp_up=8.0)
    assert [request.arrival_s for request in first] == [0.0, 2.0, 4.0, 6.0]


def test_a_closed_loops_contents_do_not_depend_on_the_server() -> None:
    spec = WorkloadSpec(concurrency=4, requests=60, turns=3, isl="5:30", osl="1:9", prefix=10, prefix_share=0.5, cancel_share=0.3)
    runs = [serve(make_workload(spec), seed).requests for seed in (1, 2)]
    contents = [
        {request.index: (request.prompt, request.output_tokens, request.cancel_after_s) for request in requests} for requests in runs
    ]
    assert contents[0] == contents[1]
    assert [request.index for request in runs[0]] != [request.index for request in runs[1]]


def test_the_same_object_gives_the_same_requests_again() -> None:
    workload = make_workload(WorkloadSpec(concurrency=3, requests=40, turns=2))
    assert digest(serve(workload, 5).requests) == digest(serve(workload, 5).requests)


# -- sessions, prefixes, leaving ----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 40), st.sampled_from([{"concurrency": 3}, {"request_rate": 2.0}]), st.integers(0, 99))
def test_a_turn_repeats_what_was_said_and_adds_to_it(turns: int, requests: int, loop: dict[str, Any], seed: int) -> None:
    spec = WorkloadSpec(turns=turns, requests=requests, isl="5:9", turn_isl="20:30", osl="1:7", seed=seed, prefix=3, **loop)
    found = {request.index: request for request in serve(make_workload(spec), seed).requests}
    assert sorted(found) == list(range(requests))
    for index, request in found.items():
        if index % turns == 0:
            assert 8 <= len(request.prompt) <= 12
            continue
        before = found[index - 1]
        said = [*before.prompt, *[before.output_token] * before.output_tokens]
        assert list(request.prompt[: len(said)]) == said
        assert 20 <= len(request.prompt) - len(said) <= 30
    firsts = [tuple(request.prompt[3:]) for index, request in found.items() if index % turns == 0]
    assert len(set(firsts)) == len(firsts)


def test_a_rate_of_sessions_makes_the_rate_of_requests() -> None:
    begins = arrivals(request_rate=12.0, requests=4000, turns=4, arrival="constant", isl="1", osl="1")
    assert len(begins) == 1000
    assert begins[1].arrival_s == pytest.approx(4 / 12)


def test_a_shared_prefix_is_shared_by_its_share() -> None:
    found = arrivals(request_rate=9.0, requests=3000, isl="8", prefix=32, prefix_share=0.25, num_prefixes=3)
    assert {len(request.prompt) for request in found} == {8, 40}
    prefixes = Counter(tuple(request.prompt[:32]) for request in found if len(request.prompt) == 40)
    assert len(prefixes) == 3
    assert prefixes.total() == pytest.approx(750, abs=4 * math.sqrt(3000 * 0.25 * 0.75))
    assert stats.chisquare(list(prefixes.values())).pvalue > 1e-3
    assert len({tuple(request.prompt[-8:]) for request in found}) == 3000


@pytest.mark.parametrize("delay", ["exponential", "uniform"])
def test_a_share_of_the_clients_leaves(delay: str) -> None:
    found = arrivals(request_rate=9.0, requests=4000, isl="1", cancel_share=0.3, cancel_after=5.0, cancel_delay=delay)
    after_s = [request.cancel_after_s for request in found if request.cancel_after_s is not None]
    assert len(after_s) == pytest.approx(1200, abs=4 * math.sqrt(4000 * 0.3 * 0.7))
    wanted = stats.expon(scale=5.0) if delay == "exponential" else stats.uniform(0, 10.0)
    assert stats.kstest(after_s, wanted.cdf).pvalue > 1e-3


def test_who_leaves_does_not_come_back() -> None:
    requests = serve(make_workload(WorkloadSpec(concurrency=2, requests=11, turns=3, cancel_share=1.0, isl="1", osl="1"))).requests
    assert sorted(request.index for request in requests if request.cancel_after_s is not None) == [2, 5, 8, 10]


# -- limits -------------------------------------------------------------------------------------------------------------------


def test_a_context_is_kept_or_refused() -> None:
    values: dict[str, Any] = {"concurrency": 1, "requests": 6, "turns": 3, "isl": "40", "osl": "10"}
    with pytest.raises(ConfigError, match=r"request 2: 140 prompt tokens and 10 of the answer; a sequence has at most 149") as caught:
        make_workload(WorkloadSpec(max_context=149, **values))
    assert "--over-context clip" in str(caught.value)
    whole, fitting = (serve(make_workload(WorkloadSpec(max_context=limit, **values))).requests for limit in (None, 150))
    assert digest(whole) == digest(fitting)
    cut = serve(make_workload(WorkloadSpec(max_context=100, over_context="clip", **values))).requests
    for before, after in zip(whole, cut, strict=True):
        assert len(after.prompt) == min(len(before.prompt), 90)
        assert after.prompt == before.prompt[:90]
        assert after.output_tokens == 10
    long_answer = arrivals(request_rate=1.0, requests=1, isl="40", osl="500", max_context=100, over_context="clip")
    assert (len(long_answer[0].prompt), long_answer[0].output_tokens) == (1, 99)


def test_one_too_long_of_many_is_found_before_the_run() -> None:
    values: dict[str, Any] = {"request_rate": 1.0, "requests": 400, "isl": "lognormal:100:1"}
    longest = max(len(request.prompt) for request in arrivals(**values)) + 128
    assert len(arrivals(max_context=longest, **values)) == 400
    with pytest.raises(ConfigError, match=f"at most {longest - 1}"):
        make_workload(WorkloadSpec(max_context=longest - 1, **values))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "no arrivals"),
        ({"request_rate": 1.0, "concurrency": 2}, "both given"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"concurrency": 0}, "--concurrency"),
        ({"concurrency": 1, "requests": 0}, "--requests"),
        ({"request_rate": 1.0, "requests": 10**9}, "--requests"),
        ({"request_rate": 1.0, "isl": "0"}, "--isl"),
        ({"request_rate": 1.0, "osl": "lognormal:1"}, "--osl"),
        ({"request_rate": 1.0, "range_ratio": 1.5}, "--range-ratio"),
        ({"request_rate": 1.0, "arrival": "weibull"}, "--arrival"),
        ({"request_rate": 1.0, "arrival": "gamma"}, "needs --cv"),
        ({"request_rate": 1.0, "cv": 2.0}, "--cv 2.0 has no effect without --arrival gamma"),
        ({"concurrency": 1, "arrival": "constant"}, "--arrival constant has no effect with --concurrency"),
        ({"concurrency": 1, "ramp_to": 2.0}, "--ramp-to"),
        ({"request_rate": math.inf, "ramp_to": 2.0}, "--ramp-to"),
        ({"request_rate": 1.0, "ramp_time": 5.0}, "--ramp-time"),
        ({"request_rate": 1.0, "ramp_up": 5.0}, "--ramp-up"),
        ({"request_rate": 1.0, "think_time": 5.0}, "--think-time"),
        ({"request_rate": 1.0, "burst_share": 0.1}, "--burst-share"),
        ({"request_rate": 1.0, "turn_isl": "5"}, "--turn-isl"),
        ({"request_rate": 1.0, "turns": 2, "turn_isl": "x"}, "--turn-isl"),
        ({"request_rate": 1.0, "prefix_share": 0.5}, "--prefix-share"),
        ({"request_rate": 1.0, "cancel_after": 2.0}, "--cancel-after"),
        ({"request_rate": 1.0, "cancel_share": 1.1}, "--cancel-share"),
        ({"request_rate": 1.0, "over_context": "clip"}, "--over-context"),
        ({"request_rate": 1.0, "time_scale": 2.0}, "--time-scale"),
        ({"request_rate": 1.0, "seed": -1}, "--seed"),
        ({"request_rate": 1.0, "token_ids": (5, 5)}, "token_ids"),
        ({"request_rate": "fast"}, "--request-rate"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_workload(WorkloadSpec(**values))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# -- the same for ever, and never all at once ---------------------------------------------------------------------------------

_PROGRAM = """
from tests.twin.workload.workload_support import digest, serve
from twin.workload.spec import WorkloadSpec, make_workload
values = {"requests": 120, "isl": "lognormal:300:1", "osl": "1:40", "prefix": 20, "prefix_share": 0.5, "turns": 2, "cancel_share": 0.2}
for loop in ({"request_rate": 3.0, "arrival": "gamma", "cv": 2.0}, {"concurrency": 5, "think_time": 0.5}):
    print(digest(serve(make_workload(WorkloadSpec(seed=7, **values, **loop))).requests))
"""


def test_a_seed_is_the_same_load_in_every_process() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].split()) == 2
    assert digest(arrivals(request_rate=3.0, requests=20)) != digest(arrivals(request_rate=3.0, requests=20, seed=1))


def test_requests_are_made_one_by_one() -> None:
    workload = make_workload(WorkloadSpec(request_rate=1.0, requests=1500, isl="8192"))  # 32 KiB a prompt, 47 MiB in all
    tracemalloc.start()
    try:
        assert sum(len(request.prompt) for request in workload.arrivals()) == 1500 * 8192
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
