"""Figures of simulated points: pure functions from tables to plotly figures, in the style of ``dashboards.figures``.

A point is a row of ``simulate --json``: one layout under one load. A window is a slice of its simulated time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go

from dashboards.figures import BLUE, GREEN, MAX_CURVE_POINTS, ORANGE, PURPLE, RED, Row, new_figure, thinned

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)
_SYMBOLS = ("circle", "diamond", "square", "x", "triangle-up", "cross", "star")
_DASHES = ("solid", "dash", "dot", "dashdot")


def quantiles(values_s: Sequence[float], count: int, label: str, limit_s: float | None) -> go.Figure:
    """A distribution from its quantiles at even shares, the smallest value first and the largest last; ``count`` values lie behind them."""
    figure = new_figure(f"{label} (ms)", "share at or below")
    if values_s:
        last = max(1, len(values_s) - 1)
        figure.add_scatter(
            x=[value * 1e3 for value in values_s],
            y=[place / last if len(values_s) > 1 else 1.0 for place in range(len(values_s))],
            mode="lines" if len(values_s) > 1 else "markers",
            line={"color": BLUE},
            name=f"{label}, n = {count:,}",
        )
    if limit_s is not None:
        figure.add_vline(x=limit_s * 1e3, line={"color": RED, "dash": "dash"}, annotation_text=f"limit {limit_s * 1e3:g} ms")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure


def over_time(windows: Sequence[Row], keys: Mapping[str, str], y_title: str) -> go.Figure:
    """A line for each of ``keys`` (key of the windows: name of the line)."""
    figure = new_figure("simulated time (s)", y_title)
    shown = thinned(windows, MAX_CURVE_POINTS)
    for number, (key, name) in enumerate(keys.items()):
        figure.add_scatter(
            x=[window["time_s"] for window in shown],
            y=[window[key] for window in shown],
            mode="lines" if len(shown) > 1 else "markers",
            line={"color": _COLOURS[number % len(_COLOURS)], "dash": _DASHES[number % len(_DASHES)], "shape": "hvh"},
            name=name,
        )
    figure.update_yaxes(rangemode="tozero")
    return figure


def kv_over_time(windows: Sequence[Row]) -> go.Figure:
    """The share of KV blocks that running requests hold; what is cached beside them can be evicted."""
    figure = over_time(windows, {"kv_used": "held by requests"}, "share of KV blocks")
    figure.add_hline(y=1.0, line={"color": RED, "dash": "dash"}, annotation_text="all blocks")
    figure.update_yaxes(range=[0, 1.08], tickformat=".0%")
    return figure


def components(points: Sequence[Row]) -> go.Figure:
    """Where the time of the mean step goes: a bar for each point, stacked by component."""
    figure = new_figure("", "ms of a mean step")
    names = sorted({name for point in points for name in point["components"]})
    for number, name in enumerate(names):
        figure.add_bar(
            x=[point["name"] for point in points],
            y=[point["components"].get(name, {"seconds": 0.0})["seconds"] * 1e3 for point in points],
            marker={"color": _COLOURS[number % len(_COLOURS)], "pattern": {"shape": ("", "/", "x", ".", "-")[number // len(_COLOURS) % 5]}},
            name=name,
        )
    figure.update_layout(barmode="stack")
    return figure


def pareto(points: Sequence[Row]) -> go.Figure:
    """Throughput of a GPU against what one user sees, a line for each layout; to the upper right is better."""
    figure = new_figure("tokens/s per user (1 / median TPOT)", "output tokens/s per GPU")
    shown = [point for point in points if point["tpot_s"]["p50"] and point["output_tokens_per_s_per_gpu"] is not None]
    for number, (layout, mine) in enumerate(_by_layout(shown)):
        _line(
            figure,
            number,
            layout,
            [1.0 / point["tpot_s"]["p50"] for point in mine],
            [point["output_tokens_per_s_per_gpu"] for point in mine],
            [point["name"] for point in mine],
        )
    figure.update_yaxes(rangemode="tozero")
    return figure


def over_load(points: Sequence[Row], load: str, key: str, y_title: str, scale: float = 1.0, limit: float | None = None) -> go.Figure:
    """``key`` ("goodput", or "ttft_s.p99") over ``load`` ("request_rate" or "concurrency"), a line for each layout."""
    figure = new_figure({"request_rate": "requests/s", "concurrency": "requests at once"}[load], y_title)
    for number, (layout, mine) in enumerate(_by_layout([point for point in points if isinstance(point[load], int | float)])):
        found = [(point[load], value(point, key), point["name"]) for point in mine]
        known = sorted((at, one * scale, name) for at, one, name in found if one is not None)
        _line(figure, number, layout, [one[0] for one in known], [one[1] for one in known], [one[2] for one in known])
    if limit is not None:
        figure.add_hline(y=limit * scale, line={"color": RED, "dash": "dash"}, annotation_text=f"limit {limit * scale:g}")
    figure.update_yaxes(rangemode="tozero")
    return figure


def value(point: Row, key: str) -> float | None:
    """``a.b`` is point[a][b]."""
    found = point
    for name in key.split("."):
        found = found[name]
    return found  # type: ignore[return-value]


def _by_layout(points: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    for layout in dict.fromkeys(str(point["layout"]) for point in points):
        yield layout, [point for point in points if str(point["layout"]) == layout]


def _line(figure: go.Figure, number: int, name: str, x: Sequence[float], y: Sequence[float], texts: Sequence[str]) -> None:
    figure.add_scatter(
        x=list(x),
        y=list(y),
        text=list(texts),
        mode="lines+markers",
        line={"color": _COLOURS[number % len(_COLOURS)], "dash": _DASHES[number % len(_DASHES)]},
        marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8},
        name=name,
    )
