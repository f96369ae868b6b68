"""The page of ``simulate``: one point in detail, or a sweep and each of its points. One self-contained HTML file, no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dashboards import figures
from dashboards import simulation_figures as drawn
from dashboards.figures import Row
from dashboards.report import SHARES, Chart, chart, number, page, place, table

# Points that are drawn one by one; the sweep's own figures have them all.
MAX_DETAILED_POINTS = 12
LATENCIES = (("ttft_s", "TTFT", "ttft_s"), ("tpot_s", "TPOT", "tpot_s"), ("itl_s", "ITL", "itl_s_max"), ("e2e_s", "E2E", "e2e_s"))


def write_simulation_report(path: Path, facts: Mapping[str, Any], points: Sequence[Row], details: Sequence[Row]) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(simulation_report(facts, points, details), encoding="utf-8", newline="\n")


def simulation_report(facts: Mapping[str, Any], points: Sequence[Row], details: Sequence[Row]) -> str:
    """``facts`` and ``points`` as ``simulate --json`` prints them; ``details`` beside each point: ``quantiles`` (seconds at even shares) of
    each latency, ``windows`` of the simulated time, and ``timeline``, rows of some requests."""
    title = f"{facts['model']} simulated, {facts['date'][:10]}"
    body = [f"<h1>{escape(title)}</h1>", *_warnings(points), _points_table(points)]
    charts: list[Chart] = list(_sweep(facts, points)) if len(points) > 1 else []
    body += [chart(f"sweep-{index}", *one) for index, one in enumerate(charts)]
    for index, (point, detail) in enumerate(zip(points[:MAX_DETAILED_POINTS], details, strict=False)):
        body.append(f"<h2>{escape(point['name'])}</h2>")
        body += [chart(f"point-{index}-{order}", *one) for order, one in enumerate(_point(facts, point, detail))]
    if len(points) > MAX_DETAILED_POINTS:
        body.append(f"<p>The first {MAX_DETAILED_POINTS} of {len(points)} points are drawn one by one.</p>")
    body.append(f"<h2>Settings</h2>\n<pre>{escape(json.dumps(dict(facts), indent=2, ensure_ascii=False))}</pre>")
    return page(title, "\n".join(body))


def _warnings(points: Sequence[Row]) -> Iterator[str]:
    for point in points:
        if point["rejected"]:
            text = f"{point['name']}: {point['rejected']:,} of {point['requests']:,} requests were refused."
            yield f'<p class="warning">{escape(text)}</p>'
        if point["extrapolated_share"]:
            text = f"{point['name']}: {point['extrapolated_share']:.1%} of the steps lie outside what the cost model was fitted on."
            yield f'<p class="warning">{escape(text)}</p>'


def _points_table(points: Sequence[Row]) -> str:
    columns = ["point", "finished", "TTFT p50 (ms)", "TTFT p99", "TPOT p50 (ms)", "TPOT p99", "output tokens/s", "goodput (req/s)"]
    columns += ["within limits", "KV peak", "prefix hits", "preemptions", "GPU s"]
    rows: list[list[object]] = [
        [
            point["name"],
            f"{point['finished']:,} of {point['requests']:,}",
            *(_ms(point[key][column]) for key in ("ttft_s", "tpot_s") for column in ("p50", "p99")),
            number(point["output_tokens_per_s"]),
            number(point["goodput"]),
            _percent(point["goodput_share"]),
            _percent(point["kv_peak"]),
            _percent(point["prefix_hit_rate"]),
            f"{point['preemptions']:,}",
            number(point["gpu_s"]),
        ]
        for point in points
    ]
    return "<h2>Results</h2>\n" + table(columns, rows)


def _sweep(facts: Mapping[str, Any], points: Sequence[Row]) -> Iterator[Chart]:
    slo = facts["slo"] or {}
    columns, rows = _rates(points)
    yield _best(points), drawn.pareto(points), columns, rows
    for load, name in (("request_rate", "the request rate"), ("concurrency", "the concurrency")):
        known = [point for point in points if isinstance(point[load], int | float)]
        if len({point[load] for point in known}) < 2:
            continue
        for key, label, limit_key in LATENCIES[:2]:
            figure = drawn.over_load(known, load, f"{key}.p99", f"{label} p99 (ms)", 1e3, slo.get(limit_key))
            within = "" if limit_key not in slo else _kept(known, key, slo[limit_key])
            table_rows = [[point["name"], _ms(point[key]["p50"]), _ms(point[key]["p99"])] for point in known]
            yield f"{label} over {name}, 99th percentile{within}", figure, ["point", "p50 (ms)", "p99 (ms)"], table_rows
        if any(point["goodput"] is not None for point in known):
            goodput = [[point["name"], number(point["goodput"]), _percent(point["goodput_share"])] for point in known]
            top = max(known, key=lambda point: point["goodput"] or 0.0)
            caption = f"Goodput over {name}: most at {top['name']}, {number(top['goodput'])} req/s"
            yield caption, drawn.over_load(known, load, "goodput", "requests/s within limits"), ["point", "goodput", "share"], goodput
    yield _components(points)


def _rates(points: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
    rows: list[list[object]] = [
        [point["name"], number(_per_user(point)), number(point["output_tokens_per_s_per_gpu"]), point["num_gpus"]] for point in points
    ]
    return ["point", "tokens/s per user", "output tokens/s per GPU", "GPUs"], rows


def _per_user(point: Row) -> float | None:
    return 1.0 / point["tpot_s"]["p50"] if point["tpot_s"]["p50"] else None


def _best(points: Sequence[Row]) -> str:
    known = [point for point in points if point["output_tokens_per_s_per_gpu"] is not None]
    if not known:
        return "Throughput of a GPU against speed for a user: no point has either"
    most = max(known, key=lambda point: float(point["output_tokens_per_s_per_gpu"]))
    fastest = max(known, key=lambda point: _per_user(point) or 0.0)
    return (
        f"Throughput of a GPU against speed for a user: {most['name']} gives {number(most['output_tokens_per_s_per_gpu'])} tokens/s per "
        f"GPU, {fastest['name']} {number(_per_user(fastest))} tokens/s per user"
    )


def _kept(points: Sequence[Row], key: str, limit_s: float) -> str:
    kept = sum(point[key]["p99"] is not None and point[key]["p99"] <= limit_s for point in points)
    return f": {kept} of {len(points)} points keep {limit_s * 1e3:g} ms"


def _components(points: Sequence[Row]) -> Chart:
    first = points[0]["components"]
    total = sum(part["seconds"] for part in first.values())
    top = max(first, key=lambda name: first[name]["seconds"]) if first else None
    share = f": {top} takes {first[top]['seconds'] / total:.0%} of it" if top is not None and total > 0 else ""
    rows: list[list[object]] = [
        [point["name"], name, f"{part['seconds'] * 1e3:.4g}", part["provenance"]]
        for point in points
        for name, part in sorted(point["components"].items(), key=lambda entry: -entry[1]["seconds"])
    ]
    caption = f"The mean step by component{share}" + (f" ({points[0]['name']})" if share and len(points) > 1 else "")
    return caption, drawn.components(points), ["point", "component", "ms a step", "provenance"], rows


def _point(facts: Mapping[str, Any], point: Row, detail: Row) -> Iterator[Chart]:
    slo = facts["slo"] or {}
    for key, label, limit_key in LATENCIES:
        values, count, limit_s = detail["quantiles"][key], point[key]["count"], slo.get(limit_key)
        rows = [[f"{share:.0%}", _ms(values[place(values, share)])] for share in SHARES] if values else []
        figure = drawn.quantiles(values, count, label, limit_s)
        yield _quantile_caption(label, point[key], limit_s), figure, ["share", f"{label} (ms)"], rows
    windows = detail["windows"]
    columns = ["time (s)", "output tokens/s", "running", "waiting"]
    rows = [[number(one[key]) for key in ("time_s", "output_tokens_per_s", "running", "waiting")] for one in windows]
    mean = point["output_tokens_per_s"]
    yield f"Output throughput: mean {number(mean)} tokens/s", figures.throughput(windows, mean), columns, rows
    peaks = [max((one[key] for one in windows), default=0.0) for key in ("running", "waiting")]
    yield (
        f"Requests running and waiting: at most {number(peaks[0])} and {number(peaks[1])} in the mean of a window",
        drawn.over_time(windows, {"running": "running", "waiting": "waiting"}, "requests"),
        columns,
        rows,
    )
    yield (
        f"KV blocks held by requests: at most {_percent(point['kv_peak'])} of a rank's",
        drawn.kv_over_time(windows),
        ["time (s)", "held"],
        [[number(one["time_s"]), _percent(one["kv_used"])] for one in windows],
    )
    yield _components([point])
    yield _timeline(point, detail["timeline"])


def _quantile_caption(label: str, values: Row, limit_s: float | None) -> str:
    if not values["count"]:
        return f"{label}: no request has one"
    text = f"{label}: half are within {_ms(values['p50'])} ms, 99 % within {_ms(values['p99'])} ms"
    if limit_s is not None:
        text += f"; the limit of {limit_s * 1e3:g} ms is {'kept' if values['p99'] <= limit_s else 'missed'} by the 99th percentile"
    return f"{text} (n = {values['count']:,})"


def _timeline(point: Row, rows: Sequence[Row]) -> Chart:
    drawn_count = min(len(rows), figures.MAX_TIMELINE_REQUESTS)
    text = f"Requests from their arrival to their end ({drawn_count} of {point['requests']:,} drawn, evenly spread)"
    columns = ["request", "arrived (s)", "first token (s)", "ended (s)", "end"]
    cells: list[list[object]] = [
        [row["index"], *(number(row[key]) for key in ("sent_s", "first_token_s", "ended_s")), row["outcome"]] for row in rows
    ]
    return text, figures.timeline(rows), columns, cells


def _ms(value_s: float | None) -> str:
    return number(None if value_s is None else value_s * 1e3)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
