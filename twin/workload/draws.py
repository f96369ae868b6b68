"""Random numbers by key instead of by order: what request 7 is like does not depend on when, or whether, request 6 was made.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): integers alone, so the
same on every machine and in every version of Python.
"""

from __future__ import annotations

import functools
import hashlib
from array import array

_POOL_TOKENS = 1 << 15
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 bits, one to one."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


class Draws:
    """A named stream of a seed. Streams of different names are independent: lengths do not move when arrivals change."""

    def __init__(self, seed: int, name: str) -> None:
        self._base = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")

    def key(self, index: int) -> int:
        """64 random bits."""
        return mix(self._base + (index + 1) * _GAMMA)

    def uniform(self, index: int) -> float:
        """In (0, 1), both ends excluded: an inverse distribution function is finite there."""
        return ((self.key(index) >> 12) + 0.5) * 2.0**-52


@functools.lru_cache(maxsize=8)
def _pool_bytes(low: int, high: int) -> bytes:
    """Random tokens, as an array holds them."""
    draws = Draws(0, "tokens")
    return array("i", [low + draws.key(position) % (high - low) for position in range(_POOL_TOKENS)]).tobytes()


class TokenIds:
    """Token ids from ``low`` up to, not including, ``high``: the same key is the same text, a shorter one its beginning.

    A text begins with its 64-bit key, written in digits of the span, and goes on with a stretch of random tokens that is copied: texts of
    different keys differ in their first tokens, which is all that a cache of prefixes can see, and making one costs little.
    """

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._span = high - low
        self._num_digits = 1
        while self._span**self._num_digits <= _MASK:
            self._num_digits += 1
        self._pool_bytes = memoryview(_pool_bytes(low, high))

    def one(self, key: int) -> int:
        return self._low + key % self._span

    def text(self, key: int, num_tokens: int) -> array[int]:
        """The first tokens of the text of ``key``, which has 64 bits."""
        tokens = array("i")
        self.append(tokens, key, num_tokens)
        return tokens

    def append(self, tokens: array[int], key: int, num_tokens: int) -> None:
        """The same, at the end of ``tokens``."""
        rest = key
        for _ in range(min(self._num_digits, num_tokens)):
            rest, digit = divmod(rest, self._span)
            tokens.append(self._low + digit)
        size_bytes = tokens.itemsize
        start, left = key % _POOL_TOKENS * size_bytes, (num_tokens - self._num_digits) * size_bytes
        while left > 0:
            stretch = self._pool_bytes[start : start + left]
            tokens.frombytes(stretch)
            left -= len(stretch)
            start = 0
