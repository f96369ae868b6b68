"""A first look at a GGUF file: every count in its header must be possible for a file of its size, before a library acts on it.

The format (ggml's GGUF specification, versions 2 and 3, little-endian): magic, u32 version, u64 tensors, u64 key-values, then key-values
(string key, u32 type, value), then per tensor: string name, u32 dimensions, u64 each, u32 type, u64 offset.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from engine.core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_DIMENSIONS = 8
_MAX_NESTING = 4


def check_header(path: Path) -> None:
    """Raise ConfigError where the header is damaged or asks for more entries than the file has bytes."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walker(data).walk()
    except (ValueError, OSError, struct.error) as error:
        raise ConfigError(f"{path}: not a readable GGUF file ({error})") from None


class _Walker:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def walk(self) -> None:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._integer("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; known: 2 and 3")
        tensors, values = self._integer("<Q"), self._integer("<Q")
        for _ in range(self._possible(values, 13)):
            self._string()
            self._value(self._integer("<I"), 0)
        for _ in range(self._possible(tensors, 24)):
            self._string()
            dimensions = self._integer("<I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            self._take(8 * dimensions + 12)

    def _value(self, kind: int, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._take(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self._string()
        elif kind == _ARRAY and depth < _MAX_NESTING:
            element, count = self._integer("<I"), self._integer("<Q")
            if element in _SCALAR_BYTES:
                self._take(_SCALAR_BYTES[element] * self._possible(count, _SCALAR_BYTES[element]))
            else:
                for _ in range(self._possible(count, 8)):
                    self._value(element, depth + 1)
        else:
            raise ValueError(f"a value of the unknown type {kind}")

    def _string(self) -> None:
        self._take(self._possible(self._integer("<Q"), 1))

    def _possible(self, count: int, least_bytes: int) -> int:
        """``count``, where so many entries of at least ``least_bytes`` can still follow."""
        left = len(self._data) - self._at
        if count * least_bytes > left:
            raise ValueError(f"{count} entries announced, {left} bytes left")
        return count

    def _integer(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, in the middle of its header")
        self._at += count
        return self._data[self._at - count : self._at] if count <= 8 else b""
