"""A kernel table from CSV, for tools without an importer of their own.

The first line names the columns, in any order; the unit is part of the name:

    kernel                                      required: the kernel's name
    start_s | start_ms | start_us | start_ns    required, one of them: from any common instant
    duration_s | ..._ms | ..._us | ..._ns       required: this or the end
    end_s | ..._ms | ..._us | ..._ns
    step, rank, stream                          step: integer or empty; rank: integer, default 0; stream: any name, default "0"
    component                                   a component's name, or empty: then the rules decide
    shapes                                      free text, such as [[8, 576], [576, 1536]]
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from calibration.errors import TraceError
from calibration.storage import file_sha256
from calibration.trace import MAX_NAME_CHARS, MAX_RANKS, MAX_STEP, KernelRows, KernelTable, Provenance
from engine.core.specs import COMPONENTS

# Decimal: nanoseconds since 1970 have more digits than a float.
UNITS_S = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")}
LARGEST_S = Decimal("1e12")
_OTHER_COLUMNS = ("kernel", "step", "rank", "stream", "component", "shapes")
_TIMES = {f"{what}_{unit}": (what, scale) for what in ("start", "duration", "end") for unit, scale in UNITS_S.items()}


def read_csv(path: Path, rank: int | None = None) -> KernelTable:
    """Raises TraceError with the line and column at fault."""
    sha256 = file_sha256(path)
    rows = KernelRows()
    base_s: Decimal | None = None
    csv.field_size_limit(MAX_NAME_CHARS * 16)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            times = _time_columns(path, reader.fieldnames or [])
            for row in reader:
                base_s = _add(rows, row, times, rank, base_s, f"{path}, line {reader.line_num}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is no CSV of UTF-8 text: {error}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not len(rows):
        raise TraceError(f"{path} has no rows below its column names")
    return rows.finish(Provenance(path.name, sha256, "csv"))


def _time_columns(path: Path, names: Sequence[str]) -> dict[str, tuple[str, Decimal]]:
    """start, duration, end -> (column, seconds per unit)."""
    unknown = [name for name in names if name not in _OTHER_COLUMNS and name not in _TIMES]
    if unknown or len(set(names)) != len(names):
        raise TraceError(
            f"{path}: columns {[str(name)[:40] for name in names][:20]}; known, once each: {', '.join(_OTHER_COLUMNS)}, {', '.join(_TIMES)}"
        )
    times: dict[str, tuple[str, Decimal]] = {}
    for name in names:
        if name in _TIMES:
            what, scale = _TIMES[name]
            if what in times:
                raise TraceError(f"{path}: {times[what][0]} and {name} are one thing; give one of them")
            times[what] = (name, scale)
    if "kernel" not in names or "start" not in times or ("duration" in times) == ("end" in times):
        raise TraceError(f"{path}: needed are the columns kernel, start_UNIT and either duration_UNIT or end_UNIT (UNIT: s, ms, us, ns)")
    return times


def _add(
    rows: KernelRows, row: dict[str, str], times: dict[str, tuple[str, Decimal]], rank: int | None, base_s: Decimal | None, where: str
) -> Decimal:
    """Add one row; starts count from the first one, which is returned."""
    if None in row or None in row.values():
        raise TraceError(f"{where}: the line has more or fewer fields than the first one")
    seconds = {what: _seconds(row[name], scale, f"{where}, {name}") for what, (name, scale) in times.items()}
    base_s = seconds["start"] if base_s is None else base_s
    duration_s = float(seconds["duration"] if "duration" in seconds else seconds["end"] - seconds["start"])
    if duration_s < 0:
        raise TraceError(f"{where}: the kernel lasts {duration_s:g} s; needed: not negative")
    component = row.get("component") or None
    if component is not None and component not in COMPONENTS:
        raise TraceError(f"{where}: component {component!r:.60} is unknown; known: {', '.join(COMPONENTS)}; empty: told by the rules")
    if not row["kernel"]:
        raise TraceError(f"{where}: kernel is empty")
    step = row.get("step") or None
    rows.add(
        start_s=float(seconds["start"] - base_s),
        duration_s=duration_s,
        rank=rank if rank is not None else _integer(row.get("rank") or "0", MAX_RANKS, f"{where}, rank"),
        stream=row.get("stream") or "0",
        kernel=row["kernel"],
        step=None if step is None else _integer(step, MAX_STEP, f"{where}, step"),
        component=component,
        shapes=row.get("shapes") or "",
    )
    return base_s


def _seconds(text: str, scale: Decimal, where: str) -> Decimal:
    try:
        value = Decimal(text) * scale
    except ArithmeticError:
        value = Decimal("NaN")
    if not value.is_finite() or abs(value) > LARGEST_S:
        raise TraceError(f"{where}: {text!r:.40} is no number of seconds up to {LARGEST_S}")
    return value


def _integer(text: str, limit: int, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < limit):
        raise TraceError(f"{where}: {text!r:.40}; needed: an integer from 0 to {limit - 1}")
    return int(text)
