"""The report of simulations: figures of known tables, a page that needs nothing, and what is folded for it while they run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dashboards import simulation_figures as figures
from dashboards.simulation_report import MAX_DETAILED_POINTS, simulation_report
from tests.dashboards.test_serve_report import EVIL, Page
from twin.observation import MAX_WINDOWS, Windows


def distribution(value_s: float | None) -> dict[str, Any]:
    return {"count": 0 if value_s is None else 4, **dict.fromkeys(("mean", "p50", "p90", "p99", "max"), value_s)}


def point(rate: float | None = 4.0, layout: str = "tp1dp1ep1", **values: Any) -> dict[str, Any]:
    fields = {
        "name": f"{layout}, {rate} req/s", "layout": layout, "num_gpus": 1, "request_rate": rate, "concurrency": None, "requests": 4,
        "finished": 4, "rejected": 0, "cancelled": 0, "sim_s": 2.0, "wall_s": 0.1, "output_tokens_per_s": 8.0,
        "output_tokens_per_s_per_gpu": 8.0, "goodput": 1.5, "goodput_share": 0.75, "prefix_hit_rate": 0.25, "kv_peak": 0.5,
        "preemptions": 1, "gpu_s": 2.0, "extrapolated_share": 0.0,
        **{key: distribution(0.1) for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        "components": {"projection": {"seconds": 0.003, "provenance": "scaled"}, "host_gap": {"seconds": 0.001, "provenance": "measured"}},
    }  # fmt: skip
    return fields | values


def detail(**values: Any) -> dict[str, Any]:
    fields = {
        "quantiles": {key: [0.1, 0.2, 0.3] for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        "windows": [{"time_s": at_s, "output_tokens_per_s": 3.0, "running": 1.5, "waiting": 0.5, "kv_used": 0.4} for at_s in (0.5, 1.5)],
        "timeline": [{"index": 0, "sent_s": 0.0, "first_token_s": 0.1, "ended_s": 0.4, "outcome": "length"}],
    }
    return fields | values


def facts(**values: Any) -> dict[str, Any]:
    return {"model": "m", "date": "2026-01-02T00:00:00+00:00", "seed": 0, "slo": {"ttft_s": 0.2}, "cost": {"source": "given"}} | values


def test_a_page_needs_no_network_and_every_chart_has_its_data() -> None:
    page = Page(simulation_report(facts(), [point(2.0), point(4.0)], [detail(), detail()]))
    assert page.links == []
    assert "default-src 'none'" in page.policy
    assert sum(kind is None for kind, _ in page.scripts) == 2
    data = [json.loads(content) for kind, content in page.scripts if kind == "application/json"]
    assert len(data) == page.tags["figure"] == page.tags["figcaption"] == page.tags["details"] == 5 + 2 * 9
    assert all(figure["data"] for figure in data)


def test_captions_say_what_was_found() -> None:
    slow = point(8.0, ttft_s=distribution(0.5), goodput=0.5, goodput_share=0.25, rejected=2, finished=2, extrapolated_share=0.5)
    text = simulation_report(facts(), [point(4.0), slow], [detail(), detail()])
    assert "TTFT over the request rate, 99th percentile: 1 of 2 points keep 200 ms" in text
    assert "Goodput over the request rate: most at tp1dp1ep1, 4.0 req/s, 1.5 req/s" in text
    assert "2 of 4 requests were refused" in text
    assert "50.0% of the steps lie outside" in text
    assert "projection takes 75% of it" in text
    assert "the limit of 200 ms is missed by the 99th percentile" in text


def test_strange_text_stays_text() -> None:
    text = simulation_report(facts(model=EVIL, note=EVIL), [point(name=EVIL)], [detail()])
    assert Page(text).tags.get("img") is None
    assert EVIL not in text


def test_a_simulation_of_nothing_is_drawn_too() -> None:
    absent = dict.fromkeys(("output_tokens_per_s", "output_tokens_per_s_per_gpu", "goodput", "goodput_share", "prefix_hit_rate"))
    latencies = {key: distribution(None) for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s")}
    nothing = {**point(None, components={}), **absent, **latencies}
    empty = detail(quantiles={key: [] for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s")}, windows=[], timeline=[])
    assert "TTFT: no request has one" in simulation_report(facts(slo=None), [nothing, nothing], [empty, empty])


def test_of_many_points_the_first_are_drawn_one_by_one() -> None:
    count = MAX_DETAILED_POINTS + 3
    page = Page(simulation_report(facts(), [point(1.0 + rate) for rate in range(count)], [detail()] * count))
    assert page.tags["figure"] == 5 + 9 * MAX_DETAILED_POINTS


def test_a_line_for_each_layout_in_the_order_of_the_load() -> None:
    points = [point(rate, layout, ttft_s=distribution(rate / 10)) for layout in ("a", "b") for rate in (8.0, 2.0)]
    figure = figures.over_load(points, "request_rate", "ttft_s.p99", "ms", 1e3, 0.5)
    assert [line.name for line in figure.data] == ["a", "b"]
    assert [list(line.x) for line in figure.data] == [[2.0, 8.0]] * 2
    assert list(figure.data[0].y) == [200.0, 800.0]
    assert figure.layout.shapes[0].y0 == 500.0


def test_components_are_stacked_to_the_step() -> None:
    points = [point(name="x"), point(name="y", components={"host_gap": {"seconds": 0.002, "provenance": "measured"}})]
    figure = figures.components(points)
    sums = [sum(bar.y[index] for bar in figure.data) for index in range(2)]
    assert sums == pytest.approx([4.0, 2.0])


def test_windows_hold_amounts_and_levels_whatever_their_number() -> None:
    """Against a sum over everything: what was added, and the integral of the level."""
    draw = random.Random(0)
    windows, now_s, level = Windows(("running",)), 0.0, 0.0
    total, integral = 0, 0.0
    for _ in range(5000):
        gap_s = draw.expovariate(50.0)
        integral += level * gap_s
        now_s += gap_s
        level = draw.randrange(5)
        windows.hold(now_s, "running", level)
        windows.add(now_s, 2)
        total += 2
    end_s = now_s + 1.0
    integral += level * 1.0
    rows = windows.rows(end_s)
    width_s = windows.width_s
    lengths_s = [min(width_s, end_s - index * width_s) for index in range(len(rows))]
    assert len(rows) <= MAX_WINDOWS
    assert sum(row["amount_per_s"] * length_s for row, length_s in zip(rows, lengths_s, strict=True)) == pytest.approx(total)
    assert sum(row["running"] * length_s for row, length_s in zip(rows, lengths_s, strict=True)) == pytest.approx(integral)
    assert sum(lengths_s) == pytest.approx(end_s)
