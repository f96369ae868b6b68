"""How long prompts and answers are. A length is the inverse distribution function at one uniform number, so it belongs to its request."""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Sequence
from statistics import NormalDist
from typing import Protocol

import msgspec

from engine.core.errors import ConfigError

MAX_LENGTH_TOKENS = 1 << 24
MAX_CV = 100.0
_GRAMMAR = "N, LOW:HIGH or lognormal:MEAN:CV"


class Lengths(Protocol):
    """Token counts, at least 1."""

    @property
    def max_tokens(self) -> int:
        """No draw is longer."""
        ...

    def draw(self, uniform: float) -> int:
        """The quantile at ``uniform``, which is in (0, 1)."""
        ...


class LengthPairs(Protocol):
    """Prompt and answer of one request, together: in recorded pairs the one says something about the other."""

    @property
    def max_input_tokens(self) -> int: ...

    @property
    def max_output_tokens(self) -> int: ...

    def draw(self, input_uniform: float, output_uniform: float) -> tuple[int, int]: ...


class Uniform(msgspec.Struct, frozen=True):
    """Every length from ``low`` to ``high`` alike; fixed where they are equal."""

    low: int
    high: int

    @property
    def max_tokens(self) -> int:
        return self.high

    def draw(self, uniform: float) -> int:
        return self.low + int(uniform * (self.high - self.low + 1))


class Lognormal(msgspec.Struct, frozen=True):
    """Mean and coefficient of variation of the tokens; sigma^2 = ln(1 + cv^2), mu = ln(mean) - sigma^2 / 2. Rounded, cut at both ends."""

    mean_tokens: float
    cv: float
    max_tokens: int = MAX_LENGTH_TOKENS

    def draw(self, uniform: float) -> int:
        variance = math.log1p(self.cv**2)
        exponent = math.log(self.mean_tokens) - variance / 2 + math.sqrt(variance) * _NORMAL.inv_cdf(uniform)
        return max(1, min(round(math.exp(min(exponent, 40.0))), self.max_tokens))


class Histogram(msgspec.Struct, frozen=True):
    """Counted lengths: ``upper[i]`` is the share of lengths up to and including ``values[i]``."""

    values: tuple[int, ...]
    upper: tuple[float, ...]

    @property
    def max_tokens(self) -> int:
        return max(self.values)

    def draw(self, uniform: float) -> int:
        return self.values[min(bisect.bisect_left(self.upper, uniform), len(self.values) - 1)]


class Independent(msgspec.Struct, frozen=True):
    """Prompt and answer know nothing of each other."""

    inputs: Lengths
    outputs: Lengths

    @property
    def max_input_tokens(self) -> int:
        return self.inputs.max_tokens

    @property
    def max_output_tokens(self) -> int:
        return self.outputs.max_tokens

    def draw(self, input_uniform: float, output_uniform: float) -> tuple[int, int]:
        return self.inputs.draw(input_uniform), self.outputs.draw(output_uniform)


class Empirical:
    """Recorded pairs, drawn with replacement, each alike."""

    def __init__(self, inputs: array[int], outputs: array[int]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self.max_input_tokens = max(inputs)
        self.max_output_tokens = max(outputs)

    def draw(self, input_uniform: float, output_uniform: float) -> tuple[int, int]:
        """One number chooses the pair."""
        del output_uniform
        row = int(input_uniform * len(self._inputs))
        return self._inputs[row], self._outputs[row]


_NORMAL = NormalDist()


def histogram(values: Sequence[int], weights: Sequence[float]) -> Histogram:
    """Weights need not sum to one; their sum is above 0."""
    total = math.fsum(weights)
    return Histogram(tuple(values), tuple(sum_ / total for sum_ in itertools.accumulate(weights)))


def parse_lengths(name: str, text: str, range_ratio: float = 1.0) -> Lengths:
    """``name`` is the option's. N with a ratio below 1 is the range from ratio * N to N. Raises ConfigError."""
    head, *parts = text.strip().split(":")
    if head == "lognormal":
        return _parse_lognormal(name, text, parts)
    parts = [head, *parts]
    if len(parts) > 2 or not all(_is_length(part) for part in parts):
        raise ConfigError(f"--{name} is {text[:40]!r}; needed: {_GRAMMAR}, in tokens from 1 to {MAX_LENGTH_TOKENS}")
    low, high = int(parts[0]), int(parts[-1])
    if low > high:
        raise ConfigError(f"--{name} is {text!r}: the low end is above the high one")
    if len(parts) == 1:
        low = max(1, round(high * range_ratio))
    return Uniform(low, high)


def _is_length(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 8 and 1 <= int(text) <= MAX_LENGTH_TOKENS


def _parse_lognormal(name: str, text: str, parts: Sequence[str]) -> Lognormal:
    try:
        mean_tokens, cv = (float(part) for part in parts)
    except ValueError:
        mean_tokens = cv = math.nan
    if not (1 <= mean_tokens <= MAX_LENGTH_TOKENS and 0 <= cv <= MAX_CV):
        raise ConfigError(
            f"--{name} is {text[:40]!r}; needed: lognormal:MEAN:CV, a mean from 1 to {MAX_LENGTH_TOKENS} tokens, a CV from 0 to {MAX_CV:g}"
        )
    return Lognormal(mean_tokens, cv)
