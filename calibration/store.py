"""A calibration on disk: one zip archive with ``calibration.json`` (provenance, fits) and ``points.parquet`` (what they were fitted on).

The JSON names the schema and the SHA-256 of the points and of itself without that line; a reader refuses what it does not know or what
was changed. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import io
import os
import platform
import zipfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calibration.assemble import HeldOut
from calibration.cost_model import ModelFit, check_components
from calibration.probe import Probe
from engine.core.errors import ConfigError, DomainError
from engine.version import VERSION
from engine.writing import whole_file

SCHEMA_VERSION = 3  # 3: the probe's loops are shorter; seconds of the ones before say nothing beside them
KIND = "twinfer calibration"
MAX_FILE_BYTES = 256 << 20
_JSON, _POINTS = "calibration.json", "points.parquet"
_MEMBERS = {_JSON, _POINTS}


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured. ``host`` tells one machine from another without naming it."""

    host: str
    cpu: str
    num_cores: int
    system: str
    python: str
    torch: str | None
    twinfer: str


class Calibration(msgspec.Struct, frozen=True):
    """Everything but the points."""

    kind: str
    schema_version: int
    made: str  # ISO 8601, UTC
    machine: Machine
    probe: Probe | None  # None: not measured on a machine that could be probed again
    models: tuple[ModelFit, ...]
    points_sha256: str = ""
    fits_sha256: str = ""

    def model(self, name: str, model_hash: str | None = None) -> ModelFit:
        """Raises DomainError for a model that was not calibrated, or that is another one by now."""
        for fit in self.models:
            if fit.model == name or fit.model_hash == model_hash:
                if model_hash is not None and fit.model_hash != model_hash:
                    raise DomainError(f"{name} is not the model that was calibrated under this name: their shapes differ; calibrate anew")
                return fit
        known = ", ".join(fit.model for fit in self.models)
        raise DomainError(f"{name} is not in the calibration; it has {known}. Run: twinfer calibrate --model {name} --out FILE")


def this_machine() -> Machine:
    return Machine(
        host=_host(),
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_torch_version(),
        twinfer=VERSION,
    )


def _host() -> str:
    try:
        identity = Path("/etc/machine-id").read_text(encoding="ascii").strip() or platform.node()
    except (OSError, UnicodeError):
        identity = platform.node()
    return hashlib.sha256(f"{identity} {_cpu_model()}".encode()).hexdigest()[:16]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()[:200]
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def new_calibration(models: tuple[ModelFit, ...], probe: Probe | None, machine: Machine | None = None) -> Calibration:
    """Made now; of this machine unless another one is named."""
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Calibration(KIND, SCHEMA_VERSION, made, machine or this_machine(), probe, models)


def save(path: Path, calibration: Calibration, held_out: list[HeldOut], models: list[str]) -> Calibration:
    """Put in place whole; ``models`` names the model of each held-out entry. Raises OutputError where it cannot be written; every command
    that writes calibrations has their place from --out."""
    points = _points_bytes(held_out, models)
    calibration = msgspec.structs.replace(calibration, points_sha256=hashlib.sha256(points).hexdigest(), fits_sha256="")
    calibration = msgspec.structs.replace(calibration, fits_sha256=_own_hash(calibration))
    with whole_file("--out", path) as beside, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_JSON, msgspec.json.format(msgspec.json.encode(calibration)))
        archive.writestr(_POINTS, points)
    return calibration


def load(path: Path) -> Calibration:
    """Raises ConfigError for a file that cannot be read, is no calibration, is of another schema, or was changed."""
    text, points = _members(path)
    try:
        head = msgspec.json.decode(text, type=_Head)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no calibration: {_JSON}: {error}") from None
    if head.kind != KIND or head.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} is {head.kind[:60]!r}, schema {head.schema_version}; this release reads {KIND!r}, schema {SCHEMA_VERSION}; "
            "calibrate anew"
        )
    try:
        calibration = msgspec.json.decode(text, type=Calibration)
        for fit in calibration.models:
            check_components(fit)
    except (msgspec.MsgspecError, DomainError) as error:
        raise ConfigError(f"{path}: {error}") from None
    unhashed = msgspec.structs.replace(calibration, fits_sha256="")
    if calibration.fits_sha256 != _own_hash(unhashed) or calibration.points_sha256 != hashlib.sha256(points).hexdigest():
        raise ConfigError(f"{path} was changed since it was written: its hashes do not fit; calibrate anew")
    probe = calibration.probe
    if not calibration.models or (probe is not None and min(probe.compute_s, probe.memory_s, probe.host_s) <= 0):
        raise ConfigError(f"{path} has no models, or a speed probe that is not positive")
    return calibration


class _Head(msgspec.Struct):
    kind: str
    schema_version: int


def load_held_out(path: Path) -> tuple[list[HeldOut], list[str]]:
    """What the report draws: predictions of what the fits had not seen, and the model of each."""
    load(path)
    table = pq.read_table(io.BytesIO(_members(path)[1]))
    rows = table.to_pylist()
    models = [row.pop("model") for row in rows]
    return [HeldOut(**row) for row in rows], models


def _points_bytes(held_out: list[HeldOut], models: list[str]) -> bytes:
    columns = {"model": pa.array(models, pa.string())}
    for name in (field.name for field in dataclasses.fields(HeldOut)):
        values = [getattr(entry, name) for entry in held_out]
        columns[name] = pa.array(values, pa.string()) if name in ("layout", "component") else pa.array(np.array(values, dtype=np.float64))
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _own_hash(calibration: Calibration) -> str:
    return hashlib.sha256(msgspec.json.encode(calibration, order="sorted")).hexdigest()


def _members(path: Path) -> tuple[bytes, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            if {info.filename for info in infos} != _MEMBERS or len(infos) != len(_MEMBERS):
                raise ConfigError(f"{path} is no calibration: it holds other files than {_JSON} and {_POINTS}")
            if sum(info.file_size for info in infos) > MAX_FILE_BYTES:
                raise ConfigError(f"{path} unpacks to more than {MAX_FILE_BYTES} bytes")
            return archive.read(_JSON), archive.read(_POINTS)
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; needed: the file that twinfer calibrate wrote (of a demo, calibration.zip in it)") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, NotImplementedError) as error:
        raise ConfigError(f"{path} is no calibration (a zip archive of {_JSON} and {_POINTS}): {error}") from None
