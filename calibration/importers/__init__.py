"""One importer a format; each yields a KernelTable (``aic`` a PointTable). ``import_trace`` tells the format by the file's first bytes; of
a recording's folder it takes the traces in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibration.errors import TraceError
from calibration.importers.csv_table import read_csv
from calibration.importers.kineto import GZIP_MAGIC, read_kineto
from calibration.importers.nsys import SQLITE_MAGIC, read_nsys
from calibration.rules import Rules
from calibration.storage import PARQUET_MAGIC, read_kernels
from calibration.trace import KernelTable, merge

MAX_FILES = 4096
_TRACES, _STEPS = "trace.rank*.json.gz", "steps.rank*.jsonl"  # of a recording's folder
_NEEDED = (
    "a PyTorch-profiler Chrome trace (.json, .json.gz), an nsys SQLite export (`nsys export --type sqlite`), a .csv with the documented "
    "columns, a table written by `twinfer trace import`, or the folder of a recording in mode profile"
)


def import_trace(paths: Sequence[Path], rules: Rules, rank: int | None = None) -> KernelTable:
    """One kernel table of one file or more (one a rank), or of a recording's folder. ``rank`` overrides what a single file says.

    Raises TraceError for whatever is broken, foreign, empty or out of bounds; the text names the file, the place and a remedy.
    """
    paths = [file for path in paths for file in _files(path)]
    if not 1 <= len(paths) <= MAX_FILES:
        raise TraceError(f"{len(paths)} files; allowed: 1 to {MAX_FILES}")
    if rank is not None and len(paths) > 1:
        raise TraceError(f"--rank {rank} names one rank for {len(paths)} files; import them one by one")
    return rules.apply(merge([_import_one(path, rank) for path in paths]))


def _files(path: Path) -> list[Path]:
    """``path`` itself, of a folder the traces of its ranks. Raises TraceError for a folder without any."""
    if not path.is_dir():
        return [path]
    traces = sorted(path.glob(_TRACES))
    if not traces and next(path.glob(_STEPS), None) is not None:
        raise TraceError(_timers(path))
    if not traces:
        raise TraceError(f"{path} is a folder without {_TRACES}; needed: {_NEEDED}")
    return traces


def _timers(path: Path) -> str:
    return (
        f"{path} was recorded in mode timers: steps and the seconds of their components, no kernels to make a table of. Fit it with "
        "`twinfer calibrate --from DIR`, or record in mode profile (trace record --mode, serve --record-mode)"
    )


def _import_one(path: Path, rank: int | None) -> KernelTable:
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    if not head:
        raise TraceError(f"{path} is empty; record or export the trace again")
    if head.startswith(SQLITE_MAGIC):
        return read_nsys(path, rank)
    if head.startswith(PARQUET_MAGIC):
        return read_kernels(path)
    if path.match(_STEPS):
        raise TraceError(_timers(path))
    if head.startswith(GZIP_MAGIC) or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return read_kineto(path, rank)
    if path.suffix.lower() == ".csv":
        return read_csv(path, rank)
    raise TraceError(f"{path} is none of the formats read; needed: {_NEEDED}")
