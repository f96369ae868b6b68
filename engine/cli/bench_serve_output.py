"""What ``bench serve`` leaves behind: a table for people; the summary, the requests and the report as files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.cli.common import log
from engine.core.errors import ConfigError
from engine.writing import check_file, check_folder, whole_file

if TYPE_CHECKING:
    from engine.bench.record import RequestRecord
    from engine.bench.runner import Run
    from engine.bench.summary import ServeSummary
    from engine.core.metrics import Distribution


# (path, summary, one row per request); raises ImportError where the drawing library is not installed.
ReportWriter = Callable[[Path, Mapping[str, Any], Sequence[Mapping[str, Any]]], None]


def output_paths(output: str) -> tuple[Path, Path, Path]:
    """(summary, requests, report) for ``DIR``, or ``FILE.json`` or ``FILE.html`` and the others beside it."""
    path = Path(output)
    if path.suffix in (".json", ".html") and not path.is_dir():
        return path.with_suffix(".json"), path.with_suffix(".requests.jsonl"), path.with_suffix(".html")
    return path / "summary.json", path / "requests.jsonl", path / "report.html"


def check_output(output: str) -> None:
    """Before the run: a file that cannot be written after it would lose the run. Makes the folder; raises ConfigError."""
    paths = output_paths(output)
    if paths[0].parent == Path(output):
        check_folder("--output", Path(output), "summary.json, requests.jsonl and report.html (or name FILE.json or FILE.html)")
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from None
    for path in paths:
        check_file("--output", path)


def write_output(output: str, facts: Mapping[str, Any], summary: ServeSummary, run: Run, write_report: ReportWriter | None) -> None:
    """Raises OutputError where a file cannot be written; those before it are there."""
    summary_path, requests_path, report_path = output_paths(output)
    table: dict[str, Any] = {**facts, **msgspec.to_builtins(summary)}
    rows = [request_row(record, run.start_s) for record in sorted(run.records, key=lambda record: record.metrics.arrived_s)]
    with whole_file("--output", summary_path) as beside:
        beside.write_text(json.dumps(table, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with whole_file("--output", requests_path) as beside, beside.open("wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")
    log(f"wrote {summary_path} and {requests_path}")
    if write_report is not None:
        try:
            with whole_file("--output", report_path) as beside:
                write_report(beside, table, rows)
            log(f"wrote {report_path}")
        except ImportError as error:
            log(f"no HTML report: {error}; pip install 'twinfer[dashboards]'")


def request_row(record: RequestRecord, start_s: float) -> dict[str, Any]:
    """One request as plain values; times are seconds from the start of the run."""
    metrics = record.metrics
    return {
        "index": metrics.request,
        "scheduled_s": None if record.scheduled_s is None else record.scheduled_s - start_s,
        "sent_s": metrics.arrived_s - start_s,
        "first_token_s": None if metrics.first_token_s is None else metrics.first_token_s - start_s,
        "ended_s": None if metrics.finished_s is None else metrics.finished_s - start_s,
        "outcome": "cancelled" if record.cancelled else record.error or metrics.reason,
        "message": record.message,
        "status": record.status,
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s,
        "e2e_s": metrics.e2e_s,
        "itl_s": metrics.itl_s,
        "prompt_tokens": metrics.num_prompt_tokens,
        "cached_tokens": metrics.num_cached_tokens,
        "output_tokens": metrics.num_output_tokens,
        "asked_prompt_tokens": record.asked_input_tokens,
        "asked_output_tokens": record.asked_output_tokens,
        "token_counts_from": record.count_source,
        "events": record.num_events,
    }


def print_summary(facts: Mapping[str, Any], summary: ServeSummary) -> None:
    """One screen: what went wrong first, then what was served."""
    lines = [f"{facts['model']} at {facts['base_url']}, {facts['endpoint']}, {_loop(facts)}"]
    headline = f"{summary.requests} requests: {summary.finished} finished, {summary.failed} failed"
    if summary.timed_out:
        headline += f" ({summary.timed_out} timed out)"
    if summary.cancelled:
        headline += f", {summary.cancelled} cancelled by the client"
    lines.append(f"{headline}; {summary.unique_prompts} different prompts in {_plain(summary.duration_s)} s")
    if facts["warmup_requests"]:
        lines.append(f"{facts['warmup_requests']} warm-up requests are not counted")
    lines.append("")
    for name, value, unit in (
        ("request throughput", summary.requests_per_s, "req/s"),
        ("goodput", summary.goodput, "req/s"),
        ("output throughput", summary.output_tokens_per_s, "tokens/s"),
        ("  peak", summary.peak_output_tokens_per_s, "tokens/s"),
        ("prompt throughput", summary.prompt_tokens_per_s, "tokens/s"),
        ("concurrency, mean", summary.concurrency["mean"], ""),
        ("concurrency, peak", summary.concurrency["peak"], ""),
        ("prompt tokens", summary.prompt_tokens, f"({summary.cached_tokens} cached)"),
        ("output tokens", summary.output_tokens, f"(counted from {', '.join(summary.token_counts_from) or 'nothing'})"),
    ):
        if value is not None:
            lines.append(f"{name:<22}{_plain(value):>12} {unit}")
    if summary.goodput_share is not None:
        lines.append(f"{'within every limit':<22}{summary.goodput_share:>12.2%} of the requests")
    lines += ["", f"{'':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}{'count':>9}"]
    for name, values, scale in (
        ("TTFT, ms", summary.ttft_s, 1e3),
        ("second token, ms", summary.ttst_s, 1e3),
        ("ITL, ms", summary.itl_s, 1e3),
        ("TPOT, ms", summary.tpot_s, 1e3),
        ("E2E, ms", summary.e2e_s, 1e3),
        ("tokens/s per user", summary.output_tokens_per_s_per_user, 1.0),
        ("prefill tokens/s", summary.prefill_tokens_per_s_per_user, 1.0),
        ("schedule slip, ms", summary.schedule_slip_s, 1e3),
    ):
        if values.count:
            lines.append(_row(name, values, scale))
    print("\n".join(lines))
    sys.stdout.flush()
    for text in (*summary.warnings, *summary.error_examples):
        log(f"warning: {text}")


def _loop(facts: Mapping[str, Any]) -> str:
    if facts["loop"] == "closed":
        return f"closed loop of {facts['max_concurrency']}"
    rate = facts["workload"]["request_rate_per_s"]
    source = f"{rate} requests/s" if rate is not None else f"trace at speed {facts['workload']['trace_speed']:g}"
    cap = "" if facts["max_concurrency"] is None else f", at most {facts['max_concurrency']} at once"
    return f"open loop, {source}{cap}"


def _row(name: str, values: Distribution, scale: float) -> str:
    cells = (values.mean, values.p50, values.p90, values.p99, values.max)
    return f"{name:<22}" + "".join(f"{_plain(cell * scale if cell is not None else None):>10}" for cell in cells) + f"{values.count:>9}"


def _plain(value: float | None) -> str:
    """Four significant digits, whole numbers as they are."""
    if value is None:
        return "-"
    if isinstance(value, int) or (abs(value) >= 1000 and abs(value) < 1e15):
        return f"{value:,.0f}"
    return f"{value:.4g}"
