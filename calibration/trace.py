"""The kernel table: what ran when on which stream of which rank, and which component it belongs to.

One row is one kernel (on a GPU), or one outermost operator or the rest of a labelled range (on a CPU). Columns are numpy arrays;
``component``, ``stream``, ``kernel`` and ``shapes`` are codes into tuples of names. Rows are ordered by start. ``start_s`` counts from the
first row of the table. What the importers do not know is absent, never invented: a row outside every step has ``in_step`` false.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibration.errors import TraceError
from engine.core.specs import COMPONENTS

SCHEMA_VERSION = 1
MAX_KERNELS = 100_000_000
MAX_NAMES = 1_000_000
MAX_NAME_CHARS = 4096
MAX_RANKS = 1 << 16
MAX_STEP = 1 << 30
# Longer spans come from clocks that do not belong together, or from the wrong unit.
MAX_SPAN_S = 86_400.0
UNKNOWN_SHAPES = ""
OTHER = COMPONENTS.index("other")


class Origin(enum.IntEnum):
    """Why a row has its component."""

    NONE = 0  # nothing said anything: counted as unclassified, listed under "other"
    RULE = 1  # the kernel's name
    RANGE = 2  # a labelled range around its launch, or the component column of a CSV


class Provenance(msgspec.Struct, frozen=True):
    """Where a table comes from. ``source`` is a file's name without its folder."""

    source: str
    sha256: str
    importer: str
    versions: dict[str, str] = {}
    device: str | None = None
    rules_sha256: str | None = None
    origin_unix_ns: int | None = None  # the instant that is ``start_s`` 0, where the trace says so
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelTable:
    """See the module's text. All arrays have one entry a row; times are seconds."""

    step: NDArray[np.int32]  # 0 where ``in_step`` is false
    in_step: NDArray[np.bool_]
    rank: NDArray[np.int32]
    stream: NDArray[np.int32]
    component: NDArray[np.int8]
    kernel: NDArray[np.int32]
    shapes: NDArray[np.int32]
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    origin: NDArray[np.uint8]
    stream_names: tuple[str, ...]
    kernel_names: tuple[str, ...]
    shape_names: tuple[str, ...]
    sources: tuple[Provenance, ...]

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> NDArray[np.float64]:
        return self.start_s + self.duration_s

    @property
    def span_s(self) -> float:
        """First start to last end."""
        return float(self.end_s.max() - self.start_s.min())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(int(rank) for rank in np.unique(self.rank))

    @property
    def unclassified_share(self) -> float:
        """Share of the kernels' seconds whose component nothing told."""
        total_s = float(self.duration_s.sum())
        return float(self.duration_s[self.origin == Origin.NONE].sum()) / total_s if total_s else 0.0

    def select(self, mask: NDArray[np.bool_]) -> KernelTable:
        """The rows where ``mask`` is true; times keep their origin."""
        columns = {name: getattr(self, name)[mask] for name in COLUMNS}
        return replace(self, **columns)

    def check(self) -> KernelTable:
        """Raise TraceError naming the first thing that cannot be; returns itself."""
        source = ", ".join(item.source for item in self.sources)
        if not len(self):
            raise TraceError(f"{source}: the table has no rows")
        if len(self) > MAX_KERNELS:
            raise TraceError(f"{source}: {len(self)} rows; allowed: {MAX_KERNELS}")
        if any(len(getattr(self, name)) != len(self) for name in COLUMNS):
            raise TraceError(f"{source}: the columns differ in length")
        for name, count in (
            ("component", len(COMPONENTS)), ("stream", len(self.stream_names)), ("kernel", len(self.kernel_names)),
            ("shapes", len(self.shape_names)), ("origin", len(Origin)), ("rank", MAX_RANKS), ("step", MAX_STEP),
        ):  # fmt: skip
            column = getattr(self, name)
            if column.min() < 0 or column.max() >= count:
                raise TraceError(f"{source}: {name} {column.min()} to {column.max()}; allowed: 0 to {count - 1}")
        for name in ("start_s", "duration_s"):
            column = getattr(self, name)
            wrong = np.flatnonzero(~np.isfinite(column) | (column < 0))
            if len(wrong):
                row = int(wrong[0])
                raise TraceError(
                    f"{source}: {name} of kernel {self.kernel_names[self.kernel[row]]!r:.80} (row {row}) is {column[row]:g}; "
                    "needed: a finite number of seconds, not negative"
                )
        if self.span_s > MAX_SPAN_S:
            raise TraceError(f"{source}: kernels lie {self.span_s:g} s apart; allowed: {MAX_SPAN_S:g} s (are the units right?)")
        return self


COLUMNS = ("step", "in_step", "rank", "stream", "component", "kernel", "shapes", "start_s", "duration_s", "origin")


class Names:
    """Codes for strings, in order of appearance. Long names are cut, their number is bounded."""

    def __init__(self, what: str, first: Sequence[str] = ()) -> None:
        self._what = what
        self._codes: dict[str, int] = {name: code for code, name in enumerate(first)}

    def code(self, name: str) -> int:
        name = name[:MAX_NAME_CHARS]
        code = self._codes.get(name)
        if code is None:
            code = len(self._codes)
            if code >= MAX_NAMES:
                raise TraceError(f"more than {MAX_NAMES} different {self._what}; record fewer steps")
            self._codes[name] = code
        return code

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._codes)


class KernelRows:
    """Collects rows for an importer in 40 bytes each. ``start_s`` may count from any instant; ``finish`` moves it to 0."""

    def __init__(self) -> None:
        self.streams, self.kernels, self.shapes = Names("streams"), Names("kernel names"), Names("shapes", [UNKNOWN_SHAPES])
        self._step, self._in_step, self._rank = array("i"), array("b"), array("i")
        self._stream, self._kernel, self._shapes = array("i"), array("i"), array("i")
        self._component, self._origin = array("b"), array("B")
        self._start_s, self._duration_s = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._start_s)

    def add(
        self, *, start_s: float, duration_s: float, rank: int, stream: str, kernel: str,
        step: int | None = None, component: str | None = None, shapes: str = UNKNOWN_SHAPES,
    ) -> None:  # fmt: skip
        """One row; ``component`` is what a range or a column says, None leaves it to the rules. Raises TraceError for more than fits."""
        if len(self) >= MAX_KERNELS:
            raise TraceError(f"more than {MAX_KERNELS} kernels; record fewer steps")
        self._step.append(0 if step is None else step)
        self._in_step.append(step is not None)
        self._rank.append(rank)
        self._stream.append(self.streams.code(stream))
        self._kernel.append(self.kernels.code(kernel))
        self._shapes.append(self.shapes.code(shapes))
        self._component.append(OTHER if component is None else COMPONENTS.index(component))
        self._origin.append(Origin.NONE if component is None else Origin.RANGE)
        self._start_s.append(start_s)
        self._duration_s.append(duration_s)

    def finish(self, source: Provenance) -> KernelTable:
        """The checked table, ordered by start. Raises TraceError where it is empty or impossible."""
        table = KernelTable(
            step=np.array(self._step, dtype=np.int32),
            in_step=np.array(self._in_step, dtype=np.bool_),
            rank=np.array(self._rank, dtype=np.int32),
            stream=np.array(self._stream, dtype=np.int32),
            component=np.array(self._component, dtype=np.int8),
            kernel=np.array(self._kernel, dtype=np.int32),
            shapes=np.array(self._shapes, dtype=np.int32),
            start_s=np.array(self._start_s, dtype=np.float64),
            duration_s=np.array(self._duration_s, dtype=np.float64),
            origin=np.array(self._origin, dtype=np.uint8),
            stream_names=self.streams.names,
            kernel_names=self.kernels.names,
            shape_names=self.shapes.names,
            sources=(source,),
        )
        return ordered(table).check()


def ordered(table: KernelTable) -> KernelTable:
    """Rows by start (then end, rank), the first start at 0."""
    if not len(table):
        return table
    order = np.lexsort((table.rank, table.end_s, table.start_s))
    columns = {name: getattr(table, name)[order] for name in COLUMNS}
    first_s = float(columns["start_s"][0])
    if np.isfinite(first_s):
        columns["start_s"] = columns["start_s"] - first_s
    sources = tuple(_moved(source, first_s) for source in table.sources) if np.isfinite(first_s) else table.sources
    return replace(table, **columns, sources=sources)


def _moved(source: Provenance, by_s: float) -> Provenance:
    if source.origin_unix_ns is None:
        return source
    return msgspec.structs.replace(source, origin_unix_ns=source.origin_unix_ns + round(by_s * 1e9))


def merge(tables: Sequence[KernelTable]) -> KernelTable:
    """One table of several files, one rank or more in each. Clocks are aligned where every file tells its origin, else taken as one clock.

    Raises TraceError where two files hold the same rank, or the result spans more than ``MAX_SPAN_S``.
    """
    if len(tables) == 1:
        return tables[0]
    seen: dict[int, str] = {}
    for table in tables:
        for rank in table.ranks:
            if rank in seen:
                raise TraceError(f"{seen[rank]} and {table.sources[0].source} are both of rank {rank}; import one file a rank")
            seen[rank] = table.sources[0].source
    origins = [table.sources[0].origin_unix_ns for table in tables]
    known = [origin for origin in origins if origin is not None]
    base_ns = min(known) if len(known) == len(tables) else None
    streams, kernels, shapes = Names("streams"), Names("kernel names"), Names("shapes", [UNKNOWN_SHAPES])
    columns: dict[str, list[NDArray[np.generic]]] = {name: [] for name in COLUMNS}
    for table, origin in zip(tables, origins, strict=True):
        moved_s = (origin - base_ns) * 1e-9 if base_ns is not None and origin is not None else 0.0
        recoded = {"start_s": table.start_s + moved_s}
        for name, codes, names in (
            ("stream", streams, table.stream_names), ("kernel", kernels, table.kernel_names), ("shapes", shapes, table.shape_names),
        ):  # fmt: skip
            recoded[name] = np.array([codes.code(item) for item in names], dtype=np.int32)[getattr(table, name)]
        for name in COLUMNS:
            columns[name].append(recoded.get(name, getattr(table, name)))
    merged = replace(
        tables[0],
        **{name: np.concatenate(parts) for name, parts in columns.items()},
        stream_names=streams.names,
        kernel_names=kernels.names,
        shape_names=shapes.names,
        sources=tuple(source for table in tables for source in table.sources),
    )
    return ordered(merged).check()
