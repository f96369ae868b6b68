"""Reading files of strangers: never more than a limit, whatever the file says its size is (devices and pipes say 0)."""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import ConfigError, RequestError


def read_bytes(path: str | Path, limit_bytes: int, error: type[ConfigError] | type[RequestError] = ConfigError) -> bytes:
    """The content of a file, of standard input for "-". Raises ``error`` where it cannot be read or is longer than ``limit_bytes``."""
    try:
        with open(0 if str(path) == "-" else path, "rb", closefd=str(path) != "-") as file:
            data = file.read(limit_bytes + 1)
    except OSError as caught:
        raise error(f"{path}: {os.strerror(caught.errno).lower() if caught.errno else caught}") from None
    if len(data) > limit_bytes:
        raise error(f"{path}: longer than {limit_bytes} bytes")
    return data


def read_text(path: str | Path, limit_bytes: int, error: type[ConfigError] | type[RequestError] = ConfigError) -> str:
    """The same, as UTF-8."""
    try:
        return read_bytes(path, limit_bytes, error).decode("utf-8")
    except UnicodeDecodeError as caught:
        raise error(f"{path}: not UTF-8 ({caught.reason} at byte {caught.start})") from None
