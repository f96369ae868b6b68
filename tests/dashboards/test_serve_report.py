"""The report of a load run: figures of known tables, and a page that needs nothing and runs nothing of a stranger's."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dashboards import figures
from dashboards.report import serve_report, write_serve_report

EMPTY = {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def row(index: int, sent_s: float = 0.0, outcome: str = "stop", **values: Any) -> dict[str, Any]:
    fields = {
        "index": index, "sent_s": sent_s, "first_token_s": sent_s + 0.1, "ended_s": sent_s + 0.4, "outcome": outcome, "ttft_s": 0.1,
        "tpot_s": 0.05, "e2e_s": 0.4, "itl_s": [0.1, 0.2], "prompt_tokens": 5, "cached_tokens": 1, "output_tokens": 3,
    }  # fmt: skip
    return fields | values


def summary(**values: Any) -> dict[str, Any]:
    one = {"count": 2, "mean": 0.1, "p50": 0.1, "p90": 0.1, "p99": 0.1, "max": 0.1}
    latencies = ("ttft_s", "ttst_s", "itl_s", "tpot_s", "e2e_s", "output_tokens_per_s_per_user", "prefill_tokens_per_s_per_user")
    fields = {
        **dict.fromkeys(latencies, one), "schedule_slip_s": EMPTY, "model": "m", "date": "2026-01-02", "version": "0", "finished": 2,
        "requests": 2, "failed": 0, "timed_out": 0, "cancelled": 0, "duration_s": 2.0, "requests_per_s": 1.0, "output_tokens_per_s": 3.0,
        "peak_output_tokens_per_s": 4.0, "goodput": None, "goodput_share": None, "warnings": [], "error_examples": [], "slo": None,
        "windows": [{"time_s": at_s, "output_tokens_per_s": 3.0, "concurrency": 1.0} for at_s in (0.5, 1.5)],
        "concurrency": {"mean": 0.75, "peak": 2.0}, "max_concurrency": 2, "base_url": "http://x", "endpoint": "chat", "loop": "closed",
        "duration_limit_s": None, "timeout_s": 600.0, "warmup_requests": 0, "ignore_eos": False, "temperature": None, "extra_body": {},
        "prompts_from": "words", "workload": {}, "token_counts_from": {}, "unique_prompts": 2, "errors": {}, "prompt_tokens": 10,
        "cached_tokens": 2, "output_tokens": 6, "client_cpu_share": 0.1,
    }  # fmt: skip
    return fields | values


class Page(HTMLParser):
    """Counts of tags, the texts of scripts, what is named in attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.scripts: list[tuple[str | None, str]] = []
        self.links: list[str] = []
        self.policy = ""
        self._script: str | None = None
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if tag == "script":
            self._in_script, self._script = True, values.get("type")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append((self._script, data))


def test_a_page_needs_no_network_and_runs_only_its_own_scripts() -> None:
    page = Page(serve_report(summary(), [row(0), row(1)]))
    assert page.links == []
    executed = [text for kind, text in page.scripts if kind is None]
    assert len(executed) == 2
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in executed}
    allowed = re.search(r"script-src ([^;]*);", page.policy)
    assert allowed is not None
    assert set(allowed[1].split()) == hashes
    assert "default-src 'none'" in page.policy
    assert not any("\r" in text for text in executed)


def test_every_chart_has_a_caption_a_table_and_its_data() -> None:
    text = serve_report(summary(), [row(0), row(1)])
    page = Page(text)
    data = [json.loads(content) for kind, content in page.scripts if kind == "application/json"]
    assert len(data) == page.tags["figure"] == page.tags["figcaption"] == page.tags["details"] == 7
    assert all(figure["data"] for figure in data)
    assert "TTFT: half are within 100 ms, 99 % within 100 ms (n = 2)" in text


def test_strange_text_stays_text() -> None:
    rows = [row(0, outcome=EVIL), row(1)]
    text = serve_report(summary(model=EVIL, warnings=[EVIL], error_examples=[EVIL], extra_body={"x": EVIL}), rows)
    page = Page(text)
    assert page.tags.get("img") is None
    assert EVIL not in text
    assert html.escape(EVIL) in text
    assert sum(kind is None for kind, _ in page.scripts) == 2


def test_failures_and_limits_are_in_the_headline_and_the_captions() -> None:
    rows = [row(0), row(1, outcome="http_500", ttft_s=None, tpot_s=None, first_token_s=None, itl_s=[])]
    text = serve_report(summary(failed=1, finished=1, goodput=0.5, goodput_share=0.5, slo={"ttft_s": 0.05, "e2e_s": 0.5}), rows)
    assert "1 failed" in text
    assert "50.0% of the requests are within every limit" in text
    assert "0.0% keep the limit of 50 ms" in text
    assert "1 finished, 1 failed" in text


def test_a_run_of_nothing_is_drawn_too(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("ttft_s", "ttst_s", "itl_s", "tpot_s", "e2e_s"), EMPTY)
    absent = dict.fromkeys(("duration_s", "requests_per_s", "output_tokens_per_s", "peak_output_tokens_per_s"))
    path = tmp_path / "report.html"
    write_serve_report(path, summary(**nothing, **absent, windows=[], concurrency={"mean": None, "peak": 0.0}), [])
    assert "TTFT: no request has one" in path.read_text()


def test_curves_hold_the_values_and_the_limit() -> None:
    rows = [row(index, ttft_s=(index + 1) / 1e3) for index in range(4)]
    figure = figures.cdf(rows, "ttft_s", "TTFT", 0.0025)
    assert list(figure.data[0].x) == [1, 2, 3, 4]
    assert list(figure.data[0].y) == [0.25, 0.5, 0.75, 1.0]
    assert figure.layout.shapes[0].x0 == 2.5
    assert figure.layout.xaxis.title.text == "TTFT (ms)"


def test_latencies_are_of_the_same_requests_as_in_the_summary() -> None:
    rows = [row(0), row(1, outcome="cancelled", e2e_s=0.2), row(2, outcome="timeout", e2e_s=9.0)]
    assert len(figures.values_ms(rows, "ttft_s")) == 3
    assert figures.values_ms(rows, "e2e_s") == [400.0]
    assert len(figures.values_ms(rows, "itl_s")) == 6


@pytest.mark.parametrize("count", [1, 2, 999, 20_000])
def test_long_runs_are_thinned_with_both_ends(count: int) -> None:
    rows = [row(index, sent_s=float(index), ttft_s=float(index), itl_s=[]) for index in range(count)]
    curve = figures.cdf(rows, "ttft_s", "TTFT", None).data[0]
    assert len(curve.x) <= figures.MAX_CURVE_POINTS
    assert (curve.x[0], curve.x[-1], curve.y[-1]) == (0.0, (count - 1) * 1e3, 1.0)
    drawn = figures.thinned(rows, figures.MAX_TIMELINE_REQUESTS)
    assert (drawn[0], drawn[-1]) == (rows[0], rows[-1])
    assert len(drawn) == min(count, figures.MAX_TIMELINE_REQUESTS)
