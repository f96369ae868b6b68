"""Figures of a cost model's errors: pure functions from held-out predictions to plotly figures, in the style of ``dashboards.figures``."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboards.figures import BLUE, GREEN, ORANGE, PURPLE, RED, Row, new_figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)
_SYMBOLS = ("circle", "diamond", "square", "x", "triangle-up", "cross", "star")
MEANT_COVERAGE = 0.9


def parity(rows: Sequence[Row], by: str = "layout") -> go.Figure:
    """Predicted against measured, both in milliseconds and logarithmic; on the diagonal they agree."""
    figure = new_figure("measured (ms)", "predicted (ms)")
    _scatter(figure, rows, by, lambda row: row["measured_s"] * 1e3, lambda row: row["predicted_s"] * 1e3)
    values = [row[name] * 1e3 for row in rows for name in ("measured_s", "predicted_s") if row[name] > 0]
    if values:
        ends = [min(values), max(values)]
        figure.add_scatter(x=ends, y=ends, mode="lines", line={"color": RED, "dash": "dash"}, name="equal")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def residuals(rows: Sequence[Row], over: str) -> go.Figure:
    """Relative errors over a feature of the step: a pattern here is a shape the model misses."""
    figure = new_figure(over.replace("_", " "), "predicted / measured - 1")
    shown = [row for row in rows if row["measured_s"] > 0 and row[over] > 0]
    _scatter(figure, shown, "component", lambda row: row[over], lambda row: row["predicted_s"] / row["measured_s"] - 1.0)
    figure.add_hline(y=0, line={"color": RED, "dash": "dash"})
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%")
    return figure


def rates(rows: Sequence[Row]) -> go.Figure:
    """Microseconds per token of each component: a roofline read sideways, falling while launches dominate, flat at the device's rate."""
    figure = new_figure("tokens in the step", "us per token")
    shown = [row for row in rows if row["measured_s"] > 0 and row["tokens"] > 0]
    _scatter(figure, shown, "component", lambda row: row["tokens"], lambda row: row["measured_s"] / row["tokens"] * 1e6)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def coverage(rows: Sequence[tuple[str, float, int]]) -> go.Figure:
    """The share of whole steps inside their interval, a bar for each layout."""
    figure = new_figure("", "share within")
    figure.add_bar(x=[name for name, _, _ in rows], y=[share for _, share, _ in rows], marker={"color": BLUE}, name="within the interval")
    figure.add_hline(y=MEANT_COVERAGE, line={"color": RED, "dash": "dash"}, annotation_text="90 %")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure


def _scatter(figure: go.Figure, rows: Sequence[Row], by: str, x_of: object, y_of: object) -> None:
    """A series for each value of ``by``, told apart by colour and marker."""
    assert callable(x_of)
    assert callable(y_of)
    for number, name in enumerate(dict.fromkeys(str(row[by]) for row in rows)):
        mine = [row for row in rows if str(row[by]) == name]
        marker = {"color": _COLOURS[number % len(_COLOURS)], "symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7}
        figure.add_scatter(x=[x_of(row) for row in mine], y=[y_of(row) for row in mine], mode="markers", marker=marker, name=name)
