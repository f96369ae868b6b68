"""Rates from measurements: robust, non-negative least squares of relative errors over analytic terms, judged on what was held out.

A column is a term at one slope. Knots let the cost of one more row fall (``name<k``: rows up to k cost this much more each) or rise
(``name>k``: rows beyond k do). With non-negative coefficients every such sum is >= 0 and grows with its counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from calibration.features import Array
from calibration.floors import Term

FOLDS = 5
_ROUNDS = 8  # of reweighting; the weights settle in four or five
_HUBER = 1.5  # robust standard deviations beyond which a residual counts linearly
_RIDGE = 1e-3  # of the mean square of a column: keeps columns that say the same from taking turns


@dataclass(frozen=True, slots=True)
class Fitted:
    """Coefficients in the columns' order, and log(measured / predicted) of every point as predicted by a fit that did not see it."""

    coefficients: Array
    held_out: Array


def column_names(terms: Sequence[Term]) -> tuple[str, ...]:
    names: list[str] = []
    for term in terms:
        names.append(term.name)
        for knot in term.knots:
            names += [f"{term.name}<{knot:g}", f"{term.name}>{knot:g}"]
    return tuple(names)


def column_matrix(terms: Sequence[Term]) -> Array:
    """[N, R, K], in the order of ``column_names``."""
    columns: list[Array] = []
    for term in terms:
        count = np.asarray(term.count, dtype=np.float64)
        columns.append(count * term.unit)
        for knot in term.knots:
            columns += [np.minimum(count, knot) * term.unit, np.maximum(count - knot, 0.0) * term.unit]
    return np.stack(columns, axis=-1)


def fit_non_negative(columns_NK: Array, seconds_N: Array, scale_N: Array | None = None, weights_N: Array | None = None) -> Array:
    """Coefficients >= 0 that minimise a robust sum of ((columns @ c - seconds) / scale); ``scale`` is ``seconds`` unless given."""
    scale = np.maximum(seconds_N if scale_N is None else scale_N, 1e-12)
    size = np.abs(columns_NK).max(axis=0)
    used = size > 0
    coefficients = np.zeros(columns_NK.shape[1])
    if not used.any() or not len(seconds_N):
        return coefficients
    # Columns in units of their own largest value times the typical time, so that the ridge means the same for each.
    relative = columns_NK[:, used] / size[used] / scale[:, None] * float(np.median(scale))
    target = seconds_N / scale
    ridge = np.sqrt(_RIDGE * (relative**2).mean(axis=0) * len(seconds_N) / relative.shape[1])
    base = np.ones(len(seconds_N)) if weights_N is None else weights_N / weights_N.mean()
    weights = base
    solution = np.zeros(relative.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        rows = np.vstack((relative * root[:, None], np.diag(ridge)))
        solution, _ = nnls(rows, np.concatenate((target * root, np.zeros(len(ridge)))), maxiter=50 * rows.shape[1])
        residual = relative @ solution - target
        spread = max(1.4826 * float(np.median(np.abs(residual))), 1e-6)
        weights = base * np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(residual), 1e-12))
    coefficients[used] = solution / size[used] * float(np.median(scale))
    return coefficients


def fit_held_out(columns_NK: Array, seconds_N: Array, scale_N: Array | None = None, groups_N: Sequence[object] | None = None) -> Fitted:
    """The fit of everything, with every point's error under a fit without its fold. Points of a group stay together."""
    folds = _folds(groups_N or list(range(len(seconds_N))))
    held_out = np.zeros(len(seconds_N))
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any() or out.all():
            continue
        scale = None if scale_N is None else scale_N[~out]
        coefficients = fit_non_negative(columns_NK[~out], seconds_N[~out], scale)
        held_out[out] = log_ratio(seconds_N[out], columns_NK[out] @ coefficients)
    return Fitted(fit_non_negative(columns_NK, seconds_N, scale_N), held_out)


def log_ratio(measured: Array, predicted: Array) -> Array:
    """log(measured / predicted), bounded where one of them is nothing."""
    return np.clip(np.log(np.maximum(measured, 1e-12) / np.maximum(predicted, 1e-12)), -5.0, 5.0)


def _folds(groups: Sequence[object]) -> NDArray[np.int64]:
    """Folds dealt out in the order groups appear: points come sorted by nothing in particular."""
    numbers: dict[object, int] = {}
    for group in groups:
        numbers.setdefault(group, len(numbers))
    return np.array([numbers[group] % FOLDS for group in groups], dtype=np.int64)


def conformal_bounds(log_ratios: Array, coverage: float = 0.9) -> tuple[float, float]:
    """Factors around a prediction that hold ``coverage`` of new points exchangeable with these: split conformal, each tail on its own.

    With too few points for the tail asked for, the extreme one stands in, widened by the share that is missing.
    """
    count = len(log_ratios)
    if count == 0:
        return 0.5, 2.0
    ordered = np.sort(log_ratios)
    tail = (1.0 - coverage) / 2.0
    rank = math.ceil((1.0 - tail) * (count + 1))
    if rank <= count:
        return float(np.exp(ordered[count - rank])), float(np.exp(ordered[rank - 1]))
    missing = rank / count
    centre = float(np.median(ordered))
    low, high = centre + (ordered[0] - centre) * missing, centre + (ordered[-1] - centre) * missing
    return float(np.exp(min(low, -0.02))), float(np.exp(max(high, 0.02)))
