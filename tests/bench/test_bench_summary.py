"""The figures against cases computed by hand, and the laws they keep whatever the stream."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bench.endpoints import Piece
from engine.bench.record import RequestRecord, TokenCounter
from engine.bench.runner import Run
from engine.bench.summary import ServeSummary, make_windows, summarise, token_times_s
from engine.core.events import FinishReason
from engine.core.metrics import RequestMetrics, Slo


def record(index: int, sent_s: float, events: list[tuple[float, int]], end_s: float | None = None, *, reason: FinishReason = "stop",
           **values: Any) -> RequestRecord:  # fmt: skip
    """A request with ``events`` (time, tokens), each with a running count."""
    metrics = RequestMetrics(request=index, arrived_s=sent_s, num_prompt_tokens=0)
    counter = TokenCounter(metrics)
    total = 0
    for time_s, tokens in events:
        total += tokens
        counter.add(Piece(has_output=True, completion_tokens=total, prompt_tokens=10, cached_tokens=4), time_s)
    if end_s is not None and reason in ("stop", "length"):
        counter.add(Piece(finish=reason, completion_tokens=total), end_s)
    source = counter.close(end_s if end_s is not None else sent_s, reason)
    defaults: dict[str, Any] = {"asked_input_tokens": 10, "asked_output_tokens": None, "scheduled_s": None, "prompt_digest": bytes([index])}
    return RequestRecord(metrics=metrics, count_source=source, **defaults | values)


def summary(*records: RequestRecord, slo: Slo | None = None, cpu_s: float = 0.1) -> ServeSummary:
    return summarise(Run(list(records), 0.0, 10.0, cpu_s), slo)


def test_figures_computed_by_hand() -> None:
    # 4 tokens: at 2, then two together at 3, one at 5; the finish reason comes at 5.
    first = record(0, 1.0, [(2.0, 1), (3.0, 2), (5.0, 1)], 5.0)
    second = record(1, 2.0, [(2.5, 1), (3.0, 1)], 3.0, reason="length")
    result = summary(first, second, slo=Slo(ttft_s=0.6))
    assert first.metrics.itl_s == [1.0, 0.0, 2.0]
    assert result.ttft_s.mean == pytest.approx(0.75)
    assert result.ttst_s.mean == pytest.approx(0.75)
    assert result.e2e_s.mean == pytest.approx(2.5)
    assert result.tpot_s.max == pytest.approx(1.0)  # (4 - 1) / 3; the other is (1 - 0.5) / 1
    assert result.itl_s.mean == pytest.approx((1 + 0 + 2 + 0.5) / 4)
    assert result.duration_s == 4.0
    assert result.output_tokens == 6
    assert result.output_tokens_per_s == 1.5
    # Windows of 1 s from the first request on: 2, 2.5 | 3, 3, 3 | - | 5.
    assert [window.output_tokens_per_s for window in result.windows] == [0.0, 2.0, 3.0, 1.0]
    assert result.peak_output_tokens_per_s == 3.0
    assert result.requests_per_s == 0.5
    assert result.goodput == 0.25
    assert result.goodput_share == 0.5
    assert result.prompt_tokens == 20
    assert result.cached_tokens == 8
    assert result.prompt_tokens_per_s == 5.0
    assert result.output_tokens_per_s_per_user.max == pytest.approx(2.0)
    assert result.prefill_tokens_per_s_per_user.max == pytest.approx(20.0)
    assert result.concurrency == {"mean": 5 / 4, "peak": 2.0}
    assert [window.concurrency for window in result.windows] == [1.0, 2.0, 1.0, 1.0]
    assert result.warnings == []


def test_what_failed_is_in_the_headline_and_in_no_latency_of_ended_requests() -> None:
    result = summary(
        record(0, 0.0, [(1.0, 1), (2.0, 1)], 2.0),
        record(1, 0.0, [(1.0, 1)], 3.0, reason="error", error="timeout", message="late"),
        record(2, 0.0, [], 0.5, reason="error", error="http_503", message="away"),
        record(3, 0.0, [(1.0, 1)], 1.5, reason="abort", cancelled=True),
        slo=Slo(ttft_s=10.0),
    )
    assert (result.requests, result.finished, result.failed, result.timed_out, result.cancelled) == (4, 1, 2, 1, 1)
    assert result.errors == {"http_503": 1, "timeout": 1}
    assert result.error_examples == ["timeout: late", "http_503: away"]
    assert result.ttft_s.count == 3  # count(TTFT) is the number of requests with a token
    assert result.e2e_s.count == 1
    assert result.output_tokens == 4
    assert result.goodput_share == pytest.approx(1 / 3)  # who leaves by himself is not the server's failure
    assert any("2 of 4 requests failed (http_503 1, timeout 1)" in text for text in result.warnings)


def test_nothing_at_all() -> None:
    result = summary()
    assert result.duration_s is result.goodput is result.peak_output_tokens_per_s is None
    assert result.concurrency == {"mean": None, "peak": 0.0}


def test_warnings_say_when_the_figures_are_the_clients_own() -> None:
    late = [record(index, 1.0 + index, [(2.0 + index, 1)], 2.0 + index, scheduled_s=0.5 + index) for index in range(3)]
    assert any("could not keep its schedule" in text for text in summary(*late).warnings)
    assert any("cap" in text for text in summarise(Run(late, 0.0, 10.0, 0.1), None, is_capped_open_loop=True).warnings)
    on_time = record(0, 1.0, [(2.0, 1)], 2.0, scheduled_s=0.999)
    assert summary(on_time).warnings == []
    assert any("97% of a processor" in text for text in summary(on_time, cpu_s=9.7).warnings)
    assert any("ended before" in text for text in summary(record(0, 1.0, [(2.0, 1)], 2.0, asked_output_tokens=9)).warnings)
    assert any("another length" in text for text in summary(record(0, 1.0, [(2.0, 1)], 2.0, asked_input_tokens=500)).warnings)


# Seconds as a clock tells them: whole microseconds.
SECONDS = st.integers(0, 5_000_000).map(lambda count: count / 1e6)
GAPS = st.lists(st.tuples(SECONDS, st.integers(0, 6)), max_size=12)
REQUESTS = st.lists(st.tuples(SECONDS, GAPS, st.sampled_from(["stop", "length", "error", "abort"])), max_size=6)


def built(requests: list[tuple[float, list[tuple[float, int]], FinishReason]]) -> list[RequestRecord]:
    records = []
    for index, (sent_s, gaps, reason) in enumerate(requests):
        now_s, events = sent_s, []
        for gap_s, tokens in gaps:
            now_s += gap_s
            events.append((now_s, tokens))
        records.append(record(index, sent_s, events, now_s, reason=reason, error="cut" if reason == "error" else None))
    return records


@settings(max_examples=150, deadline=None)
@given(REQUESTS)
def test_laws_of_any_run(requests: list[tuple[float, list[tuple[float, int]], FinishReason]]) -> None:
    records = built(requests)
    for entry in records:
        metrics = entry.metrics
        assert len(metrics.itl_s) == max(metrics.num_output_tokens - 1, 0)
        if metrics.first_token_s is not None and metrics.last_token_s is not None:
            assert math.fsum(metrics.itl_s) == pytest.approx(metrics.last_token_s - metrics.first_token_s, abs=1e-9)
            assert metrics.first_token_s >= metrics.arrived_s
        assert len(list(token_times_s(entry))) == metrics.num_output_tokens
    result = summary(*records)
    assert result.finished + result.failed + sum(entry.metrics.reason == "abort" for entry in records) == result.requests
    assert result.ttft_s.count == sum(entry.metrics.num_output_tokens > 0 for entry in records)
    if result.duration_s:
        windows = make_windows(records, result.duration_s)
        width_s = result.duration_s / len(windows)
        assert sum(window.output_tokens_per_s * width_s for window in windows) == pytest.approx(result.output_tokens)
        assert math.fsum(window.concurrency for window in windows) / len(windows) == pytest.approx(result.concurrency["mean"], abs=1e-6)
        assert result.peak_output_tokens_per_s is not None
        assert result.output_tokens_per_s is not None
        assert result.peak_output_tokens_per_s >= result.output_tokens_per_s * (1 - 1e-9)
        assert (result.concurrency["peak"] or 0) >= (result.concurrency["mean"] or 0) - 1e-9


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0, 3), min_size=1, max_size=15), st.integers(1, 40))
def test_without_running_counts_the_total_is_spread_and_the_span_kept(gaps_s: list[float], total: int) -> None:
    metrics = RequestMetrics(request=0, arrived_s=0.0, num_prompt_tokens=0)
    counter = TokenCounter(metrics)
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        counter.add(Piece(has_output=True), now_s)
    counter.add(Piece(finish="stop"), now_s)
    counter.add(Piece(completion_tokens=total, prompt_tokens=3), now_s + 1)
    assert counter.close(now_s + 2, "stop") == "usage"
    assert metrics.num_output_tokens == total
    assert len(metrics.itl_s) == total - 1
    assert metrics.first_token_s == gaps_s[0]
    assert metrics.finished_s == now_s  # not the usage chunk's time
    if total >= len(gaps_s):
        assert math.fsum(metrics.itl_s) == pytest.approx(math.fsum(gaps_s[1:]))
