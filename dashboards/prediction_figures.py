"""Figures of predictions beside what was measured after: pure functions from tables to plotly figures, in the style of ``figures``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from dashboards.figures import BLUE, GREEN, ORANGE, PURPLE, RED, Row, new_figure

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)
SYMBOLS = ("circle", "diamond", "square", "x", "triangle-up", "cross", "star")
_OTHER = "#56B4E9", "#F0E442", "#999999"


def steps_by_batch(rows: Sequence[Row]) -> go.Figure:
    """Step time over the batch: predicted, with its 90 % interval, and measured; a colour for each layout. Both axes logarithmic."""
    figure = new_figure("requests per data rank", "step (ms)")
    for number, layout in enumerate(dict.fromkeys(str(row["layout"]) for row in rows)):
        mine = [row for row in rows if row["layout"] == layout]
        colour = COLOURS[number % len(COLOURS)]
        expected = [row["predicted"] for row in mine]
        figure.add_scatter(
            x=[row["batch"] for row in mine],
            y=[one["step_s"] * 1e3 for one in expected],
            error_y=_interval_ms(expected),
            mode="lines+markers",
            line={"color": colour, "dash": "dash"},
            marker={"color": colour, "symbol": "line-ew-open", "size": 12},
            name=f"{layout}, predicted",
        )
        for which, symbol, name in ((mine, "circle", "measured"), ([row["again"] for row in mine], "circle-open", "once more")):
            known = [(row["batch"], one["measured"]) for row, one in zip(mine, which, strict=True) if one and one["measured"]]
            if known:
                figure.add_scatter(
                    x=[batch for batch, _ in known],
                    y=[measured["step_s"] * 1e3 for _, measured in known],
                    mode="markers",
                    marker={"color": colour, "symbol": symbol, "size": 9},
                    name=f"{layout}, {name}",
                )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    figure.update_layout(height=460)
    return figure


def parity(rows: Sequence[Row]) -> go.Figure:
    """Predicted against measured in milliseconds, both logarithmic; on the diagonal they agree, the bars are 90 % intervals."""
    figure = new_figure("measured (ms)", "predicted (ms)")
    known = [row for row in rows if row["measured"] is not None]
    for number, layout in enumerate(dict.fromkeys(str(row["layout"]) for row in known)):
        mine = [row for row in known if row["layout"] == layout]
        colour = COLOURS[number % len(COLOURS)]
        expected = [row["predicted"] for row in mine]
        figure.add_scatter(
            x=[row["measured"]["step_s"] * 1e3 for row in mine],
            y=[one["step_s"] * 1e3 for one in expected],
            error_y=_interval_ms(expected),
            mode="markers",
            marker={"color": colour, "symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
            name=layout,
        )
    values = [value * 1e3 for row in known for value in (row["measured"]["step_s"], row["predicted"]["step_s"])]
    if values:
        ends = [min(values), max(values)]
        figure.add_scatter(x=ends, y=ends, mode="lines", line={"color": RED, "dash": "dash"}, name="equal")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def components(rows: Sequence[Row], limit: int = 7) -> go.Figure:
    """Where a predicted step's time goes: a bar for each point, in shares, the largest ``limit`` components by name."""
    figure = new_figure("", "share of the predicted step")
    totals: dict[str, float] = {}
    for row in rows:
        for name, one in row["predicted"]["components"].items():
            totals[name] = totals.get(name, 0.0) + one["seconds"] / row["predicted"]["step_s"]
    shown = sorted(totals, key=lambda name: (-totals[name], name))[:limit]
    labels = [f"{row['layout']}, {row['batch']}" for row in rows]
    left = [1.0] * len(rows)
    for number, name in enumerate(shown):
        shares = [row["predicted"]["components"].get(name, {"seconds": 0.0})["seconds"] / row["predicted"]["step_s"] for row in rows]
        left = [rest - share for rest, share in zip(left, shares, strict=True)]
        figure.add_bar(x=labels, y=shares, marker={"color": (*COLOURS, *_OTHER)[number % 8]}, name=name)
    if len(totals) > len(shown):
        figure.add_bar(x=labels, y=left, marker={"color": "rgba(128,128,128,0.5)"}, name="the rest")
    figure.update_layout(barmode="stack")
    figure.update_yaxes(range=[0, 1.0], tickformat=".0%")
    return figure


def latency_by_load(rows: Sequence[Row], name: str, label: str) -> go.Figure:
    """The median of a latency over the load: predicted with its 90 % interval, and measured. A row has ``place`` (the load's name) and
    ``quantities``, as ``validate --json`` has them."""
    figure = new_figure("", f"{label} p50 (ms)")
    known = [row for row in rows if name in row["quantities"]]
    cells = [row["quantities"][name] for row in known]
    places = [row["place"] for row in known]
    figure.add_scatter(
        x=places,
        y=[cell["predicted"] * 1e3 for cell in cells],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [(cell["hi"] - cell["predicted"]) * 1e3 for cell in cells],
            "arrayminus": [(cell["predicted"] - cell["lo"]) * 1e3 for cell in cells],
        },
        mode="markers",
        marker={"color": BLUE, "symbol": "line-ew-open", "size": 14},
        name="predicted, 90 % interval",
    )
    figure.add_scatter(
        x=places,
        y=[cell["measured"] * 1e3 for cell in cells],
        mode="markers",
        marker={"color": ORANGE, "symbol": "circle", "size": 9},
        name="measured",
    )
    figure.update_yaxes(rangemode="tozero")
    return figure


def pairs(rows: Sequence[Row], label: str) -> go.Figure:
    """Predicted against measured, in milliseconds and logarithmic; a row has ``series``, ``measured_s`` and ``predicted_s``."""
    figure = new_figure(f"{label} measured (ms)", f"{label} predicted (ms)")
    shown = [row for row in rows if row["measured_s"] and row["predicted_s"]]
    for number, series in enumerate(dict.fromkeys(str(row["series"]) for row in shown)):
        mine = [row for row in shown if row["series"] == series]
        figure.add_scatter(
            x=[row["measured_s"] * 1e3 for row in mine],
            y=[row["predicted_s"] * 1e3 for row in mine],
            mode="markers",
            marker={"color": COLOURS[number % len(COLOURS)], "symbol": SYMBOLS[number % len(SYMBOLS)], "size": 5, "opacity": 0.6},
            name=series,
        )
    values = [value * 1e3 for row in shown for value in (row["measured_s"], row["predicted_s"])]
    if values:
        ends = [min(values), max(values)]
        figure.add_scatter(x=ends, y=ends, mode="lines", line={"color": RED, "dash": "dash"}, name="equal")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def _interval_ms(expected: Sequence[Row]) -> dict[str, Any]:
    """Error bars of predictions: from ``lo_s`` to ``hi_s``, in milliseconds."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [(one["hi_s"] - one["step_s"]) * 1e3 for one in expected],
        "arrayminus": [(one["step_s"] - one["lo_s"]) * 1e3 for one in expected],
    }
