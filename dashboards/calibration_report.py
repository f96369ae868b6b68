"""The page of a calibration: how well it predicts what it had not seen. One self-contained HTML file, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dashboards import fit_figures as figures
from dashboards.report import Chart, chart, page, table

Row = Mapping[str, Any]
STEP = "step"
MAX_POINTS = 20_000


def write_calibration_report(path: Path, summary: Mapping[str, Any], held_out: Sequence[Row]) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(calibration_report(summary, held_out), encoding="utf-8", newline="\n")


def calibration_report(summary: Mapping[str, Any], held_out: Sequence[Row]) -> str:
    """``summary`` is what ``calibrate --json`` prints; each row of ``held_out`` one prediction of something not fitted: model, layout,
    component ("step" for a whole step), tokens, context_tokens, measured_s, predicted_s."""
    machine = summary["machine"]
    title = f"Calibration of {', '.join(model['model'] for model in summary['models'])}, {summary['made'][:10]}"
    where = f"{machine['cpu']}, {machine['num_cores']} cores, torch {machine['torch']}, Python {machine['python']}, {machine['system']}."
    if not machine["python"]:  # fitted on what was measured elsewhere
        where = f"{machine['cpu']}; fitted on measurements made there."
    header = f"<h1>{escape(title)}</h1>\n<p>{escape(where)}</p>\n{_components(summary)}"
    charts = _charts(summary, held_out[:MAX_POINTS])
    return page(title, "\n".join([header, *(chart(f"chart-{number}", *one) for number, one in enumerate(charts))]))


def _components(summary: Mapping[str, Any]) -> str:
    rows = [
        [f"{model['model']} {rank['layout']}", name, f"{one['share']:.1%}", f"{one['median_error']:.1%}", f"{one['p90_error']:.1%}"]
        for model in summary["models"]
        for rank in model["ranks"]
        for name, one in rank["components"].items()
    ]
    return "<h2>Errors held out, by component</h2>\n" + table(["rank", "component", "share of time", "median", "90th percentile"], rows)


def _charts(summary: Mapping[str, Any], held_out: Sequence[Row]) -> list[Chart]:
    steps = [row for row in held_out if row["component"] == STEP]
    parts = [row for row in held_out if row["component"] != STEP]
    charts: list[Chart] = [
        (_parity_caption("Whole steps", steps), figures.parity(steps), *_points(steps)),
        (_parity_caption("Components", parts), figures.parity(parts, by="component"), *_points(parts)),
        ("Errors of components over the tokens of a step", figures.residuals(parts, "tokens"), *_points(parts)),
        ("Errors of components over the tokens in cache", figures.residuals(parts, "context_tokens"), *_points(parts)),
        ("Time of a component per token: where it stops falling, the device's rate is reached", figures.rates(parts), *_points(parts)),
    ]
    coverage = _coverage(summary, steps)
    if coverage:
        text = "Share of whole steps within the interval, by layout (90 % is meant)"
        charts.append((text, figures.coverage(coverage), ["layout", "within", "runs"], [list(row) for row in coverage]))
    return charts


def _parity_caption(what: str, rows: Sequence[Row]) -> str:
    errors = sorted(abs(row["predicted_s"] / row["measured_s"] - 1.0) for row in rows if row["measured_s"] > 0)
    if not errors:
        return f"{what}: none was held out"
    ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return f"{what}: predicted against measured, held out; median error {errors[len(errors) // 2]:.1%}, 90th percentile {ninth:.1%}"


def _points(rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
    columns = ["model", "layout", "component", "tokens", "context", "measured (ms)", "predicted (ms)", "error"]
    found: list[list[object]] = [
        [
            *(row[name] for name in ("model", "layout", "component")),
            *(f"{row[name]:,.0f}" for name in ("tokens", "context_tokens")),
            *(f"{row[name] * 1e3:.4g}" for name in ("measured_s", "predicted_s")),
            f"{row['predicted_s'] / row['measured_s'] - 1.0:+.1%}" if row["measured_s"] > 0 else "-",
        ]
        for row in rows
    ]
    return columns, found


def _coverage(summary: Mapping[str, Any], steps: Sequence[Row]) -> list[tuple[str, float, int]]:
    found = []
    for model in summary["models"]:
        for fit in model["steps"]:
            low, high = fit["interval"]
            rows = [row for row in steps if (row["model"], row["layout"]) == (model["model"], fit["layout"])]
            inside = [low <= row["measured_s"] / row["predicted_s"] <= high for row in rows if row["predicted_s"] > 0]
            if inside:
                found.append((f"{model['model']} {fit['layout']}", sum(inside) / len(inside), len(inside)))
    return found
