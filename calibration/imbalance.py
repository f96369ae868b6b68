"""How uneven the work of expert ranks is: what the busiest of them gets of T tokens that each choose K of E experts.

A step waits for its busiest rank in every layer. Experts are of different popularity, and even where they are not, few tokens are spread
unevenly by chance. So the busiest rank's expectation is taken over the choices, then the mean over the layers:

    choices  token-expert pairs it multiplies (its GEMMs' rows)
    touched  experts of it that get any token at all (the weights it reads)
    rows     tokens that reach it, each once however many of its experts are chosen (what dispatch and combine carry)

Popularity is the probability of each expert that a token chooses it; these add up to K. An expert with several slots has its tokens
dealt out over them in turn. The largest of several counts is expected by the counts' being binomials of the right means and variances,
independent but for their sum, which is known: Levin, "A representation for multinomial cumulative distribution functions" (Annals of
Statistics 9, 1981). Choices and touched are within 5 % of Monte Carlo from a few tokens up, rows within 10 %. The three maxima may lie on
different ranks: prices that add them up are bounds of the slowest from above.

Legend: L layers, R expert ranks, S slots of a rank, E experts, G numbers of tokens, X points of a distribution.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import msgspec
import numpy as np
from scipy.special import betainc, log_ndtr, ndtr

from calibration.features import Array
from calibration.measured import MEASURED, read_expert_tokens
from engine.core.errors import ConfigError, DomainError
from engine.core.expert_map import ExpertMap, balanced_map, even_map

MAX_ZIPF = 8.0
# Layers that a law stands for: popularity is dealt out to the experts anew in each, as trained models show no order.
_ZIPF_LAYERS = 12
_TOKENS: Array = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, *(64 << power for power in range(14))], dtype=np.float64)
_POINTS = 32  # of a distribution of loads, at which its tail is summed
_REACH = 6.0  # standard deviations to either side of the highest mean within which the maximum lies
_TINY = 1e-12


class ExpertBalance(msgspec.Struct, frozen=True):
    """Which experts tokens choose. ``zipf``: shares of load by rank^-zipf, 0 for equal ones. ``counts``: measured instead, by layer."""

    zipf: float = 0.0
    counts: tuple[tuple[int, ...], ...] = ()

    @property
    def is_balanced(self) -> bool:
        return not self.zipf and not self.counts


BALANCED = ExpertBalance()


def parse_expert_balance(text: str) -> ExpertBalance:
    """``--expert-balance``: balanced, zipf:S or measured:FILE. Raises ConfigError."""
    if text == "balanced":
        return BALANCED
    if text.startswith(MEASURED):
        return ExpertBalance(counts=read_expert_tokens(text[len(MEASURED) :]))
    if text.startswith("zipf:"):
        try:
            exponent = float(text[len("zipf:") :])
        except ValueError:
            exponent = math.nan
        if 0.0 <= exponent <= MAX_ZIPF:
            return ExpertBalance(zipf=exponent)
    raise ConfigError(f"--expert-balance is {text[:80]!r}; needed: balanced, zipf:S with S from 0 to {MAX_ZIPF:g}, or measured:FILE")


def choice_probabilities(balance: ExpertBalance, num_experts: int, top_k: int, num_layers: int) -> Array:
    """[L, E] that a token chooses an expert; rows add up to ``top_k``. One layer where all are alike. Raises ConfigError for counts of
    another model."""
    if balance.counts:
        counts = balance.counts[:num_layers]
        if len(counts) < num_layers or any(len(layer) != num_experts for layer in counts):
            raise ConfigError(
                f"--expert-balance: {len(counts)} layers of {sorted({len(layer) for layer in counts})} experts are counted; the model has "
                f"{num_layers} of {num_experts}"
            )
        return np.stack([_capped(np.array(layer, dtype=np.float64), top_k) for layer in counts])
    if not balance.zipf:
        return np.full((1, num_experts), top_k / num_experts)
    shares = [float(rank) ** -balance.zipf for rank in range(1, num_experts + 1)]
    layers = range(min(num_layers, _ZIPF_LAYERS))
    return np.stack([_capped(np.array(random.Random(layer).sample(shares, num_experts)), top_k) for layer in layers])


def _capped(shares_E: Array, top_k: int) -> Array:
    """In proportion to ``shares``, as far as no expert is chosen by a token twice."""
    positive = int((shares_E > 0).sum())
    if positive < top_k:
        raise ConfigError(f"--expert-balance: {positive} experts of a layer have tokens; a token chooses {top_k} different ones")
    full = np.zeros(len(shares_E), dtype=bool)
    while True:
        rest = shares_E[~full].sum()
        found = np.where(full, 1.0, shares_E * ((top_k - full.sum()) / rest if rest > 0 else 0.0))
        if not (over := (found > 1.0) & ~full).any():
            return np.asarray(found)
        full |= over


def expected_maximum(mean: Array, variance: Array, *, is_total_known: bool) -> Array:
    """[...] of the largest of R counts [..., R], independent binomials of these moments (``variance`` <= ``mean``), given their sum where
    ``is_total_known``: then it is the sum of the means."""
    if mean.shape[-1] == 1:
        return np.asarray(mean[..., 0])
    variance = np.clip(variance, _TINY, np.maximum(mean, _TINY))
    mean = np.maximum(mean, _TINY)
    deviation = np.sqrt(variance)
    low = np.maximum(0.0, np.floor((mean - _REACH * deviation).max(axis=-1)))
    high = np.ceil((mean + (_REACH + 2) * deviation).max(axis=-1)) + 8.0
    spread = (high - low)[..., None]
    steps = np.arange(_POINTS + 1)
    x = np.where(spread <= _POINTS, low[..., None] + steps, np.round(low[..., None] + spread * (steps / _POINTS)))
    total = mean.sum(axis=-1, keepdims=True)
    if not is_total_known:
        below = np.prod(_binomial_cdf(x[..., None, :], mean[..., None], variance[..., None]), axis=-2)
    elif mean.shape[-1] == 2:  # the other one has the rest
        one, spent = mean[..., :1], variance[..., :1] * variance[..., 1:] / variance.sum(axis=-1, keepdims=True)
        rest = total - x - 1.0
        below = _binomial_cdf(x, one, spent) - np.where(rest < 0, 0.0, _binomial_cdf(np.maximum(rest, 0.0), one, spent))
    else:
        below = np.prod(_binomial_cdf(x[..., None, :], mean[..., None], variance[..., None]), axis=-2)
        below = below * _total_ratio(x[..., None, :], mean, variance)
        below = np.where(x * mean.shape[-1] < total - 1e-9, 0.0, below)
    above = 1.0 - np.maximum.accumulate(np.clip(below, 0.0, 1.0), axis=-1)
    # The sum of P(maximum > x) over all integers: trapezoids where points are further apart.
    inner = ((above[..., 1:] + above[..., :-1]) / 2 * np.diff(x, axis=-1)).sum(axis=-1)
    found = low + inner + (above[..., 0] + above[..., -1]) / 2
    return np.asarray(np.maximum(found, mean.max(axis=-1)))


def _binomial_cdf(x: Array, mean: Array, variance: Array) -> Array:
    """P(count <= x) of the binomial with these moments; trials need not be whole."""
    chance = np.clip(1.0 - variance / mean, 1e-9, 1.0)
    trials = mean / chance
    return np.asarray(np.where(x >= trials - 1e-9, 1.0, betainc(np.maximum(trials - x, 1e-9), x + 1.0, 1.0 - chance)))


def _total_ratio(x: Array, mean: Array, variance: Array) -> Array:
    """[..., X]: how much likelier the known total is where no count exceeds x than it is at all. Counts as cut normals here."""
    deviation = np.sqrt(variance)[..., None]
    z = (x + 0.5 - mean[..., None]) / deviation
    hazard = np.exp(-z * z / 2 - log_ndtr(z)) / math.sqrt(2 * math.pi)
    cut_mean = (mean[..., None] - deviation * hazard).sum(axis=-2)
    cut_variance = np.maximum(deviation**2 * (1.0 - z * hazard - hazard**2), _TINY).sum(axis=-2)
    total, scale = mean.sum(axis=-1, keepdims=True), np.sqrt(cut_variance)
    inside = ndtr((total + 0.5 - cut_mean) / scale) - ndtr((total - 0.5 - cut_mean) / scale)
    half = 0.5 / np.sqrt(variance.sum(axis=-1, keepdims=True))
    return np.asarray(inside / (2 * ndtr(half) - 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoads:
    """The busiest rank's work by number of tokens, tabulated; between them straight in log-log, so that it grows with the tokens.

    ``visited``: the part of all ranks that a token's experts are on, in the mean.
    """

    num_ranks: int
    top_k: int
    busiest_choices: Array
    busiest_touched: Array
    busiest_rows: Array
    visited: float

    def choices(self, tokens: Array) -> Array:
        return _interpolated(tokens, self.busiest_choices, grows=True)

    def touched(self, tokens: Array) -> Array:
        return _interpolated(tokens, self.busiest_touched, grows=False)

    def rows(self, tokens: Array) -> Array:
        return _interpolated(tokens, self.busiest_rows, grows=True)

    def imbalance(self, tokens: Array) -> Array:
        """Choices of the busiest rank over the mean of all; 1 is even."""
        return np.asarray(self.choices(tokens) * self.num_ranks / (self.top_k * np.maximum(tokens, _TINY)))


def _interpolated(tokens: Array, values: Array, *, grows: bool) -> Array:
    """In proportion to the tokens below one; beyond the last number too where it ``grows``, else no more."""
    inside = np.clip(tokens, 1.0, _TOKENS[-1])
    found = np.exp(np.interp(np.log(inside), np.log(_TOKENS), np.log(values)))
    factor = tokens / inside if grows else np.minimum(tokens, 1.0)
    scaled: Array = found * factor
    return scaled


@functools.lru_cache(maxsize=64)
def expert_loads(
    num_experts: int,
    top_k: int,
    num_layers: int,
    num_ranks: int,
    *,
    num_redundant: int = 0,
    balance: ExpertBalance = BALANCED,
    is_rebalanced: bool = False,
) -> ExpertLoads:
    """Experts in order and copies of every one in turn, as a replica starts; ``is_rebalanced``: placed by these very loads instead.

    Raises ConfigError for numbers that cannot be shared out, DomainError for a model without experts.
    """
    if not 1 <= top_k <= num_experts:
        raise DomainError(f"a token cannot choose {top_k} of {num_experts} experts")
    chosen_LE = choice_probabilities(balance, num_experts, top_k, num_layers)
    maps = [_placement(layer, num_redundant, num_ranks, is_rebalanced=is_rebalanced) for layer in chosen_LE]
    slots_LRS = np.array([placement.logical for placement in maps], dtype=np.int64).reshape(len(maps), num_ranks, -1)
    copies_LE = np.stack([np.bincount(row.ravel(), minlength=num_experts) for row in slots_LRS])
    chosen_LRS, copies_LRS = (np.take_along_axis(of[:, None, :], slots_LRS, 2) for of in (chosen_LE, copies_LE.astype(np.float64)))
    visits_LR = _visits(chosen_LE, (chosen_LRS / copies_LRS).sum(axis=2) / top_k, top_k)
    choices, touched, rows = [], [], []
    for tokens in _TOKENS:
        # A slot has every n-th token: so many turns for certain, and one more in a part of the cases.
        turns_LRS = np.floor(tokens / copies_LRS)
        rest_LRS = tokens / copies_LRS - turns_LRS
        mean = chosen_LRS * (turns_LRS + rest_LRS)
        variance = mean * (1.0 - chosen_LRS) + chosen_LRS**2 * rest_LRS * (1.0 - rest_LRS)
        choices.append(expected_maximum(mean.sum(axis=2), variance.sum(axis=2), is_total_known=True).mean())
        any_LRS = 1.0 - (1.0 - chosen_LRS) ** turns_LRS * (1.0 - rest_LRS * chosen_LRS)
        most = expected_maximum(any_LRS.sum(axis=2), (any_LRS * (1.0 - any_LRS)).sum(axis=2), is_total_known=False)
        touched.append(np.minimum(most, slots_LRS.shape[2]).mean())
        found = expected_maximum(tokens * visits_LR, tokens * visits_LR * (1.0 - visits_LR), is_total_known=True)
        rows.append(np.clip(found, 1.0, tokens).mean())
    least = [max(1.0, math.ceil(tokens * top_k / num_ranks)) for tokens in _TOKENS]
    return ExpertLoads(
        num_ranks,
        top_k,
        np.maximum.accumulate(np.maximum(choices, least)),
        np.maximum.accumulate(np.maximum(touched, 1.0)),
        np.maximum.accumulate(np.array(rows)),
        float(visits_LR.mean()),
    )


def _placement(chosen_E: Array, num_redundant: int, num_ranks: int, *, is_rebalanced: bool) -> ExpertMap:
    even = even_map(len(chosen_E), num_redundant, num_ranks)
    return balanced_map([float(value) for value in chosen_E], num_redundant, num_ranks) if is_rebalanced else even


def _visits(chosen_LE: Array, share_LR: Array, top_k: int) -> Array:
    """[L, R] that any of a token's experts is on a rank, ``share`` its part of all choices: drawn one after the other without return, as if
    of so many equally likely experts as are as diverse as these (Simpson's number). Exact where they are, and where a token has one."""
    diversity_L1 = top_k**2 / (chosen_LE**2).sum(axis=1, keepdims=True)
    none_LR = np.ones(share_LR.shape)
    for draw in range(top_k):
        none_LR *= np.maximum(0.0, 1.0 - share_LR * diversity_L1 / (diversity_L1 - draw))
    return 1.0 - none_LR
