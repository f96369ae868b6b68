"""``core.features`` as numpy arrays [N steps, R data ranks]: of plans, or made directly for a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.counts import candidate_rows
from engine.core.errors import DomainError
from engine.core.features import Features, features
from engine.core.plan import StepPlan
from engine.core.specs import AttentionRole, ModelSpec, V41Spec

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FeatureTable:
    """The fields of ``core.features.Features``, each [N, R] float64; the dicts by compress ratio."""

    requests: Array
    tokens: Array
    prompt_tokens: Array
    emitting_rows: Array
    draft_rows: Array
    context_tokens: Array
    longest_query_tokens: Array
    longest_context_tokens: Array
    context_pairs: Array
    window_pairs: Array
    candidate_pairs: Array
    selected_pairs: dict[int, Array]
    scanned_pairs: dict[int, Array]
    copied_blocks: Array
    swapped_blocks: Array
    started_requests: Array
    saved_tails: Array

    @property
    def num_steps(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.tokens.shape[1])

    def take(self, index: NDArray[Any]) -> FeatureTable:
        """Some of the steps, by index or mask."""
        return self._each(lambda array: array[index])

    def tile_ranks(self, count: int) -> FeatureTable:
        """``count`` times as many ranks, which have the same work in turn."""
        return self._each(lambda array: np.tile(array, (1, count)))

    def _each(self, change: Any) -> FeatureTable:
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = {key: change(array) for key, array in value.items()} if isinstance(value, dict) else change(value)
        return FeatureTable(**values)


_FIELDS = [field.name for field in fields(FeatureTable)]
BY_RATIO = ("selected_pairs", "scanned_pairs")


def table_of(steps: Sequence[Features]) -> FeatureTable:
    """Stack the features of several steps of as many ranks each."""
    if not steps:
        raise DomainError("no steps to make a table of")
    plain = [name for name in _FIELDS if name not in BY_RATIO]
    ratios = {name: list(getattr(steps[0], name)) for name in BY_RATIO}
    rows = [[getattr(step, name) for step in steps] for name in plain]
    rows += [[getattr(step, name)[ratio] for step in steps] for name, keys in ratios.items() for ratio in keys]
    stacked = iter(np.array(rows, dtype=np.float64))  # at once: an array costs more than what it holds of a step
    values: dict[str, Any] = {name: next(stacked) for name in plain}
    values |= {name: {ratio: next(stacked) for ratio in keys} for name, keys in ratios.items()}
    return FeatureTable(**values)


def table_of_plans(plans: Sequence[StepPlan], spec: ModelSpec) -> FeatureTable:
    return table_of([features(plan, spec) for plan in plans])


def concatenate(tables: Sequence[FeatureTable]) -> FeatureTable:
    """Steps of several tables, one after the other."""
    values: dict[str, Any] = {}
    for field in fields(FeatureTable):
        parts = [getattr(table, field.name) for table in tables]
        if isinstance(parts[0], dict):
            values[field.name] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        else:
            values[field.name] = np.concatenate(parts)
    return FeatureTable(**values)


def uniform_steps(
    spec: ModelSpec, requests: Array, context_tokens: Array, new_tokens: Array, draft_tokens: Array | float = 0.0
) -> FeatureTable:
    """Steps [N, R] of ``requests`` items alike: ``new_tokens`` more each (1 + drafts in a decode step), on ``context_tokens`` in cache
    after the step. Closed forms, so that a sweep of any size costs no plans."""
    requests, context, new = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in (requests, context_tokens, new_tokens)))
    drafts = np.broadcast_to(np.asarray(draft_tokens, dtype=np.float64), requests.shape)
    if np.any(context < new) or np.any(new < 1 + drafts) or np.any(requests < 0):
        raise DomainError("a step needs 1 + drafts <= new_tokens <= context_tokens and requests >= 0")
    begin, zero = context - new, np.zeros(requests.shape)

    def sums(ratio: int = 1, cap: float | None = None) -> Array:
        return requests * (_pairs_until(context, ratio, cap) - _pairs_until(begin, ratio, cap))

    is_v41 = isinstance(spec, V41Spec)
    ratios = sorted({ratio for ratio in spec.compress_ratios if ratio}) if isinstance(spec, V41Spec) else []
    candidate = zero
    if isinstance(spec, V41Spec):
        layer = next((index for index in range(spec.num_layers) if spec.role(index) is AttentionRole.REINDEX), None)
        if layer is not None:
            candidate = sums(spec.compress_ratios[layer], candidate_rows(spec, layer))
    some = (requests > 0).astype(np.float64)
    return FeatureTable(
        requests=requests,
        tokens=requests * new,
        prompt_tokens=np.where(new - drafts > 1, requests * new, 0.0),
        emitting_rows=requests * (1 + drafts),
        draft_rows=requests * drafts,
        context_tokens=requests * context,
        longest_query_tokens=some * new,
        longest_context_tokens=some * context,
        context_pairs=sums(),
        window_pairs=sums(1, spec.sliding_window) if isinstance(spec, V41Spec) else zero,
        candidate_pairs=candidate,
        selected_pairs={ratio: sums(ratio, spec.index_top_k) for ratio in ratios} if isinstance(spec, V41Spec) else {},
        scanned_pairs={ratio: sums(ratio) for ratio in ratios} if is_v41 else {},
        copied_blocks=zero,
        swapped_blocks=zero,
        started_requests=np.where(begin == 0, requests, 0.0),
        saved_tails=zero,
    )


def _pairs_until(count: Array, ratio: int, cap: float | None) -> Array:
    """``core.features``' sum over n in [0, count] of min(n // ratio, cap), for arrays."""
    capped = count if cap is None else np.minimum(count, ratio * cap - 1)
    groups = np.floor((capped + 1) / ratio)
    below = ratio * groups * (groups - 1) / 2 + groups * (capped + 1 - ratio * groups)
    return np.asarray(below if cap is None else below + cap * np.maximum(0.0, count - capped))
