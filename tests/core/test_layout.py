"""The layout grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import ConfigError
from engine.core.layout import Deployment, Layout, Replicas, parse_layout
from tests.core.test_counts import flash
from tests.core.test_tensors import dense_spec


@pytest.mark.parametrize(
    ("text", "gpus", "canonical"),
    [
        ("tp1dp64ep64", 64, "tp1dp64ep64"),
        ("tp2dp4pp2ep8", 16, "tp2dp4pp2ep8"),
        ("4x(tp1dp8ep8)", 32, "4x(tp1dp8ep8)"),
        ("1x(TP1dp8ep8)", 8, "tp1dp8ep8"),
        ("P2x(tp1dp8ep8)+D1x(tp1dp32ep32)", 48, "P2x(tp1dp8ep8)+D1x(tp1dp32ep32)"),
        ("tp8", 8, "tp8dp1ep1"),
    ],
)
def test_parse_and_format(text: str, gpus: int, canonical: str) -> None:
    layout = parse_layout(text)
    assert (layout.num_gpus, str(layout)) == (gpus, canonical)
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp1dp8ep16", "ep 16 does not divide tp.dp = 8"),
        ("tp1dp8ep3", "does not divide"),
        ("tp0dp1ep1", "tp is 0"),
        ("tp1tp2", "tp is given twice"),
        ("", "not a unit"),
        ("8", "not a unit"),
        ("xx1", "neither a unit"),
        ("0x(tp1)", "replicas is 0"),
        ("4x(tp1", "neither a unit"),
        ("P1x(tp1)+P1x(tp1)", "a split is written"),
        ("P1x(tp1)+D1x(tp1)+D1x(tp1)", "a split is written"),
        ("tp99999999999999999999", "tp is 9"),
    ],
)
def test_refusals_say_why(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_layout(text)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_round_trip(tp: int, dp: int, pp: int, count: int, split: bool) -> None:
    group = Replicas(Layout(tp, dp, tp * dp, pp), count)
    layout = Deployment(group, group if split else None)
    assert parse_layout(str(layout)) == layout
    assert group.unit.expert_tp == 1


def test_what_is_not_runnable_says_so() -> None:
    assert parse_layout("tp1dp1ep1").why_not_runnable() is None
    assert "pipeline" in (parse_layout("pp2").why_not_runnable() or "")
    assert "prefill/decode" in (parse_layout("P1x(tp1)+D1x(tp1)").why_not_runnable() or "")
    assert parse_layout("tp2dp4ep8").why_not_runnable() is None
    assert "not 2" in (parse_layout("2x(tp1dp8ep8)").why_not_runnable() or "")


def test_against_a_model() -> None:
    parse_layout("P1x(tp1dp32ep32)+D1x(tp8dp1ep8)").validate_for(flash())
    with pytest.raises(ConfigError, match=r"n_routed_experts 384 of v4\.1-flash is not a multiple of ep = 5"):
        parse_layout("tp1dp5ep5").validate_for(flash())
    with pytest.raises(ConfigError, match="has no experts"):
        parse_layout("tp1dp2ep2").validate_for(dense_spec())
