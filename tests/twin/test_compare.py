"""Comparing two logs: numbers that can be worked out by hand, and a closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.events import Arrived, Event, Finished, Rejected, TokensEmitted
from twin import compare
from twin.ledger import Quantity


def log(scale: float = 1.0, first_id: int = 0) -> list[Event]:
    """Three requests of 1, 2 and 3 tokens; times of the third by hand: arrives at 1, tokens at 3, 4 and 8."""
    rows = [(0.0, [1.0]), (0.5, [1.0, 2.0]), (1.0, [3.0, 4.0, 8.0])]
    events: list[tuple[float, int, Event]] = []
    for number, (arrived_s, tokens_s) in enumerate(rows):
        request = first_id + number
        events.append((arrived_s, 0, Arrived(arrived_s * scale, request, 5)))
        events += [(now_s, 1, TokensEmitted(now_s * scale, request, (1,))) for now_s in tokens_s]
        events.append((tokens_s[-1], 2, Finished(tokens_s[-1] * scale, request, "length", 5, len(tokens_s))))
    ordered = sorted(events, key=lambda entry: entry[:2])
    return [event for _, _, event in ordered] + [Rejected(9.0, first_id + 3, "queue_full", "")]


def test_an_outcome_is_what_the_log_says() -> None:
    found = compare.outcome(log(first_id=40), {40: 0, 41: 1, 42: 2})
    assert found.times[2] == compare.Times(ttft_s=2.0, tpot_s=2.5, itl_s=2.5, e2e_s=7.0)
    assert found.times[0] == compare.Times(ttft_s=1.0, tpot_s=None, itl_s=None, e2e_s=1.0)
    assert (found.num_requests, found.num_finished, found.num_rejected, found.duration_s) == (4, 3, 1, 8.0)
    assert found.quantities["ttft_p50_s"] == 1.0
    assert found.quantities["ttft_mean_s"] == pytest.approx(3.5 / 3)
    assert found.quantities["output_tokens_per_s"] == 6 / 8
    assert found.quantities["served_requests_per_s"] == 3 / 8


@given(scale=st.floats(0.2, 5.0))
def test_a_slower_twin_is_wrong_by_as_much_everywhere(scale: float) -> None:
    measured, predicted = compare.outcome(log()), compare.outcome(log(scale))
    for found in compare.request_errors(predicted.times, measured.times).values():
        assert found["bias"] == pytest.approx(scale - 1.0)
        assert found["median"] == pytest.approx(abs(scale - 1.0))
        assert found["p90"] == pytest.approx(abs(scale - 1.0))
    quantities = compare.quantity_errors(compare.interval(predicted, predicted, predicted), measured.quantities)
    for name, one in quantities.items():
        assert one["error"] == pytest.approx((1 / scale if name.endswith("per_s") else scale) - 1.0)


def test_the_interval_spans_all_three_and_holds_the_middle() -> None:
    middle, low, high = (compare.outcome(log(scale)) for scale in (1.0, 0.8, 1.5))
    found = compare.interval(middle, low, high)
    assert found["ttft_p50_s"] == Quantity(1.0, 0.8, 1.5)
    assert found["output_tokens_per_s"].low == pytest.approx(0.5)
    assert found["output_tokens_per_s"].high == pytest.approx(6 / 8 / 0.8)
    inside = compare.quantity_errors(found, compare.outcome(log(1.4)).quantities)
    outside = compare.quantity_errors(found, compare.outcome(log(1.6)).quantities)
    assert all(one["inside"] for one in inside.values())
    assert not any(one["inside"] for one in outside.values())


def test_step_errors_by_hand() -> None:
    measured = np.array([1.0, 2.0, 4.0, 5.0])
    predicted = np.array([1.1, 1.0, 4.0, 6.0])
    found = compare.step_errors(predicted, predicted * 0.95, predicted * 1.05, measured)
    assert found["coverage"] == 0.25
    assert found["total"] == pytest.approx(12.1 / 12.0 - 1.0)
    assert found["median"] == pytest.approx((0.1 + 0.2) / 2)
    assert compare.step_errors(*(np.array([]),) * 4)["coverage"] is None


def test_bands_meet_without_a_gap() -> None:
    shares = (0.0, 0.5, 0.500001, 0.8, 0.81, 1.0, 1.01, float("inf"))
    names = [compare.band(share) for share in shares]
    assert names == ["up to 50 %"] * 2 + ["50 to 80 %"] * 2 + ["80 to 100 %"] * 2 + ["saturated"] * 2
    assert compare.band(None) == compare.UNKNOWN_BAND
