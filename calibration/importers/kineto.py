"""A kernel table from a PyTorch-profiler Chrome trace (.json, .json.gz).

The file is streamed; what stays in memory is some tens of bytes an event. Times in the file are microseconds. Where the trace has GPU
kernels, the rows are those; else they are the outermost CPU operators, and the rest of each labelled range (``calibration.ranges``).

A kernel belongs to the innermost range around its launch (the runtime call of the same correlation number), else around itself on its
stream (``gpu_user_annotation``, for kernels inside CUDA graphs); its shapes are those of the operator with its external id.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from array import array
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import ijson
import numpy as np
from numpy.typing import NDArray

from calibration.errors import TraceError
from calibration.ranges import Ranges, component_code, innermost, join_ids, pieces, step_of
from calibration.storage import file_sha256
from calibration.trace import MAX_KERNELS, MAX_RANKS, UNKNOWN_SHAPES, KernelRows, KernelTable, Names, Provenance
from engine.core.specs import COMPONENTS

GZIP_MAGIC = b"\x1f\x8b"
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime")
_SCALE_S: Final = 1e-6
LARGEST_US = 1e18
_BUFFER_BYTES = 1 << 18
# Between two events there are some hundred bytes; megabytes of one event are an attack or not a trace.
MAX_EVENT_BYTES = 64 << 20
# Metadata keys whose place differs between versions: before the events, or after them.
_HEAD_KEYS = ("distributedInfo", "baseTimeNanoseconds", "deviceProperties")


class _Source:
    """The (uncompressed) file as ijson reads it: bounded between two events, and with its last bytes at hand."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.bytes_since_event = 0
        self.tail = b""

    def read(self, size: int) -> bytes:
        chunk = self._file.read(size)
        self.bytes_since_event += len(chunk)
        if self.bytes_since_event > MAX_EVENT_BYTES:
            raise TraceError(f"{self._path}: {MAX_EVENT_BYTES >> 20} MiB without an event; this is no profiler trace")
        if chunk:
            self.tail = (self.tail + chunk)[-4096:] if len(chunk) < 4096 else chunk[-4096:]
        return chunk


class _Events:
    """What is kept of a trace while it streams by."""

    def __init__(self) -> None:
        self.tracks, self.names, self.shapes = Names("threads and streams"), Names("kernel names"), Names("shapes", [UNKNOWN_SHAPES])
        self.component_ranges, self.step_ranges = Ranges(), Ranges()
        self.gpu_component_ranges, self.gpu_step_ranges = Ranges(), Ranges()
        self.kernels, self.operators = _Columns(), _Columns()
        self.launch_correlation, self.launch_start, self.launch_track = array("q"), array("d"), array("q")
        self.num_events = 0


class _Columns:
    """Kernels or operators: start and end in microseconds, codes, and the number that joins them to others (0: none)."""

    def __init__(self) -> None:
        self.start, self.end = array("d"), array("d")
        self.track, self.name, self.shapes = array("i"), array("i"), array("i")
        self.external, self.correlation = array("q"), array("q")

    def __len__(self) -> int:
        return len(self.start)


def read_kineto(path: Path, rank: int | None = None) -> KernelTable:
    """``rank`` overrides the trace's own. Raises TraceError for a broken, truncated or foreign file, or impossible numbers."""
    sha256 = file_sha256(path)
    events = _Events()
    try:
        with _open(path) as file:
            head = _read_head(file)
        with _open(path) as file:
            source = _Source(file, path)
            for event in _stream(source, head["prefix"]):
                _keep(events, event, path)
                source.bytes_since_event = 0
        missing = [key for key in _HEAD_KEYS if key not in head and f'"{key}"'.encode() in source.tail]
        for key in missing:
            with _open(path) as file:
                head[key] = next(iter(ijson.items(file, key, buf_size=_BUFFER_BYTES)), None)
    except (ijson.JSONError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        # The parser quotes the place in several lines with an arrow; the first says what is wrong.
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise TraceError(
            f"{path} is broken or truncated after {events.num_events} events: {what}; export the trace again (was the disk full?)"
        ) from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not len(events.kernels) and not len(events.operators) and not len(events.component_ranges):
        raise TraceError(
            f"{path} has {events.num_events} events, but no GPU kernel, no CPU operator and no labelled range; "
            "needed: a Chrome trace of torch.profiler (export_chrome_trace)"
        )
    return _table(events, _provenance(path, sha256, head), _rank(path, head, rank))


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else path.open("rb")


def _stream(source: _Source, prefix: str) -> Iterator[Any]:
    # Not use_float: ijson then takes integers for 64-bit signed ones, and traces hold unsigned ids.
    return iter(ijson.items(source, prefix, buf_size=_BUFFER_BYTES))


def _read_head(file: BinaryIO) -> dict[str, Any]:
    """The top-level keys before the events, and under ``prefix`` where the events are."""
    head: dict[str, Any] = {"prefix": "traceEvents.item"}
    builder: Any = None
    key = ""
    for number, (prefix, kind, value) in enumerate(ijson.parse(file)):
        if number == 0 and kind == "start_array":
            head["prefix"] = "item"
            break
        if prefix == "traceEvents" or number > 1_000_000:
            break
        top = prefix.split(".", 1)[0]
        if top not in _HEAD_KEYS:
            continue
        if builder is None or top != key:
            builder, key = ijson.ObjectBuilder(), top
        builder.event(kind, value)
        head[key] = getattr(builder, "value", None)
    return head


def _keep(events: _Events, event: Any, path: Path) -> None:
    events.num_events += 1
    if not isinstance(event, dict):
        raise TraceError(f"{path}: event {events.num_events} is {event!r:.40}, not an object; needed: a Chrome trace")
    category = event.get("cat")
    if event.get("ph") != "X" or not isinstance(category, str):
        return
    if category in GPU_CATEGORIES:
        _keep_work(events, events.kernels, event, path, gpu=True)
    elif category == "cpu_op":
        _keep_work(events, events.operators, event, path, gpu=False)
    elif category in ("user_annotation", "gpu_user_annotation"):
        _keep_range(events, event, path, on_gpu=category.startswith("gpu"))
    elif category in LAUNCH_CATEGORIES:
        correlation = _number(_arguments(event).get("correlation"))
        if correlation:
            start, _ = _span(events, event, path)
            events.launch_correlation.append(correlation)
            events.launch_start.append(start)
            events.launch_track.append(events.tracks.code(_thread(event)))


def _keep_work(events: _Events, columns: _Columns, event: dict[str, Any], path: Path, *, gpu: bool) -> None:
    if len(columns) >= MAX_KERNELS:
        raise TraceError(f"{path}: more than {MAX_KERNELS} events; record fewer steps")
    start, end = _span(events, event, path)
    arguments = _arguments(event)
    columns.start.append(start)
    columns.end.append(end)
    columns.track.append(events.tracks.code(_gpu_stream(event) if gpu else _thread(event)))
    columns.name.append(events.names.code(str(event.get("name", ""))))
    dims = arguments.get("Input Dims")
    columns.shapes.append(events.shapes.code(json.dumps(dims, default=str)) if dims else 0)
    columns.external.append(_number(arguments.get("External id")))
    columns.correlation.append(_number(arguments.get("correlation")))


def _keep_range(events: _Events, event: dict[str, Any], path: Path, *, on_gpu: bool) -> None:
    label = str(event.get("name", ""))[:200]
    step, code = step_of(label), component_code(label)
    if step is None and not code:
        return
    start, end = _span(events, event, path)
    track = events.tracks.code(_gpu_stream(event) if on_gpu else _thread(event))
    if step is not None:
        (events.gpu_step_ranges if on_gpu else events.step_ranges).add(track, start, end, step + 1)
    else:
        (events.gpu_component_ranges if on_gpu else events.component_ranges).add(track, start, end, code)


def _span(events: _Events, event: dict[str, Any], path: Path) -> tuple[float, float]:
    """Start and end in microseconds. Raises TraceError for anything but finite numbers in order."""
    numbers = []
    for name in ("ts", "dur"):
        value = event.get(name, 0 if name == "dur" else None)
        number = float(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else math.nan
        if not abs(number) <= LARGEST_US or (name == "dur" and number < 0):
            place = f"{path}: event {events.num_events} ({event.get('name')!r:.60})"
            raise TraceError(f"{place}: {name} is {str(value)!r:.40}; needed: microseconds up to {LARGEST_US:g}, a duration not negative")
        numbers.append(number)
    start, duration = numbers
    return start, start + duration


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _number(value: Any) -> int:
    """An id as it joins events; 0 where there is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def _thread(event: dict[str, Any]) -> str:
    return f"cpu/{event.get('tid')}"


def _gpu_stream(event: dict[str, Any]) -> str:
    arguments = _arguments(event)
    return f"gpu{arguments.get('device', event.get('pid'))}/{arguments.get('stream', event.get('tid'))}"


def _rank(path: Path, head: dict[str, Any], rank: int | None) -> int:
    if rank is not None:
        return rank
    info = head.get("distributedInfo")
    found = info.get("rank", 0) if isinstance(info, dict) else 0
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < MAX_RANKS:
        raise TraceError(f"{path}: distributedInfo says rank {found!r:.40}; give it with --rank")
    return found


def _provenance(path: Path, sha256: str, head: dict[str, Any]) -> Provenance:
    devices = head.get("deviceProperties")
    names = [str(item.get("name")) for item in devices if isinstance(item, dict)] if isinstance(devices, list) else []
    base_ns = head.get("baseTimeNanoseconds")
    return Provenance(
        path.name,
        sha256,
        "kineto",
        device=names[0][:200] if names else None,
        origin_unix_ns=base_ns if isinstance(base_ns, int) and 0 <= base_ns < 1 << 62 else 0,
    )


def _table(events: _Events, source: Provenance, rank: int) -> KernelTable:
    columns = events.kernels if len(events.kernels) else events.operators
    start, end = np.array(columns.start), np.array(columns.end)
    external = np.array(columns.external, dtype=np.int64)
    tracks = np.array(columns.track, dtype=np.int64)
    component_lines, steps = events.component_ranges.timelines(), events.step_ranges.timeline()
    rows = KernelRows()
    names, tracks_by_code, shape_names = events.names.names, events.tracks.names, events.shapes.names
    base = float(min([*(float(start.min()) for _ in (0,) if len(start)), *(float(line.edges[0]) for line in component_lines.values())]))

    def add(begin: float, finish: float, track: int, kernel: str, code: int, step: int, shapes: str) -> None:
        rows.add(
            start_s=(begin - base) * _SCALE_S,
            duration_s=(finish - begin) * _SCALE_S,
            rank=rank,
            stream=tracks_by_code[track],
            kernel=kernel,
            step=step - 1 if step else None,
            component=COMPONENTS[code - 1] if code else None,
            shapes=shapes,
        )

    if len(events.kernels):
        launch_track, launch_start = _launches(events, np.array(columns.correlation, dtype=np.int64), external)
        codes = innermost(component_lines, launch_track, launch_start)
        codes = np.where(codes > 0, codes, innermost(events.gpu_component_ranges.timelines(), tracks, start))
        step_codes = steps.at(launch_start)
        step_codes = np.where(step_codes > 0, step_codes, events.gpu_step_ranges.timeline().at(start))
        shapes = _shapes_by_external(events, external)
        chosen = np.arange(len(start))
    else:
        chosen = _outermost(start, end, tracks)
        codes, step_codes = innermost(component_lines, tracks, start), steps.at(start)
        shapes = np.array(columns.shapes, dtype=np.int64)
        for track, line in component_lines.items():
            own = chosen[tracks[chosen] == track]
            for begin, finish, code in pieces(line, start[own], end[own]):
                add(begin, finish, track, f"range:{COMPONENTS[code - 1]}", code, int(steps.at(np.array([begin]))[0]), UNKNOWN_SHAPES)
    for index in chosen:
        add(
            columns.start[index], columns.end[index], columns.track[index], names[columns.name[index]],
            int(codes[index]), int(step_codes[index]), shape_names[shapes[index]],
        )  # fmt: skip
    origin_ns = (source.origin_unix_ns or 0) + round(base * 1e3)
    return rows.finish(Provenance(source.source, source.sha256, source.importer, source.versions, source.device, origin_unix_ns=origin_ns))


def _launches(
    events: _Events, correlation: NDArray[np.int64], external: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Thread and instant (us) of each kernel's launch: of the runtime call with its correlation, else of the operator with its external
    id; thread -1 and instant NaN, which no range holds, where neither is in the trace."""
    track = np.full(len(correlation), -1, dtype=np.int64)
    start = np.full(len(correlation), np.nan)
    for keys, wanted, tracks, starts in (
        (events.operators.external, external, events.operators.track, events.operators.start),
        (events.launch_correlation, correlation, events.launch_track, events.launch_start),
    ):
        index, found = join_ids(np.array(keys, dtype=np.int64), wanted)
        track[found] = np.array(tracks, dtype=np.int64)[index[found]]
        start[found] = np.array(starts)[index[found]]
    return track, start


def _shapes_by_external(events: _Events, external: NDArray[np.int64]) -> NDArray[np.int64]:
    index, found = join_ids(np.array(events.operators.external, dtype=np.int64), external)
    shapes = np.zeros(len(external), dtype=np.int64)
    shapes[found] = np.array(events.operators.shapes, dtype=np.int64)[index[found]]
    return shapes


def _outermost(start: NDArray[np.float64], end: NDArray[np.float64], track: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the operators that no other one on their thread contains, by thread and start."""
    order = np.lexsort((-end, start, track))
    chosen: list[NDArray[np.int64]] = []
    for key in np.unique(track):
        own = order[track[order] == key]
        covered = np.maximum.accumulate(end[own])
        chosen.append(own[np.concatenate([[True], start[own][1:] >= covered[:-1]])])
    return np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
