"""Times of recorded workloads against the standard library's calendar."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.trace_rows import azure_row

EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))


@settings(max_examples=200, deadline=None)
@given(st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 12, 31), timezones=OFFSETS))
def test_a_moment_is_what_the_calendar_says(moment: datetime.datetime) -> None:
    row = azure_row("here", f"{moment.isoformat(' ')},5,6")
    assert row.arrival_s == pytest.approx((moment - EPOCH).total_seconds(), rel=1e-12, abs=1e-6)


@pytest.mark.parametrize("day", ["2000-02-29", "2024-02-29", "1900-03-01", "2000-03-01", "2023-12-31"])
def test_days_around_the_leap_years(day: str) -> None:
    row = azure_row("here", f"{day} 12:00:00.5,5,6")
    assert row.arrival_s == (datetime.datetime.fromisoformat(f"{day}T12:00:00.5+00:00") - EPOCH).total_seconds()
