"""Files of recorded workloads; their formats are engine.core.trace_rows'."""

from __future__ import annotations

import os
from collections.abc import Iterator

from engine.core.errors import ConfigError
from engine.core.trace_rows import TraceRow, numbered_lines, trace_rows


def read_trace(path: str) -> Iterator[TraceRow]:
    """Rows in the order of the file, read one by one. Raises ConfigError for a file that cannot be read or is not what it should be."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            yield from trace_rows(path, numbered_lines(path, file.readline))
    except OSError as error:
        raise ConfigError(f"{path}: {os.strerror(error.errno).lower() if error.errno else error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason})") from None
