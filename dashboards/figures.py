"""Figures of a load run: pure functions from saved tables to plotly figures. A row is a request as ``bench serve`` writes it.

Colours are the eight of Okabe and Ito, told apart by the colour-blind; every series differs by its dash or marker too. Backgrounds are
transparent: the page decides between light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

Row = Mapping[str, Any]

BLUE, ORANGE, GREEN, PURPLE, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
# What a browser draws without a pause; more requests are thinned, and the captions say so.
MAX_CURVE_POINTS = 1000
MAX_TIMELINE_REQUESTS = 400
OUTCOMES = {"finished": (GREEN, "circle"), "cancelled": (PURPLE, "diamond"), "failed": (RED, "x")}
LATENCIES = (("ttft_s", "TTFT", "ttft_s"), ("tpot_s", "TPOT", "tpot_s"), ("itl_s", "ITL", "itl_s_max"), ("e2e_s", "E2E", "e2e_s"))


def values_ms(requests: Sequence[Row], key: str) -> list[float]:
    """Every value of a latency in milliseconds, ascending; gaps of all requests together. As in the summary: TPOT and E2E of the requests
    that ended by themselves, TTFT and ITL of all."""
    if key == "itl_s":
        return sorted(gap * 1e3 for row in requests for gap in row["itl_s"])
    rows = requests if key == "ttft_s" else [row for row in requests if outcome(row) == "finished"]
    return sorted(row[key] * 1e3 for row in rows if row[key] is not None)


def outcome(row: Row) -> str:
    return "finished" if row["outcome"] in ("stop", "length") else "cancelled" if row["outcome"] == "cancelled" else "failed"


def cdf(requests: Sequence[Row], key: str, label: str, limit_s: float | None) -> go.Figure:
    """The share of values at or below each value, with the limit where there is one."""
    ordered = values_ms(requests, key)
    figure = new_figure(f"{label} (ms)", "share at or below")
    if ordered:
        places = sorted({round(place * (len(ordered) - 1) / (MAX_CURVE_POINTS - 1)) for place in range(MAX_CURVE_POINTS)})
        figure.add_scatter(
            x=[ordered[place] for place in places],
            y=[(place + 1) / len(ordered) for place in places],
            mode="lines" if len(places) > 1 else "markers",
            line={"color": BLUE, "shape": "hv"},
            name=f"{label}, n = {len(ordered):,}",
        )
    if limit_s is not None:
        figure.add_vline(x=limit_s * 1e3, line={"color": RED, "dash": "dash"}, annotation_text=f"limit {limit_s * 1e3:g} ms")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure


def throughput(windows: Sequence[Row], mean_tokens_per_s: float | None) -> go.Figure:
    figure = new_figure("time (s)", "output tokens/s")
    shown = thinned(windows, MAX_CURVE_POINTS)
    figure.add_scatter(
        x=[window["time_s"] for window in shown],
        y=[window["output_tokens_per_s"] for window in shown],
        mode="lines+markers",
        line={"color": GREEN, "shape": "hvh"},
        marker={"size": 4},
        name="output tokens/s",
    )
    if mean_tokens_per_s is not None:
        figure.add_hline(y=mean_tokens_per_s, line={"color": ORANGE, "dash": "dash"}, annotation_text=f"mean {mean_tokens_per_s:.4g}")
    figure.update_yaxes(rangemode="tozero")
    return figure


def concurrency(windows: Sequence[Row], limit: int | None) -> go.Figure:
    figure = new_figure("time (s)", "requests running")
    shown = thinned(windows, MAX_CURVE_POINTS)
    figure.add_scatter(
        x=[window["time_s"] for window in shown],
        y=[window["concurrency"] for window in shown],
        mode="lines",
        line={"color": PURPLE, "shape": "hvh"},
        name="mean of each window",
    )
    if limit is not None:
        figure.add_hline(y=limit, line={"color": RED, "dash": "dash"}, annotation_text=f"at most {limit}")
    figure.update_yaxes(rangemode="tozero")
    return figure


def timeline(requests: Sequence[Row]) -> go.Figure:
    """A line per request: waiting for the first token dashed, then solid; its end marked by how it ended."""
    figure = new_figure("time (s)", "request, in the order sent")
    shown = list(enumerate(thinned(requests, MAX_TIMELINE_REQUESTS)))
    waiting_x: list[float | None] = []
    waiting_y: list[int | None] = []
    decoding_x: list[float | None] = []
    decoding_y: list[int | None] = []
    for place, row in shown:
        end_s = row["ended_s"] if row["ended_s"] is not None else row["sent_s"]
        first_s = row["first_token_s"] if row["first_token_s"] is not None else end_s
        waiting_x += [row["sent_s"], first_s, None]
        waiting_y += [place, place, None]
        decoding_x += [first_s, end_s, None]
        decoding_y += [place, place, None]
    figure.add_scatter(x=waiting_x, y=waiting_y, mode="lines", line={"color": ORANGE, "dash": "dot"}, name="before the first token")
    figure.add_scatter(x=decoding_x, y=decoding_y, mode="lines", line={"color": BLUE}, name="from the first token on")
    for name, (colour, symbol) in OUTCOMES.items():
        ended = [(place, row) for place, row in shown if outcome(row) == name and row["ended_s"] is not None]
        if ended:
            figure.add_scatter(
                x=[row["ended_s"] for _, row in ended],
                y=[place for place, _ in ended],
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 6},
                name=name,
            )
    return figure


def thinned(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most ``limit`` rows, evenly spread, the first and the last among them."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (limit - 1))] for place in range(limit)]


def new_figure(x_title: str, y_title: str) -> go.Figure:
    """An empty one in the house style."""
    figure = go.Figure()
    grid = "rgba(128,128,128,0.25)"
    axis = {"gridcolor": grid, "zerolinecolor": grid, "linecolor": grid}
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 64, "r": 16, "t": 16, "b": 56},
        height=340,
        showlegend=True,
        legend={"orientation": "h", "y": 1.12},
        xaxis={**axis, "title": {"text": x_title}, "rangemode": "tozero"},
        yaxis={**axis, "title": {"text": y_title}},
    )
    return figure
