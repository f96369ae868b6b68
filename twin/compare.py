"""The engine's run of a workload beside the twin's, both from their event logs: pure functions.

TTFT, TPOT, ITL and E2E are judged apart, and by how loaded the engine was; no single number lets them cancel. Beside every error stands
what two runs of the same differ by, which no prediction can be better than.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from engine.core.events import Event
from engine.core.metrics import MetricsLog, RequestMetrics, percentile
from engine.core.plan import RequestId
from twin.ledger import Quantity

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90")
BANDS = ((0.0, 0.5, "up to 50 %"), (0.5, 0.8, "50 to 80 %"), (0.8, 1.0, "80 to 100 %"), (1.0, float("inf"), "saturated"))
UNKNOWN_BAND = "saturation unknown"
TARGET_SHARE = 0.8  # of saturation: up to here latencies are held to their target


class Times(msgspec.Struct, frozen=True):
    """One request by its number in the workload. None where it has none."""

    ttft_s: float | None
    tpot_s: float | None
    itl_s: float | None  # mean gap
    e2e_s: float | None


class Outcome(msgspec.Struct, frozen=True):
    """A run, real or simulated: what its log says of it, in one clock."""

    times: dict[int, Times]
    quantities: dict[str, float]
    num_requests: int
    num_finished: int
    num_rejected: int
    num_preemptions: int
    duration_s: float


def outcome(events: Iterable[Event], number_of: Mapping[RequestId, int] | None = None) -> Outcome:
    """``number_of`` gives the workload's number of each request; None: they have it already."""
    log = MetricsLog()
    log.extend(events)
    summary = log.summary()
    quantities: dict[str, float] = {}
    for name in LATENCIES:
        for statistic in STATISTICS:
            value = getattr(getattr(summary, name), statistic)
            if value is not None:
                quantities[f"{name.removesuffix('_s')}_{statistic}_s"] = value
    num_finished = summary.num_finished["stop"] + summary.num_finished["length"]
    if summary.duration_s:
        quantities["served_requests_per_s"] = num_finished / summary.duration_s
    if summary.output_tokens_per_s is not None:
        quantities["output_tokens_per_s"] = summary.output_tokens_per_s
    times = {one.request if number_of is None else number_of[one.request]: _times(one) for one in log.requests.values()}
    return Outcome(
        times,
        quantities,
        len(log.requests) + log.num_rejected,
        num_finished,
        log.num_rejected,
        log.num_preemptions,
        summary.duration_s or 0.0,
    )


def _times(request: RequestMetrics) -> Times:
    itl_s = statistics.fmean(request.itl_s) if request.itl_s else None
    return Times(request.ttft_s, request.tpot_s, itl_s, request.e2e_s)


def interval(middle: Outcome, low: Outcome, high: Outcome) -> dict[str, Quantity]:
    """What is predicted of a run: with the expected step times, and with all steps at the lower and at the upper end of their intervals,
    as if all erred alike."""
    found = {}
    for name, value in middle.quantities.items():
        others = [one.quantities[name] for one in (low, high) if name in one.quantities]
        found[name] = Quantity(value, min([value, *others]), max([value, *others]))
    return found


def errors(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float | int | None]:
    """Of pairs: ``median`` and ``p90`` of |predicted / measured - 1|, and ``bias``, the median of it with its sign."""
    found = [one / other - 1.0 for one, other in zip(predicted, measured, strict=True) if other > 0]
    if not found:
        return {"count": 0, "median": None, "p90": None, "bias": None}
    ordered = sorted(map(abs, found))
    return {"count": len(found), "median": percentile(ordered, 0.5), "p90": percentile(ordered, 0.9), "bias": statistics.median(found)}


def request_errors(predicted: Mapping[int, Times], measured: Mapping[int, Times]) -> dict[str, dict[str, float | int | None]]:
    """Request by request, those that both have."""
    found = {}
    for name in LATENCIES:
        pairs = [
            (getattr(predicted[number], name), getattr(one, name))
            for number, one in measured.items()
            if number in predicted and getattr(one, name) is not None and getattr(predicted[number], name) is not None
        ]
        found[name] = errors([one for one, _ in pairs], [other for _, other in pairs])
    return found


def quantity_errors(predicted: Mapping[str, Quantity], measured: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Of a run's statistics."""
    return {
        name: {
            "predicted": predicted[name].value,
            "lo": predicted[name].low,
            "hi": predicted[name].high,
            "measured": value,
            "error": predicted[name].value / value - 1.0 if value > 0 else None,
            "inside": predicted[name].low <= value <= predicted[name].high,
        }
        for name, value in measured.items()
        if name in predicted
    }


def step_errors(predicted_s: np.ndarray, low_s: np.ndarray, high_s: np.ndarray, measured_s: np.ndarray) -> dict[str, Any]:
    """Step by step, each priced on the plan that the engine ran; ``total`` is of the sum of all, where single steps' noise averages out."""
    if not len(measured_s):
        return {**errors([], []), "total": None, "coverage": None}
    inside = (low_s <= measured_s) & (measured_s <= high_s)
    found = errors(predicted_s.tolist(), measured_s.tolist())
    return {**found, "total": float(predicted_s.sum() / measured_s.sum() - 1.0), "coverage": float(inside.mean())}


def band(share: float | None) -> str:
    """Of an offered load, as a share of what saturates the engine."""
    if share is None:
        return UNKNOWN_BAND
    return next(name for low, high, name in BANDS if low < share <= high or (low == 0.0 and share <= high))


def by_band(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians over the runs of each band. A run has ``band``, ``requests`` (``request_errors``) and ``quantities`` (``quantity_errors``);
    the same two in ``at_speed``, as predicted for the speed that the machine had, and in ``repetition``, of its second run, or None."""
    found: dict[str, dict[str, Any]] = {}
    for name in [*(name for _, _, name in BANDS), UNKNOWN_BAND]:
        mine = [run for run in runs if run["band"] == name]
        if mine:
            found[name] = _band(mine)
    return found


def _band(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    again = [run["repetition"] for run in runs if run["repetition"] is not None]
    at_speed = [run["at_speed"] for run in runs]
    table: dict[str, Any] = {"runs": len(runs)}
    for name in LATENCIES:
        key = f"{name.removesuffix('_s')}_p50_s"
        table[name] = {
            "median_request_error": _median(run["requests"][name]["median"] for run in runs),
            "p90_request_error": _median(run["requests"][name]["p90"] for run in runs),
            "request_repeatability": _median(one["requests"][name]["median"] for one in again),
            "error_of_median": _median(_absolute(run["quantities"], key) for run in runs),
            "error_of_median_at_speed": _median(_absolute(one["quantities"], key) for one in at_speed),
            "repeatability_of_median": _median(_absolute(one["quantities"], key) for one in again),
        }
    for key in ("output_tokens_per_s", "served_requests_per_s"):
        table[key] = {
            "error": _median(_absolute(run["quantities"], key) for run in runs),
            "error_at_speed": _median(_absolute(one["quantities"], key) for one in at_speed),
            "repeatability": _median(_absolute(one["quantities"], key) for one in again),
        }
    table["steps"] = {name: _median(run["steps"][name] for run in runs) for name in ("median", "p90", "total", "coverage")}
    judged = [one["inside"] for run in runs for one in run["quantities"].values()]
    table["coverage"] = sum(judged) / len(judged) if judged else None
    return table


def _absolute(quantities: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    error = quantities[key]["error"] if key in quantities else None
    return None if error is None else abs(error)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
