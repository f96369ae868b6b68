"""Counters of an engine, read back from what its server says."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry

from calibration.measured import Counted, DraftsCounted, parse_acceptance, read_counted, read_expert_tokens
from engine.api.metrics_families import FAMILIES, PREFIX, render
from engine.core.errors import ConfigError
from engine.core.metrics import DraftCounts
from engine.core.rank_counters import RankCounters


class _Metrics:
    """What the families read, with these counts alone."""

    def __init__(self, experts: tuple[tuple[int, ...], ...], drafts: DraftCounts) -> None:
        self.ranks, self.drafts = RankCounters(expert_choices=experts), drafts


class _Reading:
    def __init__(self, metrics: _Metrics) -> None:
        self.metrics = metrics


class _Collector:
    def __init__(self, reading: _Reading) -> None:
        self.reading = reading

    def collect(self):  # type: ignore[no-untyped-def]
        names = ("expert_tokens", "spec_decode_draft_tokens_per_position", "spec_decode_accepted_tokens_per_position")
        for family in FAMILIES:
            if family.name.removeprefix(PREFIX) in names:
                yield render(family, self.reading)  # type: ignore[arg-type]


EXPERTS = ((5, 0, 7, 12_000_000_000), (1, 2, 3, 4), (9, 9))
DRAFTS = DraftCounts(100, [100, 100, 100], [90, 72, 0])


def test_the_servers_own_metrics_are_read(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(_Collector(_Reading(_Metrics(EXPERTS, DRAFTS))))
    path = tmp_path / "metrics.txt"
    path.write_bytes(generate_latest(registry))
    assert b'twinfer_expert_tokens_total{expert="3",layer="0"}' in path.read_bytes() or b'layer="0",expert="3"' in path.read_bytes()
    assert read_counted(path) == Counted(EXPERTS, DraftsCounted((100, 100, 100), (90, 72, 0)))
    assert parse_acceptance(f"measured:{path}", 2) == pytest.approx((0.9, 0.8))


def test_json_of_both_kinds_is_read(tmp_path: Path) -> None:
    info, experts = tmp_path / "info.json", tmp_path / "experts.json"
    info.write_bytes(msgspec.json.encode({"model": "m", "stats": {"running": 1}, "drafts": DRAFTS.summary()}))
    experts.write_text(json.dumps({"expert_tokens": EXPERTS}))
    assert parse_acceptance(f"measured:{info}", 3) == pytest.approx((0.9, 0.8, 0.0))
    assert read_expert_tokens(experts) == EXPERTS


def test_an_acceptance_is_a_mean_or_shares() -> None:
    assert parse_acceptance("0.75", 2) == pytest.approx((0.5, 0.5))
    assert parse_acceptance("0.9,0.72", 2) == pytest.approx((0.9, 0.8))
    assert parse_acceptance("0", 0) == ()


@pytest.mark.parametrize(
    ("text", "draft_tokens", "words"),
    [
        ("nan", 2, "--acceptance: acceptance is nan"),
        ("1", 0, "a mean from 0 to the draft tokens = 0"),
        ("often", 2, "--acceptance is 'often'"),
        ("0.9,", 2, "--acceptance is '0.9,'"),
        ("0.5,0.9", 2, "position 1 is 0.9"),
        ("measured:/nowhere/at/all", 2, "no such file"),
    ],
)
def test_other_acceptances_are_refused(text: str, draft_tokens: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_acceptance(text, draft_tokens)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no tokens of experts"),
        ("{", "needed: the answer of /metrics"),
        ('{"expert_tokens": [[1, -1]]}', "needed: the answer of /metrics"),
        ('{"expert_tokens": [[1, 1.5]]}', "needed: the answer of /metrics"),
        ('{"expert_tokens": [[0, 0]]}', "no tokens of experts"),
        ('{"expert_tokens": [[1, 2], []]}', "no tokens of experts"),
        ('twinfer_expert_tokens_total{layer="0",expert="1"} 5.0', "needed: 0, 1, 2"),
        ('twinfer_expert_tokens_total{layer="1",expert="0"} 5.0', "needed: 0, 1, 2"),
        ('twinfer_expert_tokens_total{layer="0",expert="0"} 5.5', "no count"),
        ('twinfer_expert_tokens_total{layer="0",expert="0"} 1e99', "no count"),
        ('twinfer_expert_tokens_total{layer="0",expert="0"} 1e+e', "no count"),
        ('twinfer_expert_tokens_total{layer="0",layer="0"} 1.0', "no tokens of experts"),
    ],
)
def test_files_that_count_no_experts_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "counts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_expert_tokens(path)


def test_counts_of_too_few_positions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "info.json"
    path.write_bytes(msgspec.json.encode({"drafts": DRAFTS.summary()}))
    with pytest.raises(ConfigError, match="3 positions, fewer than the draft tokens = 4"):
        parse_acceptance(f"measured:{path}", 4)
