"""Each metric on a log written by hand, and its laws on logs of real runs."""

from __future__ import annotations

import random

import pytest

from engine.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Preempted,
    Rejected,
    Resumed,
    StepCommitted,
    TokensEmitted,
    decode_lines,
    encode_lines,
)
from engine.core.metrics import MetricsLog, Slo, distribution
from engine.core.plan import TokenLogprobs
from tests.core.core_harness import Replica
from tests.core.test_scheduler_fuzz import random_config, random_request

LOG: list[Event] = [
    Arrived(1.0, 7, 10),
    Rejected(1.1, 8, "queue_full", "no room"),
    Admitted(1.5, 7, 0, 10, 4, "prefix"),
    TokensEmitted(2.0, 7, (5,), (TokenLogprobs(-0.5, (5, 6), (-0.5, -1.0)),)),
    Preempted(2.5, 7, 0, "recompute", 11),
    Resumed(3.0, 7, 0, "recompute", 8),
    TokensEmitted(4.0, 7, (6, 7, 8)),
    StepCommitted(4.0, 0, 0.25, 14, 3, 1, (1, 1, 1), (1, 1, 0)),
    TokensEmitted(5.0, 7, (9,)),
    Finished(5.0, 7, "length", 10, 5, 4),
    Arrived(2.0, 9, 3, 7),
    Admitted(2.0, 9, 0, 3, 2, "fork"),
    Finished(3.0, 9, "abort", 3, 0, 2),
]


def test_by_hand() -> None:
    metrics = MetricsLog()
    metrics.extend(LOG)
    request = metrics.requests[7]
    assert request.ttft_s == 1.0  # once, whatever the preemption did
    assert request.itl_s == [2.0, 0.0, 0.0, 1.0]
    assert request.e2e_s == 4.0
    assert request.tpot_s == (4.0 - 1.0) / 4
    assert metrics.drafts.acceptance_length == 3.0
    assert metrics.drafts.acceptance_by_position == [1.0, 1.0, 0.0]
    assert metrics.prefix_hit_rate == 0.4
    summary = metrics.summary(Slo(ttft_s=1.0))
    assert (summary.num_arrived, summary.num_rejected, summary.num_preemptions) == (2, 1, 1)
    assert summary.num_finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    assert summary.goodput_per_s == 1 / 4
    assert metrics.num_good(Slo(ttft_s=0.9)) == 0
    assert metrics.num_good(Slo(itl_s_max=1.9)) == 0
    assert summary.ttft_s.count == summary.e2e_s.count == 1
    assert summary.output_tokens_per_s == 5 / 4


def test_percentiles() -> None:
    found = distribution([3.0, None, 1.0, 2.0, 4.0])
    assert (found.count, found.mean, found.p50, found.max) == (4, 2.5, 2.5, 4.0)
    assert found.p90 == pytest.approx(3.7)
    assert distribution([None]).mean is None


def test_json_lines_round_trip() -> None:
    assert list(decode_lines(encode_lines(LOG))) == LOG
    assert encode_lines(LOG).count(b"\n") == len(LOG)


@pytest.mark.parametrize("kind", ["state", "drafts", "swap"])
def test_laws_on_real_logs(kind: str) -> None:
    rng = random.Random(kind)
    replica = Replica(random_config(rng, kind))
    for number in range(30):
        replica.submit(random_request(rng, 4 * number, replica.config.context_tokens))
    for _ in range(10):
        replica.plan()
        replica.commit(2)
    replica.abort(min(replica.scheduler.sequences))
    replica.drain(accept=2)
    metrics = MetricsLog()
    metrics.extend(replica.log)
    with_tokens = [request for request in metrics.requests.values() if request.num_output_tokens]
    summary = metrics.summary()
    assert summary.ttft_s.count == len(with_tokens)
    assert summary.num_unfinished == 0
    assert sum(summary.num_finished.values()) == len(replica.requests)
    for request in with_tokens:
        assert len(request.itl_s) == request.num_output_tokens - 1
        assert sum(request.itl_s) == pytest.approx((request.last_token_s or 0.0) - (request.first_token_s or 0.0))
    stats = replica.scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (metrics.prefix_query_tokens, metrics.prefix_hit_tokens)
    assert stats.preemptions_total == metrics.num_preemptions
    assert stats.output_tokens_total == summary.num_output_tokens
    assert stats.steps_total == metrics.num_steps
    if kind == "drafts":
        drafts = metrics.drafts
        assert drafts.num_verified_items == drafts.drafts_by_position[0]
        for counts in (drafts.drafts_by_position, drafts.accepted_by_position):
            assert counts == sorted(counts, reverse=True)
        assert 1.0 < (metrics.drafts.acceptance_length or 0.0) <= 1 + replica.config.draft_tokens
