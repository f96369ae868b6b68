"""The page of ``twinfer demo``: predictions written down before their runs, beside what was measured. One self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dashboards import prediction_figures as figures
from dashboards.figures import Row
from dashboards.report import Chart, chart, page, table


def write_demo_report(path: Path, summary: Mapping[str, Any]) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(demo_report(summary), encoding="utf-8", newline="\n")


def demo_report(summary: Mapping[str, Any]) -> str:
    """``summary`` is what ``demo --json`` prints."""
    title = f"{summary['model']}: predicted, then run, {summary['calibration']['made'][:10]}"
    rows = summary["points"]
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(text)}</p>" for text in _texts(summary)), table(*_points(rows))]
    return page(title, "\n".join([*body, *(chart(f"chart-{number}", *one) for number, one in enumerate(_charts(rows)))]))


def _texts(summary: Mapping[str, Any]) -> list[str]:
    machine = summary["machine"]
    found = [
        f"{machine['cpu']}, {machine['num_cores']} cores, torch {machine['torch']}, Python {machine['python']}, {machine['system']}. "
        f"Calibrated in {summary['calibrated_s']:.0f} s; {summary['wall_s']:.0f} s in all.",
        "Every prediction was in the ledger, on the disk, before its run began, scaled by how fast the machine was at that moment beside "
        "its calibration. A step is the median from commit to commit of whole steps in which every rank has its batch; the interval is "
        "meant to hold 90 % of such medians.",
    ]
    if summary["median_error"] is not None:
        verdict = f"Median error {summary['median_error']:.1%}; {summary['inside']} of {summary['runs']} runs inside their interval."
        if summary["median_repetition"] is not None:
            verdict += f" Two runs of the same differ by {summary['median_repetition']:.1%} (median)."
        found.insert(0, verdict)
    return found


def _points(rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
    columns = ["layout", "batch", "run", "predicted (ms)", "90 % within (ms)", "measured (ms)", "error", "steps", "machine", ""]
    found: list[list[object]] = []
    for row in rows:
        for number, one in enumerate((row, row["again"])):
            if one is not None:
                found.append([row["layout"], row["batch"], number + 1, *_cells(one, row["reason"] if number == 0 else "")])
    return columns, found


def _cells(one: Row, reason: str) -> list[object]:
    expected, measured, speed = one["predicted"], one["measured"], one["speed"]
    flags = [reason, "outside" if one["inside"] is False else "", "extrapolated" if one["extrapolated"] else "", one["note"]]
    return [
        f"{expected['step_s'] * 1e3:.2f}",
        f"{expected['lo_s'] * 1e3:.2f} to {expected['hi_s'] * 1e3:.2f}",
        "-" if measured is None else f"{measured['step_s'] * 1e3:.2f}",
        "-" if one["error"] is None else f"{one['error']:+.1%}",
        one["steps"],
        f"compute x{speed['compute']:.2f}, memory x{speed['memory']:.2f}, Python x{speed['host']:.2f}",
        ", ".join(flag for flag in flags if flag),
    ]


def _charts(rows: Sequence[Row]) -> list[Chart]:
    columns, points = _points(rows)
    runs = [{"layout": row["layout"], "batch": row["batch"], **one} for row in rows for one in (row, row["again"]) if one is not None]
    known = [run for run in runs if run["measured"] is not None]
    inside = sum(run["inside"] for run in known)
    parts: list[list[object]] = [
        [row["layout"], row["batch"], name, f"{one['seconds'] * 1e3:.3f}", one["provenance"]]
        for row in rows
        for name, one in row["predicted"]["components"].items()
    ]
    return [
        (f"Step time over the batch: {inside} of {len(known)} measurements are inside the predicted interval",
         figures.steps_by_batch(rows), columns, points),
        ("Predicted against measured", figures.parity(runs), columns, points),
        ("What the predicted steps are made of", figures.components(rows), ["layout", "batch", "component", "ms", "provenance"], parts),
    ]  # fmt: skip
