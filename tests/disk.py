"""A disk that is full, for the code under test."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

REASON = "File too large"


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """No file of this process may become longer: the write that would make it so fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
