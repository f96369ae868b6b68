"""Whole forward passes in AIConfigurator's ``fpm_forward_perf`` columns (schema ``aic_fpm_forward_perf``, version 6), read and written.

A row is one forward pass of a whole replica: 26 columns of identity and work, then ``latency_ms``. ``workload_kind`` is prefill
(``batch_size`` requests compute ``total_prefill_tokens`` between them, on ``total_kv_read_tokens`` in cache before) or decode (one token
each; ``total_kv_read_tokens`` are in cache with it). Both totals are of one data rank, shared out evenly over its requests
(``partition_policy`` balanced_v1); what twinfer measured of unequal requests says ``spread_70_100`` there. A file comes with a sidecar,
``NAME.metadata.json``, that names the schema and the file's SHA-256.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calibration.errors import TraceError
from calibration.storage import PARQUET_MAGIC, file_sha256
from engine.core.errors import ConfigError
from engine.core.layout import Layout
from engine.writing import whole_file

PREFIX = "fpm:"
SCHEMA_NAME, SCHEMA_VERSION = "aic_fpm_forward_perf", 6
COORDINATES = "iteration_totals_balanced_v1"
BALANCED, SPREAD = "balanced_v1", "spread_70_100"
MAX_ROWS, MAX_SECONDS, MAX_TOKENS, MAX_SIDECAR_BYTES = 1_000_000, 3600.0, 1 << 31, 1 << 20


class Identity(msgspec.Struct, frozen=True):
    """The columns that say what ran where; two rows of one file with different ones are of different replicas."""

    model_path: str
    system: str
    backend: str
    backend_version: str
    weight_quantization: str
    gemm_quant_mode: str
    moe_quant_mode: str | None
    fmha_quant_mode: str | None
    comm_quant_mode: str | None
    kv_cache_dtype: str
    tp: int
    pp: int
    dp: int
    moe_tp: int
    moe_ep: int
    cp: int
    moe_backend: str
    attention_backend: str
    enable_wideep: bool
    enable_eplb: bool

    @property
    def layout(self) -> Layout:
        """Raises TraceError for a replica that our layouts cannot name."""
        if self.pp != 1 or self.cp != 1:
            raise TraceError(f"pp {self.pp}, cp {self.cp} of {self.model_path}: only replicas without pipeline or context ranks are read")
        layout = Layout(tp=self.tp, dp=self.dp, ep=self.moe_ep)
        try:
            layout.validate()
        except ConfigError as error:
            raise TraceError(f"{self.model_path}: {error}") from None
        return layout


class Forward(msgspec.Struct, frozen=True):
    """One measured pass."""

    kind: Literal["prefill", "decode"]
    requests: int
    prefill_tokens: int
    kv_tokens: int
    seconds: float
    policy: str = BALANCED


class Passes(msgspec.Struct, frozen=True):
    """All passes of one replica."""

    identity: Identity
    forwards: tuple[Forward, ...]


_IDENTITY = tuple(field.name for field in msgspec.structs.fields(Identity))
_WORK = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "partition_policy")
KEY_COLUMNS = ("cell_id", *_IDENTITY, *_WORK)
LATENCY = "latency_ms"


class _Sidecar(msgspec.Struct):
    schema_name: str
    schema_version: int
    coordinate_system: str
    parquet_sha256: str
    row_count: int


def sidecar_of(path: Path) -> Path:
    return path.with_suffix(".metadata.json")


def read_fpm(path: Path) -> list[Passes]:
    """Every replica of the file, in order of appearance; where a pass was measured more than once, the median stands.

    Raises TraceError for a file or sidecar that is missing, broken, of another schema or out of bounds.
    """
    rows = _rows(path)
    found: dict[Identity, dict[_Work, list[float]]] = {}
    for index, row in enumerate(rows):
        try:
            identity = msgspec.convert({name: row[name] for name in _IDENTITY}, Identity)
        except msgspec.ValidationError as error:
            raise TraceError(f"{path}, row {index}: {error}") from None
        found.setdefault(identity, {}).setdefault(_work(path, index, row), []).append(_seconds(path, index, row[LATENCY]))
    return [
        Passes(
            identity,
            tuple(
                Forward(kind, requests, new, cached, float(np.median(seconds)), policy)
                for (kind, requests, new, cached, policy), seconds in passes.items()
            ),
        )
        for identity, passes in found.items()
    ]


def _rows(path: Path) -> list[dict[str, Any]]:
    digest = file_sha256(path)
    sidecar = _sidecar(path)
    if sidecar.parquet_sha256 != digest:
        raise TraceError(f"{path} is not the file its sidecar was written for: the SHA-256 differs; fetch both again")
    with path.open("rb") as file:
        if file.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
            raise TraceError(f"{path} is no parquet file; needed: fpm_forward_perf.parquet as AIConfigurator's collector writes it")
    try:
        table = pq.ParquetFile(path)
        if not 1 <= table.metadata.num_rows <= MAX_ROWS:
            raise TraceError(f"{path} has {table.metadata.num_rows} rows; allowed: 1 to {MAX_ROWS}")
        missing = [name for name in (*KEY_COLUMNS, LATENCY) if name not in table.schema_arrow.names]
        if missing:
            raise TraceError(f"{path} lacks the columns {', '.join(missing)} of {SCHEMA_NAME} version {SCHEMA_VERSION}")
        rows: list[dict[str, Any]] = table.read(columns=[*KEY_COLUMNS, LATENCY]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path} is broken: {error}") from error
    if len(rows) != sidecar.row_count:
        raise TraceError(f"{path} has {len(rows)} rows; its sidecar says {sidecar.row_count}")
    return rows


def _sidecar(path: Path) -> _Sidecar:
    where = sidecar_of(path)
    try:
        with where.open("rb") as file:
            text = file.read(MAX_SIDECAR_BYTES + 1)
    except OSError as error:
        raise TraceError(f"{where} cannot be read: {error.strerror}; it names the schema of {path.name} and belongs beside it") from error
    if len(text) > MAX_SIDECAR_BYTES:
        raise TraceError(f"{where} has more than {MAX_SIDECAR_BYTES} bytes")
    try:
        found = msgspec.json.decode(text, type=_Sidecar)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: {error}") from error
    if (found.schema_name, found.schema_version, found.coordinate_system) != (SCHEMA_NAME, SCHEMA_VERSION, COORDINATES):
        raise TraceError(
            f"{where}: {found.schema_name[:60]!r} version {found.schema_version}, {found.coordinate_system[:60]!r}; this release reads "
            f"{SCHEMA_NAME} version {SCHEMA_VERSION}, {COORDINATES}"
        )
    return found


_Work = tuple[Literal["prefill", "decode"], int, int, int, str]


def _work(path: Path, index: int, row: dict[str, Any]) -> _Work:
    kind, policy = row["workload_kind"], row["partition_policy"]
    if kind not in ("prefill", "decode"):
        raise TraceError(f"{path}, row {index}: workload_kind is {kind!r:.40}; needed: prefill or decode")
    if policy not in (BALANCED, SPREAD):
        raise TraceError(f"{path}, row {index}: partition_policy is {policy!r:.40}; read: {BALANCED}, {SPREAD}")
    requests, new, cached = (row[name] for name in _WORK[1:4])
    for name, value, low in zip(_WORK[1:4], (requests, new, cached), (1, 0, 0), strict=True):
        if not isinstance(value, int) or not low <= value <= MAX_TOKENS:
            raise TraceError(f"{path}, row {index}: {name} is {value!r:.40}; allowed: {low} to {MAX_TOKENS}")
    if (new < requests) if kind == "prefill" else (new != 0 or cached < requests):
        needed = "a token or more a request" if kind == "prefill" else "no prefill tokens and a cached token or more a request"
        raise TraceError(f"{path}, row {index}: {kind} of {requests} requests, {new} new and {cached} cached tokens; needed: {needed}")
    return kind, requests, new, cached, policy


def _seconds(path: Path, index: int, latency_ms: object) -> float:
    if not isinstance(latency_ms, int | float) or not math.isfinite(latency_ms) or not 0 < latency_ms <= MAX_SECONDS * 1e3:
        raise TraceError(f"{path}, row {index}: latency_ms is {latency_ms!r:.40}; allowed: above 0 to {MAX_SECONDS * 1e3:g}")
    return float(latency_ms) / 1e3


def write_fpm(path: Path, replicas: Sequence[Passes]) -> None:
    """Write the file, then its sidecar, whose hash makes the pair valid. Raises OutputError where they cannot be written."""
    rows = [
        {"cell_id": f"{passes.identity.layout}-{forward.kind}", **msgspec.structs.asdict(passes.identity), **_columns(forward)}
        for passes in replicas
        for forward in passes.forwards
    ]
    if not rows:
        raise TraceError(f"{path}: no forward pass to write")
    first = replicas[0].identity
    with whole_file("--out", path) as beside:
        with beside.open("wb") as file:
            pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), file, compression="zstd")
        metadata = {
            "schema_name": SCHEMA_NAME, "schema_version": SCHEMA_VERSION, "coordinate_system": COORDINATES,
            "measurement_policy": "twinfer_median_v1", "row_count": len(rows), "parquet_sha256": file_sha256(beside),
            "system": first.system, "backend": first.backend, "backend_version": first.backend_version,
        }  # fmt: skip
        with whole_file("--out", sidecar_of(path)) as sidecar:
            sidecar.write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def _columns(forward: Forward) -> dict[str, Any]:
    work = (forward.kind, forward.requests, forward.prefill_tokens, forward.kv_tokens, forward.policy)
    return {**dict(zip(_WORK, work, strict=True)), LATENCY: forward.seconds * 1e3}


def _arrow_type(name: str) -> pa.DataType:
    if name == LATENCY:
        return pa.float64()
    if name.startswith("enable_"):
        return pa.bool_()
    return pa.int64() if name in {"tp", "pp", "dp", "moe_tp", "moe_ep", "cp", *_WORK[1:4]} else pa.string()


_SCHEMA = pa.schema([(name, _arrow_type(name)) for name in (*KEY_COLUMNS, LATENCY)])
