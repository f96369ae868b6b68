"""The ledger: predictions as they were written down before their runs, and what was measured after. JSON Lines, append-only.

A line is one entry, written with a single ``write`` to a file opened for appending, under a lock, and forced to the disk before
``append`` returns: several processes may share a file, and a prediction is on the disk before its run begins. A process that was killed
while it wrote leaves a line without an end; the next writer cuts it off, a reader passes over it, both say so. Anything else that is no
entry is refused with its line number.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import math
import os
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Union

import msgspec

from engine.core.errors import ConfigError, OutputError
from engine.version import VERSION

SCHEMA_VERSION = 1
MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
_READ_BYTES = 1 << 16
_log = logging.getLogger("twinfer.ledger")

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Schema = Annotated[int, msgspec.Meta(ge=1, le=SCHEMA_VERSION)]
Value = Union[str, int, float, bool, None]


class Speed(msgspec.Struct, frozen=True):
    """Seconds of the speed probe's loops at one moment, and how much slower that is than when the calibration was made (1: as then)."""

    compute_s: float
    memory_s: float
    host_s: float
    compute_factor: float = 1.0
    memory_factor: float = 1.0
    host_factor: float = 1.0


class Quantity(msgspec.Struct, frozen=True):
    """A predicted number with its 90 % interval, in the unit that its name in ``Prediction.quantities`` ends with."""

    value: float
    low: float
    high: float


class Prediction(msgspec.Struct, frozen=True, tag="prediction", tag_field="entry"):
    """What was expected of a run before it began. ``question`` holds all that was asked: the run's model, layout and load."""

    schema: Schema
    id: Text
    time: Text  # ISO 8601, UTC
    command: Text
    question: dict[str, Value]
    quantities: dict[str, Quantity]
    calibration_sha256: Text
    versions: dict[str, Text]
    speed: Speed
    extrapolated: bool = False
    note: Text = ""


class Measurement(msgspec.Struct, frozen=True, tag="measurement", tag_field="entry"):
    """What came of the run that the prediction ``prediction`` is about. ``low`` and ``high`` of a quantity are what it varied between."""

    schema: Schema
    prediction: Text
    time: Text
    quantities: dict[str, Quantity]
    versions: dict[str, Text]
    speed: Speed
    note: Text = ""


Entry = Union[Prediction, Measurement]


class Pair(msgspec.Struct, frozen=True):
    """A prediction and its measurements, in the order they were written; none where the run never ended."""

    prediction: Prediction
    measurements: tuple[Measurement, ...]


def predict(
    command: str,
    question: Mapping[str, Value],
    quantities: Mapping[str, Quantity],
    *,
    calibration_sha256: str,
    speed: Speed,
    extrapolated: bool = False,
    note: str = "",
) -> Prediction:
    """An entry of now, with a name of its own."""
    return Prediction(
        SCHEMA_VERSION,
        uuid.uuid4().hex,
        _now(),
        command,
        dict(question),
        dict(quantities),
        calibration_sha256,
        versions(),
        speed,
        extrapolated,
        note,
    )


def measured(prediction: Prediction, quantities: Mapping[str, Quantity], speed: Speed, note: str = "") -> Measurement:
    """An entry of now about the run of ``prediction``."""
    return Measurement(SCHEMA_VERSION, prediction.id, _now(), dict(quantities), versions(), speed, note)


def versions() -> dict[str, str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"twinfer": VERSION, "python": platform.python_version(), "torch": torch}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


class Ledger:
    """One file. Raises ConfigError where it cannot be opened or holds what is no entry, OutputError where it takes no more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entries: Sequence[Entry]) -> None:
        """Write and force to the disk; they are there when this returns. Raises ConfigError for a number that is not finite."""
        lines = [_line(entry) for entry in entries]
        with self._locked() as file:
            self._cut_torn_end(file)
            for line in lines:
                end = os.fstat(file).st_size
                written = os.write(file, line)
                if written != len(line):  # a full disk: half a line is none
                    os.ftruncate(file, end)
                    raise OutputError(f"ledger {self.path}: the disk took {written} of {len(line)} bytes; free some space")
            os.fsync(file)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            is_new = not self.path.exists()
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"ledger {self.path} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            if is_new:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise OutputError(f"ledger {self.path} cannot be written: {error.strerror}") from None
        finally:
            os.close(file)

    def _cut_torn_end(self, file: int) -> None:
        """Under the lock nobody is in the middle of a line: one without an end is of a writer that was killed, and was never promised."""
        end = size = os.fstat(file).st_size
        while end:
            begin = max(0, end - _READ_BYTES)
            found = os.pread(file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            _log.warning("ledger %s: its last line was torn (%d bytes without an end); it is cut off", self.path, size - end)
            os.ftruncate(file, end)

    def entries(self) -> list[Entry]:
        """All, in the order written; empty where there is no file."""
        found: list[Entry] = []
        decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
        for number, line in self._lines():
            try:
                found.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"ledger {self.path}, line {number} is no entry of schema {SCHEMA_VERSION}: {error}") from None
        return found

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                    raise ConfigError(f"ledger {self.path} has more than {MAX_FILE_BYTES} bytes; begin a new one")
                number = 0
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if line.endswith(b"\n"):
                        yield number, line
                    elif len(line) > MAX_LINE_BYTES:
                        raise ConfigError(f"ledger {self.path}, line {number} is longer than {MAX_LINE_BYTES} bytes")
                    else:
                        _log.warning("ledger %s, line %d was torn (no end of line); it is passed over", self.path, number)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"ledger {self.path} cannot be read: {error.strerror}") from None

    def pairs(self) -> list[Pair]:
        """Predictions with what was measured. Raises ConfigError for a measurement that no line before it predicts, or a name twice."""
        predictions: dict[str, Prediction] = {}
        measurements: dict[str, list[Measurement]] = {}
        for entry in self.entries():
            if isinstance(entry, Prediction):
                if entry.id in predictions:
                    raise ConfigError(f"ledger {self.path}: prediction {entry.id[:80]} is there twice")
                predictions[entry.id], measurements[entry.id] = entry, []
            elif entry.prediction in predictions:
                measurements[entry.prediction].append(entry)
            else:
                raise ConfigError(f"ledger {self.path}: a measurement is of {entry.prediction[:80]}, which was not predicted before it")
        return [Pair(prediction, tuple(measurements[name])) for name, prediction in predictions.items()]


def _line(entry: Entry) -> bytes:
    for name, quantity in entry.quantities.items():
        if not all(math.isfinite(value) for value in (quantity.value, quantity.low, quantity.high)):
            raise ConfigError(f"ledger: {name} is {quantity.value} [{quantity.low}, {quantity.high}]; needed: finite numbers")
    line = msgspec.json.encode(entry) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"ledger: an entry of {len(line)} bytes; allowed: at most {MAX_LINE_BYTES}")
    return line


def _sync_folder(folder: Path) -> None:
    """A new file's name is on the disk with its folder."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_inside(prediction: Quantity, measurement: Quantity) -> bool:
    """Whether the measured value lies within the predicted interval."""
    return prediction.low <= measurement.value <= prediction.high


def error(prediction: Quantity, measurement: Quantity) -> float | None:
    """predicted / measured - 1; None where nothing was measured to divide by."""
    return prediction.value / measurement.value - 1.0 if measurement.value > 0 else None
