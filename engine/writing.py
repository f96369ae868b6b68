"""Files that a flag asks for: looked at before anything takes time, put in place whole, and named with their flag where that fails."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.core.errors import ConfigError, OutputError

# What somebody who names a folder so had in mind was a file.
_FILE_ENDINGS = frozenset((".csv", ".gz", ".htm", ".html", ".json", ".jsonl", ".parquet", ".txt", ".zip"))


def check_file(flag: str, path: Path) -> None:
    """Before minutes are spent. Raises ConfigError for a path that cannot become a file; devices and pipes are fine."""
    where = f"{flag} {path} cannot be written"
    try:
        if path.is_dir():
            raise ConfigError(f"{where}: it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(f"{where}: it may not be changed")
        folder = Path(os.path.realpath(path)).parent
        if not folder.exists():
            raise ConfigError(f"{where}: its folder does not exist")
        if not _is_special(path):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise ConfigError(f"{where}: {_reason(error)}") from None


def check_folder(flag: str, path: Path, holds: str) -> None:
    """Raises ConfigError where ``path`` names a file; ``holds`` says what is to be in the folder."""
    if path.suffix.lower() in _FILE_ENDINGS and not path.is_dir():
        raise ConfigError(f"{flag} {path} names a file; needed: a folder, which will hold {holds}")


def make_folder(flag: str, path: Path, holds: str) -> None:
    """The folder, and those above it. Raises ConfigError where it cannot be, or takes no file."""
    check_folder(flag, path, holds)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {_reason(error)}") from None


@contextmanager
def whole_file(flag: str, path: Path) -> Iterator[Path]:
    """The path to write to: one beside ``path``, which takes its place once the block is through. Without that nothing is changed.

    A link stays one, a file keeps its mode, a device or pipe is written to itself. Raises OutputError for an OSError of the block, which
    should therefore only write.
    """
    target = Path(os.path.realpath(path))
    try:
        if _is_special(target):
            yield target
            return
        beside = target.with_name(f".twinfer-{secrets.token_hex(4)}{target.suffix}")
        try:
            yield beside
            if target.exists():
                beside.chmod(stat.S_IMODE(target.stat().st_mode))
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(flag, path, error) from None


def output_error(flag: str, path: Path, error: OSError) -> OutputError:
    return OutputError(f"{flag} {path} cannot be written: {_reason(error)}")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
