"""Metrics against numbers computed by hand, against the log's own definitions, and as what scrapers read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from engine.actors.cache import CacheStats
from engine.actors.gateway import EngineStats, Gateway, Generation, Health
from engine.actors.supervisor import open_engine
from engine.api.config import ApiConfig
from engine.api.info import ServerInfo
from engine.api.metrics import Compat, ServerMetrics
from engine.api.metrics_families import FAMILIES
from engine.api.stats_line import StatsLog, log_stats
from engine.core.errors import InvariantError
from engine.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Preempted,
    Rejected,
    Resumed,
    StepCommitted,
    StepMeasured,
    StepPriced,
    TokensEmitted,
)
from engine.core.metrics import MetricsLog
from engine.core.plan import ItemResult, PlanItem, RankPlan, RankResult, StepPlan, StepResult
from engine.core.rank_counters import RankCounters
from engine.core.sampling import SamplingParams
from engine.core.scheduler_state import RankStats, Stats
from engine.core.shadow import ShadowState
from engine.core.step_cost import StepPrice
from tests.actors.harness import CACHE, MODULE, engine_config
from tests.actors.scripted_worker import Script
from tests.api.harness import open_server

SAMPLES = dict[tuple[str, tuple[tuple[str, str], ...]], float]
INFO = ServerInfo(
    version="1.2.3", model="m", served_names=("served",), created_unix_s=0, layout="tp1dp1ep1", dtype="bfloat16", device="cpu",
    num_parameters=1, weight_bytes=10, kv_bytes=64000, kv_tokens=256, block_size=4, context_length=200, max_running_requests=8,
    max_waiting_requests=64, draft_tokens=0, prefix_caching=True, chat_format=None, load_s=0.0, warm_up_s=0.0, ready_s=0.0, non_default={},
)  # fmt: skip

# Everything a dashboard may rely on: the samples of the exposition without their labels, buckets left out.
DOCUMENTED = """
actor_heartbeat_age_seconds actor_mailbox_depth build_info collective_sent_bytes_total collectives_total engram_fetches_total
engram_wait_seconds_total expert_rebalances_total expert_tokens_total e2e_request_latency_seconds_count e2e_request_latency_seconds_sum
engine_ready generation_tokens_total grammar_compilation_time_seconds_count grammar_compilation_time_seconds_sum http_open_streams
http_requests_total inter_token_latency_seconds_count inter_token_latency_seconds_sum invariant_violations_total
iteration_tokens_total_count iteration_tokens_total_sum kv_capacity_tokens kv_evictable_tokens kv_free_tokens kv_host_capacity_tokens
kv_host_used_tokens kv_moved_blocks_total kv_moved_bytes_total kv_used_tokens num_grammar_failures_total num_grammar_timeout_total
num_preemptions_total num_requests_preempted num_requests_running num_requests_swapped num_requests_waiting prefill_tokens_total
prefix_cache_granularity_tokens prefix_cache_hits_total prefix_cache_queries_total prompt_tokens_total recomputed_tokens_total
request_decode_time_seconds_count request_decode_time_seconds_sum request_generation_tokens_count request_generation_tokens_sum
request_prefill_time_seconds_count request_prefill_time_seconds_sum request_prompt_tokens_count request_prompt_tokens_sum
request_queue_time_seconds_count request_queue_time_seconds_sum requests_started_total requests_total
spec_decode_accepted_tokens_per_position_total spec_decode_draft_tokens_per_position_total spec_decode_num_accepted_tokens_total
spec_decode_num_draft_tokens_total spec_decode_num_verified_items_total step_component_seconds_total step_forward_seconds_count
step_drift_alarm step_drift_ratio step_forward_seconds_sum step_predicted_seconds_count step_predicted_seconds_sum
step_prediction_correction step_residual_ratio_count step_residual_ratio_sum steps_compared_total step_seconds_count step_seconds_sum
steps_total time_per_output_token_seconds_count time_per_output_token_seconds_sum time_to_first_token_seconds_count
time_to_first_token_seconds_sum
"""

# What the reference gives as the shared names.
COMPAT_NAMES: dict[Compat, str] = {
    "vllm": """num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prefix_cache_queries_total
        prefix_cache_hits_total prompt_tokens_total generation_tokens_total iteration_tokens_total_count time_to_first_token_seconds_bucket
        inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
        request_prefill_time_seconds_bucket request_decode_time_seconds_bucket num_preemptions_total request_success_total
        spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total""",
    "sglang": """num_running_reqs num_queue_reqs token_usage kv_used_tokens kv_available_tokens kv_evictable_tokens cached_tokens_total
        prompt_tokens_total generation_tokens_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
        e2e_request_latency_seconds_bucket queue_time_seconds_bucket per_stage_req_latency_seconds_bucket num_retracted_reqs
        num_retracted_requests_total num_requests_total num_aborted_requests_total spec_accept_length
        grammar_compilation_time_seconds_count num_grammar_timeout_total""",
}


SHADOW = ShadowState(num_compared=20, num_below=1, num_above=3, drift_ratio=1.25, component_ratios={"projection": 0.5}, alarm="projection",
                     alarm_ratio=0.5, correction=1.5, note="")  # fmt: skip


class StubEngine:
    """Gauges by hand: two ranks of ten blocks of four tokens."""

    num_rebalances = 0
    shadow = SimpleNamespace(state=lambda: SHADOW)

    def __init__(self) -> None:
        self.broken = False
        ranks = tuple(
            RankStats(num_running=running, total_blocks=10, free_blocks=5, cached_only_blocks=2, tree_blocks=4, total_host_blocks=6,
                      free_host_blocks=4, total_tails=0, stored_tails=0)
            for running in (3, 1)
        )  # fmt: skip
        core = Stats(num_running=4, num_waiting=5, num_swapped=1, num_uncommitted=0, ranks=ranks, steps_total=0, requests_total=0,
                     preemptions_total=0, prefix_query_tokens_total=0, prefix_hit_tokens_total=0, output_tokens_total=0,
                     block_size=4)  # fmt: skip
        self._stats = EngineStats(Health("ready"), 9, core, CacheStats(1, 2, 3, 4000, 0))

    def stats(self) -> EngineStats:
        if self.broken:
            raise InvariantError("a block is lost")
        return self._stats

    def heartbeat_ages_s(self) -> dict[str, float]:
        return {"scheduler": 0.0, "worker-0": 0.25}

    @property
    def grammars(self) -> SimpleNamespace:
        return SimpleNamespace(num_compilations=4, compile_s=0.5, num_failures=2, num_timeouts=1)

    def mailbox_depths(self) -> dict[str, int]:
        return {"scheduler": 7}


def started(engine: Any = None, compat: Compat = "none", **info: Any) -> ServerMetrics:
    metrics = ServerMetrics()
    metrics.start(cast(Gateway, engine or StubEngine()), msgspec.structs.replace(INFO, **info), compat)
    return metrics


def samples(metrics: ServerMetrics) -> SAMPLES:
    text = metrics.exposition().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: ServerMetrics, name: str, prefix: str = "twinfer_", **labels: str) -> float:
    return samples(metrics)[prefix + name, tuple(sorted(labels.items()))]


HAND_LOG: tuple[Event, ...] = (
    Arrived(10.0, 1, 8),
    Arrived(10.0, 2, 8, parent=1),
    Arrived(10.25, 3, 6),
    Rejected(10.25, 4, "queue_full", "full"),
    Admitted(10.5, 1, 0, 8, 4, "prefix"),
    Admitted(11.0, 2, 0, 8, 8, "fork"),
    TokensEmitted(11.0, 1, (5,)),
    Admitted(11.0, 3, 1, 6, 0, "cold"),
    TokensEmitted(11.25, 1, (5, 6, 7)),  # three of one step
    TokensEmitted(11.25, 2, (5,)),
    Preempted(11.25, 2, 0, "recompute", 8),
    StepCommitted(11.25, 0, 0.125, 12, 4, 2, (2, 2, 1), (1, 1, 0)),
    Resumed(12.0, 2, 0, "recompute", 4),
    TokensEmitted(12.25, 2, (6,)),  # after the preemption: a long gap, and no second first token
    Finished(12.25, 1, "length", 8, 4),
    Finished(12.5, 2, "stop", 8, 2),
    TokensEmitted(12.5, 3, ()),
    Finished(12.75, 3, "abort", 6, 0),
    Arrived(13.0, 5, 2),
    Admitted(13.0, 5, 0, 2, 0, "cold"),
    TokensEmitted(13.5, 5, (1,)),
    Finished(13.5, 5, "error", 2, 1),
)


def test_a_log_computed_by_hand() -> None:
    metrics = started()
    metrics.events(HAND_LOG)
    expected = {
        "requests_started_total": 4,
        "prompt_tokens_total": 8 + 6 + 2,  # once for the two samples of request 1
        "generation_tokens_total": 7,
        "time_to_first_token_seconds_count": 3,
        "time_to_first_token_seconds_sum": 1.0 + 1.25 + 0.5,
        "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_sum": 0.25 + 0 + 0 + 1.0,
        "e2e_request_latency_seconds_count": 2,
        "e2e_request_latency_seconds_sum": 2.25 + 2.5,
        "time_per_output_token_seconds_count": 2,
        "time_per_output_token_seconds_sum": 1.25 / 3 + 1.25,
        "request_queue_time_seconds_count": 4,
        "request_queue_time_seconds_sum": 0.5 + 1.0 + 0.75 + 0.0,
        "request_prefill_time_seconds_sum": 0.5 + 0.25 + 0.5,
        "request_decode_time_seconds_sum": 1.25 + 1.25,
        "request_prompt_tokens_count": 3,
        "request_generation_tokens_sum": 6,
        "iteration_tokens_total_sum": 12,
        "spec_decode_num_draft_tokens_total": 5,
        "spec_decode_num_accepted_tokens_total": 2,
        "spec_decode_num_verified_items_total": 2,
        "num_requests_preempted": 0,
    }
    assert {name: value(metrics, name) for name in expected} == pytest.approx(expected)
    reasons = ("stop", "length", "abort", "error", "rejected")
    assert [value(metrics, "requests_total", finish_reason=reason) for reason in reasons] == [1, 1, 1, 1, 1]
    assert value(metrics, "prefix_cache_queries_total", tier="device") == 16
    assert value(metrics, "prefix_cache_hits_total", tier="device") == 4
    assert value(metrics, "num_preemptions_total", kind="recompute") == 1
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.0005") == 2  # the gaps within a step
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.3") == 3
    assert value(metrics, "inter_token_latency_seconds_bucket", le="+Inf") == 4


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    metrics = started()
    metrics.events(HAND_LOG)
    assert metrics._running == {}
    assert metrics.preempted == set()
    assert len(metrics._clock._planned_s) <= 2


REPORT = RankCounters(((1, 2), (3, 4)), (("dispatch", 100, 2),), engram_hits=5, engram_misses=1, engram_wait_s=0.25)


def plan_of(step: int, *items: PlanItem) -> StepPlan:
    return StepPlan(step, (RankPlan(items=items),))


def test_steps_prefill_and_drafts_by_position() -> None:
    metrics = started()
    first = plan_of(0, PlanItem(0, 1, 4, 4, 0, True))  # the last 4 of a prompt of 8
    second = plan_of(1, PlanItem(0, 1, 8, 4, 3, True))  # one token and three drafts
    third = plan_of(2, PlanItem(0, 1, 0, 9, 0, False))  # once more after a preemption
    verified = StepCommitted(2.0, 1, 0.25, 4, 2, 1, (1, 1, 1), (1, 0, 0))
    metrics.events([Arrived(1.0, 1, 8), Admitted(1.0, 1, 0, 8, 4, "prefix")])
    metrics.planned(first, 1.0)
    metrics.committed(first, StepResult(0, (RankResult((ItemResult(1, (5,)),)),), 0.25, (("indexer", 0.125),)), 1.5)
    metrics.events([TokensEmitted(1.5, 1, (5,))])
    metrics.planned(second, 1.5)
    metrics.planned(third, 1.5)
    metrics.committed(second, StepResult(1, (RankResult((ItemResult(1, (6, 7)),)),), 0.25, (("indexer", 0.25),)), 2.0)
    metrics.events([TokensEmitted(2.0, 1, (6, 7)), verified])
    metrics.committed(third, StepResult(2, (RankResult(),), 0.5, (), REPORT), 3.0)
    positions = range(3)
    assert [value(metrics, "spec_decode_draft_tokens_per_position_total", position=str(place)) for place in positions] == [1, 1, 1]
    assert [value(metrics, "spec_decode_accepted_tokens_per_position_total", position=str(place)) for place in positions] == [1, 0, 0]
    assert value(metrics, "prefill_tokens_total") == 4
    assert value(metrics, "recomputed_tokens_total") == 9
    assert value(metrics, "step_seconds_count") == 3
    assert value(metrics, "step_seconds_sum") == 0.5 + 0.5 + 1.0  # commit to commit, though the third was planned at 1.5
    assert value(metrics, "step_forward_seconds_sum") == 1.0
    assert value(metrics, "step_component_seconds_total", component="indexer") == 0.375
    metrics.committed(plan_of(3), StepResult(3, (RankResult(),), 0.5, (), REPORT), 4.0)
    assert [value(metrics, "expert_tokens_total", layer="1", expert=str(expert)) for expert in range(2)] == [6, 8]
    assert value(metrics, "collective_sent_bytes_total", kind="dispatch") == 200
    assert value(metrics, "collectives_total", kind="dispatch") == 4
    assert [value(metrics, "engram_fetches_total", outcome=outcome) for outcome in ("ready", "waited")] == [10, 2]
    assert value(metrics, "engram_wait_seconds_total") == 0.5


# -- an engine on the scripted worker -----------------------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.metrics = MetricsLog()

    def planned(self, plan: StepPlan, now_s: float) -> None: ...

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None: ...

    def events(self, events: Sequence[Event]) -> None:
        self.metrics.extend(events)


async def generate(engine: Gateway, prompt: tuple[int, ...], max_tokens: int, n: int = 1, leave_after: int | None = None) -> None:
    generation = Generation(prompt=prompt, params=SamplingParams(max_tokens=max_tokens, ignore_eos=True), n=n, cache_salt="of a client")
    async with engine.generate(generation) as stream:
        count = 0
        async for _ in stream:
            count += 1
            if count == leave_after:
                return


async def load(engine: Gateway, metrics: ServerMetrics | None = None) -> None:
    """Preemptions (the cache holds half of it), forks, hits, clients that leave; with scrapes in between."""
    done = trio.Event()

    async def scrape() -> None:
        while metrics is not None and not done.is_set():
            found = samples(metrics)
            used, evictable, free, capacity = (
                found[f"twinfer_kv_{name}_tokens", (("dp_rank", "0"),)] for name in ("used", "evictable", "free", "capacity")
            )
            assert used + evictable + free == capacity == CACHE.num_blocks * CACHE.block_size
            await trio.sleep(0.002)

    async with trio.open_nursery() as scraping:
        scraping.start_soon(scrape)
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(generate, engine, (*range(9), number), 60, 1 + number % 2, 5 if number % 4 == 3 else None)
        done.set()


async def until_idle(engine: Gateway) -> None:
    while engine.num_requests:
        await trio.sleep(0.002)


async def test_an_engine_under_load_equals_the_logs_own_definitions() -> None:
    metrics, log = ServerMetrics(), Log()
    async with open_engine(engine_config(Script()), worker_module=MODULE, observers=[metrics, log]) as engine:
        metrics.start(engine, INFO)
        await load(engine, metrics)
        await until_idle(engine)
        summary = log.metrics.summary()
        assert summary.num_preemptions > 0
        assert summary.num_finished["abort"] > 0
        requests = log.metrics.requests.values()
        times: dict[str, list[float | None]] = {
            "time_to_first_token": [request.ttft_s for request in requests],
            "inter_token_latency": [*(gap for request in requests for gap in request.itl_s)],
            "e2e_request_latency": [request.e2e_s for request in requests if request.reason in ("stop", "length")],
            "time_per_output_token": [request.tpot_s for request in requests if request.reason in ("stop", "length")],
        }
        for name, gaps in times.items():
            known = [gap for gap in gaps if gap is not None]
            assert value(metrics, f"{name}_seconds_count") == len(known), name
            assert value(metrics, f"{name}_seconds_sum") == pytest.approx(math.fsum(known)), name
        assert value(metrics, "time_to_first_token_seconds_count") == sum(request.num_output_tokens > 0 for request in requests)
        assert value(metrics, "generation_tokens_total") == summary.num_output_tokens
        assert value(metrics, "requests_started_total") == summary.num_arrived
        for reason, count in summary.num_finished.items():
            assert value(metrics, "requests_total", finish_reason=reason) == count
        assert value(metrics, "prefix_cache_queries_total", tier="device") == summary.prefix_query_tokens
        assert value(metrics, "prefix_cache_hits_total", tier="device") == summary.prefix_hit_tokens > 0
        assert sum(value(metrics, "num_preemptions_total", kind=kind) for kind in ("recompute", "swap")) == summary.num_preemptions
        assert value(metrics, "steps_total") == summary.num_steps == value(metrics, "step_seconds_count")
        assert value(metrics, "step_forward_seconds_sum") == pytest.approx(summary.forward_s)
        assert value(metrics, "recomputed_tokens_total") > 0
        assert value(metrics, "num_requests_running", dp_rank="0") == value(metrics, "num_requests_waiting") == 0
        assert value(metrics, "kv_used_tokens", dp_rank="0") == 0
        assert value(metrics, "invariant_violations_total") == 0
        assert metrics._running == {}


async def test_computed_and_cached_tokens_add_up_to_the_prompts() -> None:
    metrics = ServerMetrics()
    async with open_engine(engine_config(Script()), worker_module=MODULE, observers=[metrics]) as engine:
        metrics.start(engine, INFO)
        for _ in range(3):
            await generate(engine, tuple(range(30)), 2)
        assert metrics.counters.prompt_tokens == 90
        assert metrics.counters.prefix_hit_tokens == 2 * 28  # whole blocks of 4
        assert metrics.counters.prefill_tokens == 90 - 56
        assert metrics.counters.recomputed_tokens == 0


async def test_a_warm_up_is_not_counted() -> None:
    metrics = ServerMetrics()
    async with open_engine(engine_config(Script()), worker_module=MODULE, observers=[metrics]) as engine:
        assert metrics.exposition() == b""
        async with engine.generate(Generation(prompt=(1, 2, 3), params=SamplingParams(max_tokens=50))) as stream:
            await stream.__anext__()
            metrics.start(engine, INFO)  # even while one is under way
        await until_idle(engine)
        assert value(metrics, "requests_started_total") == value(metrics, "generation_tokens_total") == 0
        assert sum(metrics.finished.values()) == 0
        await generate(engine, (1, 2, 3), 4)
        assert value(metrics, "generation_tokens_total") == 4


# -- as scrapers see it -------------------------------------------------------------------------------------------------------


def bare_names(metrics: ServerMetrics, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name, _ in samples(metrics) if name.startswith(prefix)}


def filled(compat: Compat = "none") -> ServerMetrics:
    metrics = started(compat=compat)
    metrics.events(HAND_LOG)
    metrics.http_request("/health", 200)
    metrics.component_s["indexer"] = 0.5
    metrics.ranks = REPORT
    return metrics


def test_every_documented_name_is_there_and_no_other() -> None:
    names = bare_names(filled(), "twinfer_")
    assert {name for name in names if not name.endswith("_bucket")} == set(DOCUMENTED.split())
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"} <= bare_names(filled(), "")


def test_gauges_of_the_engine() -> None:
    metrics = filled()
    for rank, running in (("0", 3), ("1", 1)):
        assert value(metrics, "num_requests_running", dp_rank=rank) == running
        kv = {name: value(metrics, f"kv_{name}_tokens", dp_rank=rank) for name in ("used", "evictable", "free", "capacity")}
        assert kv == {"used": 12, "evictable": 8, "free": 20, "capacity": 40}
        assert value(metrics, "kv_host_used_tokens", dp_rank=rank) == 8
    assert value(metrics, "num_requests_waiting") == 5
    assert value(metrics, "actor_mailbox_depth", actor="scheduler") == 7
    assert value(metrics, "actor_heartbeat_age_seconds", actor="worker-0") == 0.25
    assert value(metrics, "prefix_cache_granularity_tokens") == 4
    assert value(metrics, "kv_moved_blocks_total", kind="swap_out") == 2
    assert value(metrics, "grammar_compilation_time_seconds_count") == 4
    assert value(metrics, "grammar_compilation_time_seconds_sum") == 0.5
    assert value(metrics, "num_grammar_failures_total") == 2
    assert value(metrics, "num_grammar_timeout_total") == 1
    assert value(metrics, "engine_ready") == 1
    assert value(metrics, "build_info", version="1.2.3", model="m", layout="tp1dp1ep1", dtype="bfloat16", device="cpu") == 1


@pytest.mark.parametrize("compat", ["vllm", "sglang"])
def test_names_of_other_engines(compat: Compat) -> None:
    plain, both = samples(filled()), samples(filled(compat))
    theirs = {name for name, _ in both if name.startswith(f"{compat}:")}
    assert {f"{compat}:{name}" for name in COMPAT_NAMES[compat].split()} <= theirs
    ours = {key: number for key, number in both.items() if not key[0].startswith(f"{compat}:")}
    assert {key for key in ours if key[0].startswith("twinfer_")} == {key for key in plain if key[0].startswith("twinfer_")}


def test_values_under_the_names_of_vllm() -> None:
    metrics = filled("vllm")
    found = samples(metrics)
    labels = (("engine", "0"), ("model_name", "served"))
    same = {
        "time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
        "inter_token_latency_seconds_count": "inter_token_latency_seconds_count",
        "time_per_output_token_seconds_count": "inter_token_latency_seconds_count",
        "request_time_per_output_token_seconds_sum": "time_per_output_token_seconds_sum",
        "generation_tokens_total": "generation_tokens_total",
        "num_requests_waiting": "num_requests_waiting",
    }
    for theirs, ours in same.items():
        assert found[f"vllm:{theirs}", labels] == found[f"twinfer_{ours}", ()]
    assert found["vllm:kv_cache_usage_perc", labels] == 12 / 40
    assert found["vllm:prefix_cache_hits_total", labels] / found["vllm:prefix_cache_queries_total", labels] == 0.25
    assert found["vllm:request_success_total", (("engine", "0"), ("finished_reason", "stop"), ("model_name", "served"))] == 1
    assert found["vllm:num_requests_running", (("engine", "1"), ("model_name", "served"))] == 1


def test_values_under_the_names_of_sglang() -> None:
    metrics = filled("sglang")
    found = samples(metrics)
    labels = (("model_name", "served"),)
    expected = {"num_running_reqs": 4, "num_queue_reqs": 5, "token_usage": 0.3, "kv_used_tokens": 24, "kv_available_tokens": 40,
                "kv_evictable_tokens": 16, "num_requests_total": 4, "num_aborted_requests_total": 1, "num_retracted_requests_total": 1,
                "spec_accept_length": 2.0, "generation_tokens_total": 7, "queue_time_seconds_sum": 2.25}  # fmt: skip
    assert {name: found[f"sglang:{name}", labels] for name in expected} == expected
    assert found["sglang:cached_tokens_total", (("cache_source", "device"), ("model_name", "served"))] == 4


def test_predictions_are_shown_beside_what_was_measured() -> None:
    metrics = started()
    metrics.events([StepPriced(1.0, 0, 0.25, 0.125, 0.5, False), StepMeasured(1.5, 0, 0.5, 0.25, True)])
    metrics.events([StepPriced(2.0, 1, 0.5, 0.25, 1.0, False), StepMeasured(9.0, 1, 7.0, 0.5, None)])  # slowed by its timers
    assert value(metrics, "step_predicted_seconds_sum") == 0.75
    assert value(metrics, "step_residual_ratio_count") == 1
    assert value(metrics, "step_residual_ratio_sum") == 2.0
    compared = {name: value(metrics, "steps_compared_total", interval=name) for name in ("below", "within", "above")}
    assert compared == {"below": 1, "within": 16, "above": 3}
    assert value(metrics, "step_drift_ratio", component="step") == 1.25
    assert value(metrics, "step_drift_ratio", component="projection") == 0.5
    assert value(metrics, "step_drift_alarm", component="projection") == 1
    assert value(metrics, "step_prediction_correction") == 1.5


async def test_server_info_and_health_tell_of_drift() -> None:
    script = Script(tokens=(7,), components=(), step_s=0.001)
    async with open_server(script, cost=SwiftCost()) as server:
        for _ in range(8):
            await server.client.post("/v1/completions", json={"model": "scripted", "prompt": [5], "max_tokens": 40, "ignore_eos": True})
        found = (await server.client.get("/server_info")).json()["predictions"]
        assert found["num_compared"] == found["num_above"] >= 160
        assert found["coverage"] == 0.0
        assert found["alarm"] == "step"
        health = await server.client.get("/health")
        assert health.status_code == 200  # wrong predictions are no reason to take no requests
        assert "x what was predicted" in health.json()["drift"]


class SwiftCost:
    """A microsecond, whatever the plan."""

    def price(self, plan: StepPlan) -> StepPrice:
        assert plan.ranks
        return StepPrice(1e-6, 0.9e-6, 1.1e-6, {})


def test_no_client_can_make_new_series() -> None:
    metrics = filled()
    for number in range(1000):
        metrics.http_request(f"/{number}", 404)
    found = samples(metrics)
    routes = {dict(labels)["route"] for name, labels in found if name == "twinfer_http_requests_total"}
    assert len(routes) <= 65
    assert sum(number for (name, _), number in found.items() if name == "twinfer_http_requests_total") == 1001


async def test_series_do_not_grow_with_requests() -> None:
    metrics = ServerMetrics()
    async with open_engine(engine_config(Script()), worker_module=MODULE, observers=[metrics]) as engine:
        metrics.start(engine, INFO, "vllm")
        await load(engine)
        before = set(samples(metrics))
        await load(engine)
        assert set(samples(metrics)) == before
        assert not any("client" in label for _, labels in before for _, label in labels)


async def test_metrics_over_http() -> None:
    config = ApiConfig(port=0, metrics_compat="vllm", api_keys=("sk-0123456789abcdef0123456789abcdef",))
    async with open_server(config=config) as server:
        key = {"authorization": f"Bearer {config.api_keys[0]}"}
        body = {"model": "scripted", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
        assert (await server.client.post("/v1/completions", json=body, headers=key)).status_code == 200
        assert (await server.client.get("/no/such/path", headers=key)).status_code == 404
        assert (await server.client.get("/metrics")).status_code == 401
        answer = await server.client.get("/metrics", headers=key)
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'vllm:generation_tokens_total{engine="0",model_name="scripted"} 3.0' in answer.text
        metrics = server.context.metrics
        assert value(metrics, "http_requests_total", route="/v1/completions", status="200") == 1
        assert value(metrics, "http_requests_total", route="/metrics", status="401") == 1
        assert not any("/no/such" in label for _, labels in samples(metrics) for _, label in labels)
        assert value(metrics, "http_open_streams") == 0


def test_broken_books_are_counted_and_scraped_around(caplog: pytest.LogCaptureFixture) -> None:
    engine = StubEngine()
    metrics = started(engine, "sglang")
    engine.broken = True
    assert value(metrics, "invariant_violations_total") == 1
    found = samples(metrics)
    assert found["twinfer_engine_ready", ()] == 0
    assert not any(name == "twinfer_kv_used_tokens" for name, _ in found)
    assert "books" in caplog.text


# -- the steady line ----------------------------------------------------------------------------------------------------------


def test_the_line_says_what_metrics_says() -> None:
    metrics = started()
    stats = StatsLog(metrics)
    before = samples(metrics)
    metrics.events(HAND_LOG)
    after = samples(metrics)
    line = stats.take(10.0)
    assert line is not None

    def gain(name: str, *labels: tuple[str, str]) -> float:
        return after["twinfer_" + name, labels] - before["twinfer_" + name, labels]

    assert line.generation_tokens_per_s == gain("generation_tokens_total") / 10.0
    assert line.prompt_tokens_per_s == gain("prefill_tokens_total") / 10.0
    device = ("tier", "device")
    assert line.prefix_hit_share == gain("prefix_cache_hits_total", device) / gain("prefix_cache_queries_total", device)
    assert line.num_preemptions == gain("num_preemptions_total", ("kind", "recompute")) + gain("num_preemptions_total", ("kind", "swap"))
    assert line.drafts.num_accepted_tokens == gain("spec_decode_num_accepted_tokens_total")
    assert line.num_waiting == after["twinfer_num_requests_waiting", ()]
    ranks = ("0", "1")
    assert line.num_running == sum(after["twinfer_num_requests_running", (("dp_rank", rank),)] for rank in ranks)
    used, capacity = (sum(after[f"twinfer_kv_{name}_tokens", (("dp_rank", rank),)] for rank in ranks) for name in ("used", "capacity"))
    assert line.kv_used_share == used / capacity
    assert str(line) == (
        "running 4, waiting 5, prompt 0.0 tok/s, gen 0.7 tok/s, KV used 30.0%, prefix hits 25%, preemptions 1, "
        "2.00 tokens a verification, drafts accepted 50%/50%/0% by position, steps 1.25 x predicted"
    )


def idle_engine() -> StubEngine:
    engine = StubEngine()
    core = msgspec.structs.replace(engine._stats.core, num_running=0, num_waiting=0)
    engine._stats = msgspec.structs.replace(engine._stats, core=core)
    return engine


async def test_it_is_silent_while_idle(caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    caplog.set_level("INFO", "twinfer.stats")
    metrics = started(idle_engine())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log_stats, metrics)
        await trio.sleep(35)
        assert caplog.records == []
        metrics.events(HAND_LOG)
        await trio.sleep(30)
        assert [record.name for record in caplog.records] == ["twinfer.stats"]  # one line, for the interval with the requests
        fields = cast(Any, caplog.records[0]).fields
        assert fields["generation_tokens_per_s"] == pytest.approx(0.7)
        nursery.cancel_scope.cancel()


def test_prompts_that_never_hit_get_one_hint() -> None:
    def misses(metrics: ServerMetrics) -> None:
        metrics.events([Arrived(1.0, 1, 20_000), Admitted(1.0, 1, 0, 20_000, 0, "cold"), Finished(2.0, 1, "abort", 20_000, 0)])

    metrics = started()
    stats = StatsLog(metrics)
    assert stats.hint() is None
    misses(metrics)
    hint = stats.hint()
    assert hint is not None
    assert "block of 4 tokens" in hint
    assert stats.hint() is None
    hits = started()
    hits.events(HAND_LOG)
    misses(hits)
    assert StatsLog(hits).hint() is None
    without_cache = started(prefix_caching=False)
    misses(without_cache)
    assert StatsLog(without_cache).hint() is None
    assert value(without_cache, "prefix_cache_queries_total", tier="device") == 0
