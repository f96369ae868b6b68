"""The page of ``twinfer validate``: the twin's predictions beside what the engine did. One self-contained HTML file, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dashboards import prediction_figures as figures
from dashboards.figures import Row
from dashboards.report import Chart, chart, page, table

LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "E2E"))


def write_validation_report(path: Path, summary: Mapping[str, Any], details: Sequence[Row]) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(validation_report(summary, details), encoding="utf-8", newline="\n")


def validation_report(summary: Mapping[str, Any], details: Sequence[Row]) -> str:
    """``summary`` is what ``validate --json`` prints; ``details`` one entry a run: name, round, and of its steps and requests (some, where
    they are many) what was predicted and measured."""
    title = f"{summary['model']} {summary['layout']}: engine and twin, {summary['runs'][0]['predicted_at'][:10]}"
    body = [f"<h1>{escape(title)}</h1>", *_verdicts(summary), "<h2>Errors by load</h2>", table(*_bands(summary)), "<h2>Runs</h2>"]
    body += [table(*_runs(summary)), *(chart(f"chart-{number}", *one) for number, one in enumerate(_charts(summary, details)))]
    return page(title, "\n".join(body))


def _verdicts(summary: Mapping[str, Any]) -> list[str]:
    machine, parity, saturation = summary["machine"], summary["parity"], summary["saturation"]
    where = f"{machine['cpu']}, {machine['num_cores']} cores, torch {machine['torch']}, Python {machine['python']}, {machine['system']}."
    found = [f"<p>{escape(where)} Every prediction was in the ledger, on the disk, before its run began.</p>"]
    if parity["difference"]:
        found.append(f'<p class="warning">No parity: {escape(parity["difference"])}</p>')
    else:
        text = (
            f"Parity: given what reached its scheduler and what came of each step, the twin made all {parity['num_plans']:,} plans of the "
            f"engine, byte for byte ({parity['num_requests']:,} requests, {parity['num_events']:,} events)."
        )
        found.append(f"<p>{escape(text)}</p>")
    if saturation["error"] is not None:
        text = (
            f"Saturation: {saturation['predicted_per_s']:.3g} requests/s predicted, {saturation['measured_per_s']:.3g} measured "
            f"({saturation['error']:+.1%}; run once more {_signed(saturation['repeatability'])})."
        )
        found.append(f"<p>{escape(text)}</p>")
    return found


def _bands(summary: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    columns = ["load", "of the median", "at the run's speed", "repeated", "by request", "repeated", "90th percentile"]
    rows: list[list[object]] = []
    for band, one in summary["bands"].items():
        for name, label in LATENCIES:
            cells = one[f"{name}_s"]
            keys = (
                *("error_of_median", "error_of_median_at_speed", "repeatability_of_median", "median_request_error"),
                *("request_repeatability", "p90_request_error"),
            )
            rows.append([f"{band}: {label}", *(_percent(cells[key]) for key in keys)])
        for key, label in (("output_tokens_per_s", "output tokens/s"), ("served_requests_per_s", "requests/s")):
            cells = one[key]
            shown = [_percent(cells[name]) for name in ("error", "error_at_speed", "repeatability")]
            rows.append([f"{band}: {label}", *shown, "", "", ""])
        steps = one["steps"]
        inside = f"{_percent(steps['coverage'])} inside, all steps together {_signed(steps['total'])}"
        rows.append([f"{band}: steps", inside, "", "", _percent(steps["median"]), "", _percent(steps["p90"])])
    return columns, rows


def _runs(summary: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    columns = [
        "load",
        "run",
        "of saturation",
        *(f"{label} p50 (ms): predicted, measured" for _, label in LATENCIES[:2]),
        "machine before",
        "during",
        "",
    ]
    rows: list[list[object]] = []
    for run in summary["runs"]:
        share = run["saturation_share"]
        cells = [_cell(run["quantities"].get(f"{name}_p50_s")) for name, _ in LATENCIES[:2]]
        speeds = [_speed(run["speed"]), _speed(run["at_speed"]["speed"])]
        rows.append([run["load"], run["round"] + 1, "-" if share is None else f"{share:.0%}", *cells, *speeds, run["note"]])
    return columns, rows


def _speed(factors: Mapping[str, float]) -> str:
    return f"compute x{factors['compute']:.2f}, memory x{factors['memory']:.2f}, Python x{factors['host']:.2f}"


def _cell(one: Row | None) -> str:
    if one is None:
        return "-"
    within = f"{one['lo'] * 1e3:.1f} to {one['hi'] * 1e3:.1f}"
    return f"{one['predicted'] * 1e3:.1f} ({within}), {one['measured'] * 1e3:.1f}: {_signed(one['error'])}"


def _charts(summary: Mapping[str, Any], details: Sequence[Row]) -> list[Chart]:
    rows = [{**run, "place": f"{run['load']}, run {run['round'] + 1}"} for run in summary["runs"]]
    charts: list[Chart] = []
    for name, label in LATENCIES:
        key = f"{name}_p50_s"
        cells = [run["quantities"][key] for run in rows if key in run["quantities"]]
        inside = sum(cell["inside"] for cell in cells)
        points = [[run["place"], _cell(run["quantities"].get(key))] for run in rows]
        caption = f"{label} by load: {inside} of {len(cells)} measured medians are inside the predicted interval"
        charts.append((caption, figures.latency_by_load(rows, key, label), ["run", "predicted, measured (ms)"], points))
    for name, label in LATENCIES[:2]:
        requests = [
            {"series": _series(run), "measured_s": one[f"{name}_s_measured"], "predicted_s": one[f"{name}_s_predicted"]}
            for run in details
            for one in run["requests"]
        ]
        charts.append((f"{label}, request by request", figures.pairs(requests, label), *_pairs(requests)))
    steps = [{"series": _series(run), **one} for run in details for one in run["steps"]]
    charts.append(("Steps, each priced on the plan that the engine ran", figures.pairs(steps, "step"), *_pairs(steps)))
    return charts


def _series(run: Row) -> str:
    return f"{run['name']}, run {run['round'] + 1}"


def _pairs(rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
    found: list[list[object]] = [
        [row["series"], *("-" if row[key] is None else f"{row[key] * 1e3:.2f}" for key in ("measured_s", "predicted_s"))] for row in rows
    ]
    return ["run", "measured (ms)", "predicted (ms)"], found


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
