"""Tables on disk: one parquet file, its header as JSON in the file's own metadata under the key ``twinfer``.

The header has ``kind`` (kernels, points), ``schema_version`` and ``sources``; what this release does not know is refused. Files are
written beside their name and renamed, so that a reader sees a whole table or none.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calibration.errors import TraceError
from calibration.trace import MAX_KERNELS, SCHEMA_VERSION, KernelTable, Names, Origin, Provenance
from engine.core.specs import COMPONENTS
from engine.writing import whole_file

METADATA_KEY = b"twinfer"
PARQUET_MAGIC = b"PAR1"
KERNELS = "kernels"
_HASH_CHUNK_BYTES = 1 << 20
_H = TypeVar("_H", bound=msgspec.Struct)


class KernelHeader(msgspec.Struct, frozen=True):
    sources: tuple[Provenance, ...]
    kind: str = KERNELS
    schema_version: int = SCHEMA_VERSION


class _Kind(msgspec.Struct, frozen=True):
    kind: str
    schema_version: int


def file_sha256(path: Path) -> str:
    """Raises TraceError where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def kind_of(path: Path) -> str:
    """The kind a table's header names. Raises TraceError for anything that is no table of ours."""
    return _decode(path, _header_bytes(path, _open(path)), _Kind).kind


def write_parquet(path: Path, table: pa.Table, header: msgspec.Struct) -> None:
    """Put in place whole. Raises OutputError where it cannot be written; every command that writes tables has their place from --out."""
    table = table.replace_schema_metadata({METADATA_KEY: msgspec.json.encode(header)})
    with whole_file("--out", path) as beside, beside.open("wb") as file:
        pq.write_table(table, file, compression="zstd")


def read_parquet(path: Path, kind: str, header: type[_H], max_rows: int) -> tuple[_H, pa.Table]:
    """Header and rows of a table of ``kind``. Raises TraceError for a foreign, broken, newer or oversized file."""
    file = _open(path)
    content = _header_bytes(path, file)
    found = _decode(path, content, _Kind)
    if found.kind != kind:
        raise TraceError(f"{path} is a table of {found.kind!r:.40}; needed: {kind}")
    if found.schema_version != SCHEMA_VERSION:
        raise TraceError(f"{path} has schema version {found.schema_version}; this release reads {SCHEMA_VERSION}: import the trace again")
    if file.metadata.num_rows > max_rows:
        raise TraceError(f"{path} has {file.metadata.num_rows} rows; allowed: {max_rows}")
    try:
        return _decode(path, content, header), file.read()
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path} is broken: {error}") from error


def write_kernels(path: Path, table: KernelTable) -> None:
    """Store a kernel table; a partly written file never has its name."""
    table.check()
    unknown = np.array([not name for name in table.shape_names])
    columns = {
        "step": pa.array(table.step, mask=~table.in_step),
        "rank": pa.array(table.rank),
        "stream": _dictionary(table.stream, table.stream_names),
        "component": _dictionary(table.component.astype(np.int32), COMPONENTS),
        "kernel": _dictionary(table.kernel, table.kernel_names),
        "shapes": _dictionary(table.shapes, table.shape_names, unknown[table.shapes]),
        "start_s": pa.array(table.start_s),
        "duration_s": pa.array(table.duration_s),
        "labelled_by": _dictionary(table.origin.astype(np.int32), [origin.name.lower() for origin in Origin]),
    }
    write_parquet(path, pa.table(columns), KernelHeader(table.sources))


def read_kernels(path: Path) -> KernelTable:
    """Load and check a kernel table. Raises TraceError."""
    header, rows = read_parquet(path, KERNELS, KernelHeader, MAX_KERNELS)
    try:
        stream, stream_names = _codes(rows["stream"])
        kernel, kernel_names = _codes(rows["kernel"])
        shapes, shape_names = _codes(rows["shapes"].combine_chunks().cast(pa.string()).fill_null(""))
        component, components = _codes(rows["component"])
        origin, origins = _codes(rows["labelled_by"])
        step = rows["step"].combine_chunks()
        table = KernelTable(
            step=step.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32),
            in_step=step.is_valid().to_numpy(zero_copy_only=False),
            rank=rows["rank"].to_numpy().astype(np.int32),
            stream=stream,
            component=np.array([COMPONENTS.index(name) for name in components], dtype=np.int8)[component],
            kernel=kernel,
            shapes=shapes,
            start_s=rows["start_s"].to_numpy().astype(np.float64),
            duration_s=rows["duration_s"].to_numpy().astype(np.float64),
            origin=np.array([Origin[name.upper()] for name in origins], dtype=np.uint8)[origin],
            stream_names=stream_names,
            kernel_names=kernel_names,
            shape_names=shape_names,
            sources=header.sources,
        )
    except (KeyError, ValueError, TypeError, IndexError, pa.ArrowException) as error:
        raise TraceError(f"{path} is no kernel table of this release: {error}; import the trace again") from error
    return table.check()


def _open(path: Path) -> pq.ParquetFile:
    try:
        with path.open("rb") as file:
            magic = file.read(len(PARQUET_MAGIC))
        if magic != PARQUET_MAGIC:
            raise TraceError(f"{path} is {'empty' if not magic else 'no parquet file'}; needed: a table that `twinfer trace import` wrote")
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise TraceError(f"{path} is broken or truncated: {error}") from error
    except IsADirectoryError:
        raise TraceError(f"{path} is a folder; needed: a table that `twinfer trace import` or `trace record` wrote (*.parquet)") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def _header_bytes(path: Path, file: pq.ParquetFile) -> bytes:
    content = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if content is None:
        raise TraceError(f"{path} is a parquet file of somebody else's: its metadata has no key {METADATA_KEY.decode()!r}")
    return bytes(content)


def _decode(path: Path, content: bytes, header: type[_H]) -> _H:
    try:
        return msgspec.json.decode(content, type=header)
    except msgspec.DecodeError as error:
        raise TraceError(f"{path} has a header that is not understood: {error}") from error


def _dictionary(codes: Any, names: Any, mask: Any = None) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=mask), pa.array(list(names), pa.string()))


def _codes(column: pa.ChunkedArray | pa.Array) -> tuple[np.ndarray[Any, np.dtype[np.int32]], tuple[str, ...]]:
    """Codes from 0 and the names they stand for; ValueError for a missing value."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not isinstance(array, pa.DictionaryArray):
        array = array.dictionary_encode()
    if array.null_count:
        raise ValueError("a name is missing")
    names = Names("names")
    recoded = np.array([names.code(name) for name in array.dictionary.to_pylist()], dtype=np.int32)
    return recoded[array.indices.to_numpy(zero_copy_only=False)], names.names
