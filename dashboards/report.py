"""One self-contained HTML file about a load run: no network, no CDN; scripts run by their hashes only; all text escaped.

Every chart is a <figure> with a caption that states the finding and a table of its numbers beside it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards import figures
from dashboards.figures import Row

MAX_TABLE_ROWS = 200
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

# Draws what the data blocks hold, in the colours of the page.
_DRAW_SCRIPT = """
"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function colours() {
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  return {"font.color": ink};
}
for (const place of document.querySelectorAll("div.chart")) {
  const figure = JSON.parse(document.getElementById(place.id + "-data").textContent);
  Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displaylogo: false, displayModeBar: false})
    .then(() => Plotly.relayout(place, colours()));
}
dark.addEventListener("change", () => {
  for (const place of document.querySelectorAll("div.chart")) Plotly.relayout(place, colours());
});
"""

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --soft: #f2f2f2; --warn: #a33c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #16181b; --soft: #24272b; --warn: #ff9a5c; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.8rem 0.15rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid currentColor; }
figure { margin: 2rem 0; }
figcaption { font-weight: 600; margin-bottom: 0.5rem; }
details { background: var(--soft); padding: 0.5rem 1rem; margin-top: 0.5rem; overflow-x: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.warning { color: var(--warn); font-weight: 600; }
"""


def write_serve_report(path: Path, summary: Mapping[str, Any], requests: Sequence[Row]) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(serve_report(summary, requests), encoding="utf-8", newline="\n")


def serve_report(summary: Mapping[str, Any], requests: Sequence[Row]) -> str:
    """The page, from the tables that ``bench serve --output`` writes."""
    body = "\n".join(
        [
            _header(summary),
            _latency_table(summary),
            *(chart(f"chart-{number}", *entry) for number, entry in enumerate(_charts(summary, requests))),
            _settings(summary),
        ]
    )
    return page(_title(summary), body)


def page(title: str, body: str) -> str:
    """A whole file around ``body``, which is HTML already; ``title`` is text."""
    scripts = [_script_text(get_plotlyjs()), _DRAW_SCRIPT]
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style></head>",
            f"<body><main>{body}</main>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _script_text(script: str) -> str:
    """A script as a browser reads it from the page: its line ends are normalised there, and a closing tag would end it."""
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    if "</script" in text.lower() or "<!--" in text:
        text = text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return text


def _title(summary: Mapping[str, Any]) -> str:
    return f"{summary['model']} under load, {summary['date']}"


def _header(summary: Mapping[str, Any]) -> str:
    served = (
        f"{summary['finished']:,} of {summary['requests']:,} requests finished in {number(summary['duration_s'])} s: "
        f"{number(summary['requests_per_s'])} req/s, {number(summary['output_tokens_per_s'])} output tokens/s "
        f"(peak {number(summary['peak_output_tokens_per_s'])})."
    )
    lines = [f"<h1>{escape(_title(summary))}</h1>", f"<p>{escape(served)}</p>"]
    if summary["failed"] or summary["cancelled"]:
        failed = f"{summary['failed']:,} failed ({summary['timed_out']:,} by time-out), {summary['cancelled']:,} cancelled by the client."
        lines.append(f'<p class="warning">{escape(failed)}</p>')
    if summary["goodput_share"] is not None:
        good = f"Goodput {number(summary['goodput'])} req/s: {summary['goodput_share']:.1%} of the requests are within every limit."
        lines.append(f"<p>{escape(good)}</p>")
    lines += [f'<p class="warning">Warning: {escape(str(text))}</p>' for text in summary["warnings"]]
    lines += [f"<pre>{escape(str(text))}</pre>" for text in summary["error_examples"]]
    return "\n".join(lines)


def _latency_table(summary: Mapping[str, Any]) -> str:
    rows = []
    for key, name, scale in (
        ("ttft_s", "TTFT (ms)", 1e3),
        ("ttst_s", "second token (ms)", 1e3),
        ("itl_s", "ITL (ms)", 1e3),
        ("tpot_s", "TPOT (ms)", 1e3),
        ("e2e_s", "E2E (ms)", 1e3),
        ("output_tokens_per_s_per_user", "tokens/s per user", 1.0),
        ("prefill_tokens_per_s_per_user", "prefill tokens/s per user", 1.0),
        ("schedule_slip_s", "schedule slip (ms)", 1e3),
    ):
        values = summary[key]
        if values["count"]:
            cells = [number(values[column] * scale) for column in ("mean", "p50", "p90", "p99", "max")]
            rows.append([name, *cells, f"{values['count']:,}"])
    return "<h2>Latencies</h2>\n" + table(["", "mean", "p50", "p90", "p99", "max", "count"], rows)


Chart = tuple[str, go.Figure, Sequence[str], Sequence[Sequence[object]]]


def _charts(summary: Mapping[str, Any], requests: Sequence[Row]) -> Iterator[Chart]:
    """(caption, figure, columns, rows) of each chart."""
    slo = summary["slo"] or {}
    for key, label, limit_key in figures.LATENCIES:
        ordered = figures.values_ms(requests, key)
        limit_s = slo.get(limit_key)
        rows = [[f"{share:.0%}", number(ordered[place(ordered, share)])] for share in SHARES] if ordered else []
        yield _cdf_caption(label, ordered, limit_s), figures.cdf(requests, key, label, limit_s), ["share", f"{label} (ms)"], rows
    windows = summary["windows"]
    mean, peak = summary["output_tokens_per_s"], summary["peak_output_tokens_per_s"]
    table = [[number(row["time_s"]), number(row["output_tokens_per_s"]), number(row["concurrency"])] for row in windows]
    columns = ["time (s)", "output tokens/s", "requests running"]
    yield (
        f"Output throughput: mean {number(mean)} tokens/s, peak {number(peak)} in one window",
        figures.throughput(windows, mean),
        columns,
        table,
    )
    running = summary["concurrency"]
    yield (
        f"Requests running: mean {number(running['mean'])}, peak {number(running['peak'])}",
        figures.concurrency(windows, summary["max_concurrency"]),
        columns,
        table,
    )
    yield _timeline_caption(requests), figures.timeline(requests), *_request_table(requests)


def _cdf_caption(label: str, ordered: Sequence[float], limit_s: float | None) -> str:
    if not ordered:
        return f"{label}: no request has one"
    text = f"{label}: half are within {number(ordered[place(ordered, 0.5)])} ms, 99 % within {number(ordered[place(ordered, 0.99)])} ms"
    if limit_s is not None:
        within = sum(value <= limit_s * 1e3 for value in ordered)
        text += f"; {within / len(ordered):.1%} keep the limit of {limit_s * 1e3:g} ms"
    return f"{text} (n = {len(ordered):,})"


def place(ordered: Sequence[float], share: float) -> int:
    """The first value that so many are at or below."""
    return max(0, math.ceil(round(share * len(ordered), 6)) - 1)


def _timeline_caption(requests: Sequence[Row]) -> str:
    ends: dict[str, int] = {}
    for row in requests:
        ends[figures.outcome(row)] = ends.get(figures.outcome(row), 0) + 1
    text = "Each request from its sending to its end: " + (", ".join(f"{number:,} {name}" for name, number in ends.items()) or "none")
    if len(requests) > figures.MAX_TIMELINE_REQUESTS:
        text += f" ({figures.MAX_TIMELINE_REQUESTS} of {len(requests):,} drawn, evenly spread)"
    return text


def _request_table(requests: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
    columns = ["request", "sent (s)", "TTFT (ms)", "TPOT (ms)", "E2E (ms)", "prompt", "cached", "output", "end"]
    rows: list[list[object]] = [
        [
            row["index"],
            number(row["sent_s"]),
            *(number(None if row[key] is None else row[key] * 1e3) for key in ("ttft_s", "tpot_s", "e2e_s")),
            *(f"{row[key]:,}" for key in ("prompt_tokens", "cached_tokens", "output_tokens")),
            row["outcome"],
        ]
        for row in requests
    ]
    return columns, rows


def chart(name: str, caption: str, figure: go.Figure, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    # In a data block nothing is executed; "<" is written as an escape so that no text can end it.
    data = figure.to_json().replace("<", "\\u003c")
    return "\n".join(
        [
            f'<figure aria-labelledby="{name}-caption"><figcaption id="{name}-caption">{escape(caption)}</figcaption>',
            f'<div class="chart" id="{name}" role="img" aria-label="{escape(caption)}"></div>',
            f'<script type="application/json" id="{name}-data">{data}</script>',
            f"<details><summary>The numbers as a table</summary>{table(columns, rows)}</details></figure>",
        ]
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows[:MAX_TABLE_ROWS])
    more = f"<p>{len(rows) - MAX_TABLE_ROWS:,} more rows are in the JSON files.</p>" if len(rows) > MAX_TABLE_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _settings(summary: Mapping[str, Any]) -> str:
    keys = (
        *(
            "version",
            "date",
            "base_url",
            "endpoint",
            "model",
            "loop",
            "max_concurrency",
            "duration_limit_s",
            "timeout_s",
            "warmup_requests",
        ),
        *("ignore_eos", "temperature", "extra_body", "prompts_from", "workload", "slo", "token_counts_from", "unique_prompts", "errors"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "client_cpu_share"),
    )
    shown = {key: summary[key] for key in keys}
    return f"<h2>Settings</h2>\n<pre>{escape(json.dumps(shown, indent=2, ensure_ascii=False))}</pre>"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
