"""Points from AIConfigurator's tables, as the package ``aiconfigurator-core`` ships them (extra ``silicon``; Apache-2.0, NVIDIA).

``aic:SYSTEM/BACKEND`` (such as ``aic:gb300/sglang``) takes every table of that backend and the system's NCCL or oneCCL ones, all versions;
``aic:SYSTEM/BACKEND/VERSION`` that version of the backend alone. Where versions agree in everything but seconds the newest stands, and
within a version the median. A number that an older table does not have is 0.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from calibration.errors import TraceError
from calibration.importers.aic_tables import DTYPE_BYTES, MEASURED, NO_KEYS, TABLES, Measure
from calibration.points import LabelColumn, OpInfo, OpPoints, PointTable
from calibration.storage import file_sha256
from calibration.trace import Names, Provenance

PREFIX = "aic:"
PACKAGE = "aiconfigurator-core"
_MODULE = "aiconfigurator_core"
_LIBRARIES = ("nccl", "oneccl")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_ROWS_PER_FILE = 5_000_000
_RELEASES = {"dev": -3, "a": -2, "b": -2, "rc": -1, "post": 1}


@dataclass(frozen=True, slots=True)
class _Part:
    """One operation in one file."""

    seconds: NDArray[np.float64]
    columns: dict[str, NDArray[Any]]  # float64 numbers, or str objects
    num_dropped: int


def data_root() -> tuple[Path, str]:
    """Folder of the installed package's tables, and its version. Raises TraceError where it is not installed."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise TraceError(f"{PREFIX}... needs the package {PACKAGE}: pip install 'twinfer[silicon]'")
    return Path(spec.submodule_search_locations[0]) / "systems" / "data", importlib.metadata.version(PACKAGE)


def read_aic(name: str, root: Path | None = None, version: str = "unknown") -> PointTable:
    """Points of ``aic:SYSTEM/BACKEND[/VERSION]`` under ``root`` (default: the installed package).

    Raises TraceError for an unknown system or backend (the text lists what there is) and for broken tables.
    """
    if root is None:
        root, version = data_root()
    parts = name.removeprefix(PREFIX).split("/")
    if len(parts) not in (2, 3) or not all(_NAME.fullmatch(part) and set(part) != {"."} for part in parts):
        raise TraceError(f"{name!r:.80} is not {PREFIX}SYSTEM/BACKEND or {PREFIX}SYSTEM/BACKEND/VERSION, such as {PREFIX}gb300/sglang")
    system, backend, *wanted = parts
    files = _files(root, system, backend, wanted[0] if wanted else None)
    sources: list[Provenance] = []
    found: dict[str, list[tuple[Measure, str, _Part]]] = {}
    for path in files:
        table, device = _read(path)
        for measure in TABLES[path.stem]:
            for op, component_of, part in _split(path, table, measure):
                found.setdefault(op, []).append((measure, component_of, _with_version(part, path.parent.name)))
        versions = {PACKAGE: version, path.parent.parent.name: path.parent.name}
        source = path.relative_to(root).as_posix()
        sources.append(Provenance(source, file_sha256(path), "aic", versions, device, notes=("Apache-2.0, NVIDIA",)))
    return PointTable({op: _combine(items) for op, items in sorted(found.items())}, tuple(sources)).check()


def _files(root: Path, system: str, backend: str, version: str | None) -> list[Path]:
    """Known tables, newest version first."""
    if not (root / system).is_dir():
        known = sorted(path.name for path in root.iterdir() if any(path.rglob("*.parquet"))) if root.is_dir() else []
        raise TraceError(f"{PREFIX}{system}/{backend}: no such system; there are: {', '.join(known) or 'none'}")
    folders = [path for path in sorted((root / system).glob("*/*/*")) if path.is_dir()]
    own = [path for path in folders if path.parent.name == backend and version in (None, path.name)]
    if not own:
        known = sorted({f"{path.parent.name} {path.name}" for path in folders if path.parent.name not in _LIBRARIES})
        raise TraceError(
            f"{PREFIX}{system}/{backend}{f'/{version}' if version else ''}: no such tables; there are: {', '.join(known) or 'none'}"
        )
    libraries = [path for path in folders if path.parent.name in _LIBRARIES]
    chosen = sorted([*own, *libraries], key=lambda path: version_key(path.name), reverse=True)
    return [path for folder in chosen for path in sorted(folder.glob("*.parquet")) if path.stem in TABLES]


def version_key(text: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Orders versions: 0.5.6 < 0.5.6.post2 < 0.5.14, 1.3.0rc10 < 1.3.0rc20 < 1.3.0."""
    match = re.match(r"(\d+(?:\.\d+)*)\.?(?:(dev|a|b|rc|post)(\d*))?", text)
    if match is None:
        return (), (0, 0)
    release = tuple(int(part) for part in match[1].split("."))
    return release, (_RELEASES.get(match[2] or "", 0), int(match[3] or 0))


def _read(path: Path) -> tuple[pa.Table, str | None]:
    try:
        file = pq.ParquetFile(path)
        if file.metadata.num_rows > MAX_ROWS_PER_FILE:
            raise TraceError(f"{path} has {file.metadata.num_rows} rows; allowed: {MAX_ROWS_PER_FILE}")
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path} is broken: {error}; install {PACKAGE} again") from error
    needed = {column for measure in TABLES[path.stem] for column in (*measure.seconds, *((measure.split,) if measure.split else ()))}
    missing = needed - set(table.column_names)
    if missing:
        raise TraceError(f"{path} has no columns {sorted(missing)}; needed: a table of {PACKAGE} 0.12.0")
    devices = pc.unique(table["device"]).to_pylist() if "device" in table.column_names else []
    return table, str(devices[0]) if devices else None


def _split(path: Path, table: pa.Table, measure: Measure) -> Iterable[tuple[str, str, _Part]]:
    if measure.split is None:
        yield measure.name, measure.component, _part(path, table, measure)
        return
    for value in sorted(str(value) for value in pc.unique(table[measure.split]).to_pylist()):
        rows = table.filter(pc.equal(table[measure.split].cast(pa.string()), value))
        component = measure.components.get(value, measure.component)
        name = measure.name if value == measure.name else f"{measure.name}.{value.removeprefix(measure.name + '_')}"
        yield name, component, _part(path, rows, measure)


def _part(path: Path, table: pa.Table, measure: Measure) -> _Part:
    seconds = np.zeros(table.num_rows)
    for column in measure.seconds:
        seconds = seconds + _numbers(path, column, table[column]) * measure.scale
    good = np.isfinite(seconds) & (seconds > 0)
    columns: dict[str, NDArray[Any]] = {}
    for name in table.column_names:
        if name in NO_KEYS or name in MEASURED or name == measure.split or name.endswith("_gbps"):
            continue
        kind = table.schema.field(name).type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            columns[name] = _numbers(path, name, table[name])[good]
        else:
            columns[name] = np.array(table[name].cast(pa.string()).fill_null("").to_pylist(), dtype=object)[good]
    _name_message_size(path, columns)
    return _Part(seconds[good], columns, int((~good).sum()))


def _numbers(path: Path, name: str, values: pa.ChunkedArray) -> NDArray[np.float64]:
    try:
        array: NDArray[np.float64] = values.cast(pa.float64()).fill_null(0.0).to_numpy()
    except pa.ArrowException as error:
        raise TraceError(f"{path}: column {name} holds no numbers: {error}") from error
    return array


def _name_message_size(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Elements become ``message_elements`` and ``message_bytes``."""
    if "message_size" not in columns:
        return
    elements = columns.pop("message_size")
    dtype = next((columns[name] for name in ("nccl_dtype", "allreduce_dtype") if name in columns), None)
    unknown = sorted(set(dtype) - set(DTYPE_BYTES)) if dtype is not None else ["none"]
    if dtype is None or unknown:
        raise TraceError(f"{path}: messages of data types {unknown}, whose size is unknown; known: {', '.join(DTYPE_BYTES)}")
    columns["message_elements"] = elements
    columns["message_bytes"] = elements * np.array([DTYPE_BYTES[name] for name in dtype], dtype=np.float64)


def _with_version(part: _Part, version: str) -> _Part:
    return _Part(part.seconds, {**part.columns, "version": np.full(len(part.seconds), version, dtype=object)}, part.num_dropped)


def _combine(items: Sequence[tuple[Measure, str, _Part]]) -> OpPoints:
    """All versions of one operation, newest first, without what is told twice."""
    measure, component, _ = items[0]
    parts = [part for _, _, part in items]
    seconds = np.concatenate([part.seconds for part in parts])
    age = np.repeat(np.arange(len(parts)), [len(part.seconds) for part in parts])
    numbers: dict[str, NDArray[np.float64]] = {}
    labels: dict[str, LabelColumn] = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        textual = any(name in part.columns and part.columns[name].dtype == object for part in parts)
        filler: Any = "" if textual else 0.0
        column = np.concatenate(
            [part.columns.get(name, np.full(len(part.seconds), filler, dtype=object if textual else None)) for part in parts]
        )
        if textual:
            names = Names("labels")
            codes = np.array([names.code(str(value)) for value in column], dtype=np.int32)
            labels[name] = LabelColumn(codes, names.names)
        else:
            numbers[name] = column
    key = _key([*numbers.values(), *(column.codes for name, column in labels.items() if name != "version")], len(seconds))
    rows, medians = _newest_medians(key, age, seconds)
    info = OpInfo(
        component, measure.covers or (component,), measure.note, sum(part.num_dropped for part in parts), len(seconds) - len(rows)
    )
    whole = OpPoints(info, seconds, numbers, labels)
    chosen = np.zeros(len(seconds), dtype=np.bool_)
    chosen[rows] = True
    kept = whole.select(chosen)
    return OpPoints(info, medians, kept.numbers, kept.labels)


def _key(columns: Sequence[NDArray[Any]], count: int) -> NDArray[np.int64]:
    """One number a row, equal where all columns are."""
    key = np.zeros(count, dtype=np.int64)
    for column in columns:
        _, codes = np.unique(column, return_inverse=True)
        _, key = np.unique(key * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    return key


def _newest_medians(
    key: NDArray[np.int64], age: NDArray[np.int64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """A row for each key, ascending, and the median seconds of its newest version."""
    if not len(key):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    order = np.lexsort((seconds, age, key))
    pair_begins = np.flatnonzero(np.concatenate([[True], (np.diff(key[order]) != 0) | (np.diff(age[order]) != 0)]))
    counts = np.diff(np.concatenate([pair_begins, [len(order)]]))
    newest = np.concatenate([[True], np.diff(key[order[pair_begins]]) != 0])
    begins, counts = pair_begins[newest], counts[newest]
    low, high = seconds[order[begins + (counts - 1) // 2]], seconds[order[begins + counts // 2]]
    rows = order[begins]
    by_row = np.argsort(rows)
    return rows[by_row], ((low + high) / 2)[by_row]
