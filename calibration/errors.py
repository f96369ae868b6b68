"""What is wrong with a file of measurements: one line that says what, where, and what to do about it."""

from __future__ import annotations

from engine.core.errors import TwinferError


class TraceError(TwinferError):
    """A trace or table is broken, foreign, empty or outside the bounds: bad input. Nothing was written."""


class ReplayError(TraceError):
    """A table does not reproduce its own trace, so nothing may be predicted from it."""
