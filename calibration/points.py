"""Measured points: seconds of an operation at a shape. What microbenchmarks and other projects' tables give; the fit reads them.

One ``OpPoints`` an operation, its columns dense: ``numbers`` (shape sizes, named with their units where they have one) and ``labels``
(data types, kernels, versions). No two points of an operation agree in everything but seconds and version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from calibration.errors import TraceError
from calibration.storage import read_parquet, write_parquet
from calibration.trace import SCHEMA_VERSION, Names, Provenance
from engine.core.specs import COMPONENTS

POINTS = "points"
MAX_POINTS = 50_000_000
MAX_SECONDS = 3600.0
_NUMBER, _LABEL = "n:", "l:"  # column prefixes on disk, so that no name of a shape collides with ours


class OpInfo(msgspec.Struct, frozen=True):
    """What an operation is. ``covers`` are the components whose work it holds (a module holds several), ``component`` the chief one."""

    component: str
    covers: tuple[str, ...]
    note: str = ""
    num_dropped: int = 0  # rows whose seconds were no positive finite number
    num_merged: int = 0  # rows of the same shape: older versions, or repetitions of which the median stands


@dataclass(frozen=True, slots=True)
class LabelColumn:
    codes: NDArray[np.int32]
    names: tuple[str, ...]

    def equals(self, name: str) -> NDArray[np.bool_]:
        """Where the label is ``name``; nowhere if no row has it."""
        return self.codes == self.names.index(name) if name in self.names else np.zeros(len(self.codes), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class OpPoints:
    """Points of one operation. ``numbers`` are float64, exact for integers below 2**53."""

    info: OpInfo
    seconds: NDArray[np.float64]
    numbers: Mapping[str, NDArray[np.float64]]
    labels: Mapping[str, LabelColumn]

    def __len__(self) -> int:
        return len(self.seconds)

    def select(self, mask: NDArray[np.bool_]) -> OpPoints:
        labels = {name: LabelColumn(column.codes[mask], column.names) for name, column in self.labels.items()}
        return OpPoints(self.info, self.seconds[mask], {name: values[mask] for name, values in self.numbers.items()}, labels)


@dataclass(frozen=True, slots=True)
class PointTable:
    ops: Mapping[str, OpPoints]
    sources: tuple[Provenance, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ops.values()))

    def of_component(self, component: str) -> dict[str, OpPoints]:
        """The operations whose chief component this is."""
        return {name: points for name, points in self.ops.items() if points.info.component == component}

    def check(self) -> PointTable:
        """Raise TraceError for an empty table, a column of another length or seconds that cannot be; returns itself."""
        source = ", ".join(sorted({item.source for item in self.sources})[:3])
        if not 0 < len(self) <= MAX_POINTS:
            raise TraceError(f"{source}: {len(self)} points; allowed: 1 to {MAX_POINTS}")
        for name, points in self.ops.items():
            unknown = [component for component in (points.info.component, *points.info.covers) if component not in COMPONENTS]
            if unknown:
                raise TraceError(f"{source}: operation {name!r:.60} names unknown components {unknown[:5]}")
            lengths = [len(values) for values in points.numbers.values()] + [len(column.codes) for column in points.labels.values()]
            if set(lengths) - {len(points)}:
                raise TraceError(f"{source}: columns of operation {name!r:.60} differ in length")
            wrong = np.flatnonzero(~((points.seconds > 0) & (points.seconds <= MAX_SECONDS)))
            if len(wrong):
                found_s = points.seconds[wrong[0]]
                raise TraceError(
                    f"{source}: operation {name!r:.60} takes {found_s:g} s (point {wrong[0]}); allowed: above 0 to {MAX_SECONDS:g}"
                )
            for column, values in points.numbers.items():
                if not np.isfinite(values).all():
                    raise TraceError(f"{source}: {column!r:.60} of operation {name!r:.60} is not finite everywhere")
        return self


class PointHeader(msgspec.Struct, frozen=True):
    sources: tuple[Provenance, ...]
    ops: dict[str, OpInfo]
    kind: str = POINTS
    schema_version: int = SCHEMA_VERSION


def write_points(path: Path, table: PointTable) -> None:
    """Store points of all operations in one parquet file; columns that an operation has not are null."""
    table.check()
    parts = []
    for name, points in table.ops.items():
        columns: dict[str, Any] = {"op": pa.array([name] * len(points)).dictionary_encode(), "seconds": pa.array(points.seconds)}
        columns |= {_NUMBER + key: pa.array(values) for key, values in points.numbers.items()}
        columns |= {
            _LABEL + key: pa.DictionaryArray.from_arrays(pa.array(label.codes), pa.array(label.names, pa.string()))
            for key, label in points.labels.items()
        }
        parts.append(pa.table(columns))
    rows = pa.concat_tables(parts, promote_options="default")
    write_parquet(path, rows, PointHeader(table.sources, {name: points.info for name, points in table.ops.items()}))


def read_points(path: Path) -> PointTable:
    """Load and check a point table. Raises TraceError."""
    header, rows = read_parquet(path, POINTS, PointHeader, MAX_POINTS)
    try:
        op = rows["op"].cast(pa.string()).combine_chunks()
        ops = {name: _op_points(rows.filter(pc.equal(op, name)), info) for name, info in header.ops.items()}
        table = PointTable(ops, header.sources)
        if len(table) != rows.num_rows:
            raise ValueError("rows of operations that the header does not name")
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise TraceError(f"{path} is no point table of this release: {error}; import it again") from error
    return table.check()


def _op_points(rows: pa.Table, info: OpInfo) -> OpPoints:
    numbers: dict[str, NDArray[np.float64]] = {}
    labels: dict[str, LabelColumn] = {}
    for column in rows.column_names:
        values = rows[column]
        if values.null_count == rows.num_rows and rows.num_rows:
            continue
        if column.startswith(_NUMBER):
            numbers[column.removeprefix(_NUMBER)] = values.to_numpy().astype(np.float64)
        elif column.startswith(_LABEL):
            labels[column.removeprefix(_LABEL)] = label_column(values)
    return OpPoints(info, rows["seconds"].to_numpy().astype(np.float64), numbers, labels)


def label_column(values: pa.ChunkedArray) -> LabelColumn:
    """Codes in order of appearance; a missing label is the empty one."""
    array = values.cast(pa.string()).combine_chunks().fill_null("").dictionary_encode()
    names = Names("labels")
    codes = np.array([names.code(name) for name in array.dictionary.to_pylist()], dtype=np.int32)
    return LabelColumn(codes[array.indices.to_numpy(zero_copy_only=False)], names.names)


def summarise_points(table: PointTable) -> dict[str, Any]:
    """What ``trace show`` prints of a point table."""
    return {
        "num_points": len(table),
        "ops": {
            name: {
                "component": points.info.component,
                "covers": points.info.covers,
                "num_points": len(points),
                "seconds_min": float(points.seconds.min()) if len(points) else None,
                "seconds_median": float(np.median(points.seconds)) if len(points) else None,
                "seconds_max": float(points.seconds.max()) if len(points) else None,
                "numbers": {key: _range(values) for key, values in points.numbers.items()},
                "labels": {key: sorted(column.names)[:50] for key, column in points.labels.items()},
                "num_dropped": points.info.num_dropped,
                "num_merged": points.info.num_merged,
                "note": points.info.note,
            }
            for name, points in table.ops.items()
        },
        "sources": table.sources,
    }


def _range(values: NDArray[np.float64]) -> list[float]:
    return [float(values.min()), float(values.max())] if len(values) else [math.nan, math.nan]
