"""A kernel table from an nsys SQLite export (``nsys export --type sqlite``). Times in the file are integer nanoseconds.

Kernels inside CUDA graphs are there only if the recording had ``--cuda-graph-trace=node``. A kernel belongs to the innermost NVTX range
around its launch, on the launching thread. A rank is a (process, device) pair, in the order of their numbers.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from calibration.errors import TraceError
from calibration.ranges import Ranges, component_code, innermost, join_ids, step_of
from calibration.storage import file_sha256
from calibration.trace import MAX_KERNELS, MAX_NAME_CHARS, KernelRows, KernelTable, Names, Provenance
from engine.core.specs import COMPONENTS

SQLITE_MAGIC = b"SQLite format 3\x00"
KERNELS, STRINGS, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "Memset"}
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
# NVTX_EVENTS.eventType of ranges: push/pop and start/end.
RANGE_TYPES = (59, 60)
# A global thread id holds the process in its upper bits.
_THREAD_MASK = 0xFFFFFF
_ROWS_AT_ONCE = 10_000
_SCALE_S = 1e-9
_MAX_NS = 1 << 62
# Reading plain tables takes tens of virtual-machine steps a row: far more is a file made to keep us busy.
_STEPS_PER_CALL = 1_000_000
_MAX_CALLS = 20_000


def read_nsys(path: Path, rank: int | None = None) -> KernelTable:
    """Raises TraceError for a database that is broken, foreign or empty, or holds impossible numbers."""
    sha256 = file_sha256(path)
    try:
        # Immutable: nothing is written beside the file either, and a read-only folder will do.
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
            return _read(database, path, sha256, rank)
    except sqlite3.Error as error:
        raise TraceError(f"{path} is a broken SQLite file: {error}; export it again with `nsys export --type sqlite`") from error


class _Database:
    """Rows of checked tables, as integers."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database, self.path = database, path
        self._calls = 0
        database.execute("PRAGMA trusted_schema = OFF")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
        database.set_progress_handler(self._count_steps, _STEPS_PER_CALL)
        # Views and virtual tables would run whatever the file says; an export has neither.
        self.columns = {
            str(name): {str(row[1]) for row in database.execute(f"PRAGMA table_info({_quoted(str(name))})")}
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%'")
        }

    def has(self, table: str, *columns: str) -> bool:
        return set(columns) <= self.columns.get(table, set()) and table in self.columns

    def need(self, table: str, *columns: str) -> None:
        if not self.has(table, *columns):
            missing = f"table {table}" if table not in self.columns else f"columns {sorted(set(columns) - self.columns[table])} of {table}"
            raise TraceError(f"{self.path} has no {missing}: it is not an nsys export with CUDA kernels (trace with --trace=cuda,nvtx)")

    def rows(self, table: str, columns: tuple[str, ...], where: str = "") -> Iterator[tuple[Any, ...]]:
        cursor = self._database.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(table)} {where}")
        count = 0
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            count += len(rows)
            if count > MAX_KERNELS:
                raise TraceError(f"{self.path}: {table} has more than {MAX_KERNELS} rows; record less")
            yield from rows

    def integer(self, value: Any, table: str, column: str) -> int:
        if not isinstance(value, int) or not -_MAX_NS < value < _MAX_NS:
            raise TraceError(f"{self.path}: {table}.{column} is {value!r:.40}; needed: an integer")
        return value

    def span(self, table: str, start: Any, end: Any) -> tuple[int, int]:
        begin, finish = self.integer(start, table, "start"), self.integer(end, table, "end")
        if finish < begin:
            raise TraceError(f"{self.path}: a row of {table} ends at {finish} ns, before it starts at {begin} ns")
        return begin, finish

    def _count_steps(self) -> int:
        self._calls += 1
        return 1 if self._calls > _MAX_CALLS else 0


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class _Work:
    """Kernels and copies, in 56 bytes each."""

    def __init__(self) -> None:
        self.start, self.end = array("q"), array("q")
        self.process, self.device, self.stream = array("q"), array("q"), array("q")
        self.correlation, self.name = array("q"), array("q")
        self.names = Names("kernel names")

    def __len__(self) -> int:
        return len(self.start)

    def add(self, database: _Database, table: str, row: Sequence[Any], name: str) -> None:
        """``row``: start, end, process, device, stream, correlation, as the columns ``_WORK_COLUMNS`` of ``table``."""
        begin, finish = database.span(table, row[0], row[1])
        self.start.append(begin)
        self.end.append(finish)
        for column, value, of in zip((self.process, self.device, self.stream, self.correlation), row[2:6], _WORK_COLUMNS[2:], strict=True):
            column.append(database.integer(value, table, of))
        self.name.append(self.names.code(name))


_WORK_COLUMNS = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")


def _read(connection: sqlite3.Connection, path: Path, sha256: str, rank: int | None) -> KernelTable:
    database = _Database(connection, path)
    database.need(KERNELS, *_WORK_COLUMNS, "demangledName")
    database.need(STRINGS, "id", "value")
    strings = {key: str(value)[:MAX_NAME_CHARS] for key, value in database.rows(STRINGS, ("id", "value"))}
    work = _work(database, strings)
    if not len(work):
        raise TraceError(f"{path} holds no kernels; record with --trace=cuda,nvtx (and --cuda-graph-trace=node)")
    base = min(work.start)
    components, steps = _ranges(database, strings, base)
    starts, tracks = _launches(database, work, base)
    codes = innermost(components.timelines(), tracks, starts)
    step_codes = steps.timeline().at(starts)
    places = sorted(set(zip(work.process, work.device, strict=True)))
    if rank is not None and len(places) > 1:
        raise TraceError(f"{path} holds {len(places)} (process, device) pairs, each a rank of its own; leave --rank away")
    ranks = {place: index if rank is None else rank for index, place in enumerate(places)}
    rows, names = KernelRows(), work.names.names
    for index in range(len(work)):
        device = work.device[index]
        rows.add(
            start_s=(work.start[index] - base) * _SCALE_S,
            duration_s=(work.end[index] - work.start[index]) * _SCALE_S,
            rank=ranks[work.process[index], device],
            stream=f"gpu{device}/{work.stream[index]}",
            kernel=names[work.name[index]],
            step=int(step_codes[index]) - 1 if step_codes[index] else None,
            component=COMPONENTS[int(codes[index]) - 1] if codes[index] else None,
        )
    return rows.finish(Provenance(path.name, sha256, "nsys", device=_device(database)))


def _work(database: _Database, strings: dict[Any, str]) -> _Work:
    work = _Work()
    for *row, name in database.rows(KERNELS, (*_WORK_COLUMNS, "demangledName")):
        work.add(database, KERNELS, row, strings.get(name, f"kernel {name!r:.40}"))
    for table, what in COPIES.items():
        if database.has(table, *_WORK_COLUMNS):
            kind = ("copyKind",) if database.has(table, "copyKind") else ()
            for copy in database.rows(table, (*_WORK_COLUMNS, *kind)):
                work.add(database, table, copy[:6], f"{what} {COPY_KINDS.get(copy[6], 'other')}" if kind else what)
    return work


def _ranges(database: _Database, strings: dict[Any, str], base: int) -> tuple[Ranges, Ranges]:
    """Component and step ranges, by global thread id; times in ns from ``base``."""
    components, steps = Ranges(), Ranges()
    columns = ("start", "end", "globalTid", "text")
    if not database.has(NVTX, *columns, "eventType"):
        return components, steps
    text_id = ("textId",) if database.has(NVTX, "textId") else ()
    where = f"WHERE eventType IN {RANGE_TYPES} AND end IS NOT NULL"
    for start, end, thread, text, *named in database.rows(NVTX, (*columns, *text_id), where):
        label = str(text if text is not None else strings.get(named[0] if named else None, ""))[:200]
        step, code = step_of(label), component_code(label)
        if step is None and not code:
            continue
        begin, finish = database.span(NVTX, start, end)
        track = database.integer(thread, NVTX, "globalTid")
        (components if step is None else steps).add(track, begin - base, finish - base, code if step is None else step + 1)
    return components, steps


def _launches(database: _Database, work: _Work, base: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """When (ns from ``base``) and on which thread each kernel was launched; NaN and -1, which no range holds, where that is unknown."""
    starts, tracks = np.full(len(work), np.nan), np.full(len(work), -1, dtype=np.int64)
    if not database.has(RUNTIME, "start", "globalTid", "correlationId"):
        return starts, tracks
    launch_start, launch_thread, launch_correlation = array("d"), array("q"), array("q")
    for start, thread, correlation in database.rows(RUNTIME, ("start", "globalTid", "correlationId")):
        launch_start.append(database.integer(start, RUNTIME, "start") - base)
        launch_thread.append(database.integer(thread, RUNTIME, "globalTid"))
        launch_correlation.append(database.integer(correlation, RUNTIME, "correlationId"))
    threads = np.array(launch_thread, dtype=np.int64)
    processes = np.unique(np.array(work.process, dtype=np.int64))
    keys = _launch_ids(processes, threads & ~_THREAD_MASK, np.array(launch_correlation, dtype=np.int64))
    wanted = _launch_ids(processes, np.array(work.process, dtype=np.int64), np.array(work.correlation, dtype=np.int64))
    index, found = join_ids(keys, wanted)
    starts[found], tracks[found] = np.array(launch_start)[index[found]], threads[index[found]]
    return starts, tracks


def _launch_ids(processes: NDArray[np.int64], process: NDArray[np.int64], correlation: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for a correlation of a process, 0 for a process without kernels or a correlation that is none."""
    place = np.minimum(np.searchsorted(processes, process), len(processes) - 1)
    known = (processes[place] == process) & (correlation > 0) & (correlation < 1 << 40)
    return np.where(known, (place << 40) + correlation, 0)


def _device(database: _Database) -> str | None:
    if not database.has("TARGET_INFO_GPU", "name"):
        return None
    return next((str(name)[:200] for (name,) in database.rows("TARGET_INFO_GPU", ("name",), "LIMIT 1")), None)
