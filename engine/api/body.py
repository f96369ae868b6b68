"""How much of all requests' bodies may be in memory at once, besides the bound on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.core.errors import CapacityError

# A few bodies of the largest size, or very many of the usual one.
LIMIT_BYTES = 256 << 20


class BodyBudget:
    """Bytes of bodies that are being received; what a handler keeps of its body is the gateway's to bound."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Gives ``take(bytes)``, which raises CapacityError where all bodies together are too much; given back at the end."""
        own_bytes = 0

        def take(num_bytes: int) -> None:
            nonlocal own_bytes
            if self.held_bytes + num_bytes > self._limit_bytes:
                raise CapacityError("too many large bodies arrive at once", retry_after_s=1.0)
            self.held_bytes += num_bytes
            own_bytes += num_bytes

        try:
            yield take
        finally:
            self.held_bytes -= own_bytes
