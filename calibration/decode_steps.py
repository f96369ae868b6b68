"""Features of many steps in a row that only decode, from the contexts of their requests at the first of them: O(requests + steps).

From one step to the next every request has one token more in cache. A request's pairs grow by one whenever its context reaches the next
multiple of the ratio, until the cap; so a step's sum is the one before plus the number of requests that do. Requests are counted by the
step in which they do so first, modulo the ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibration.features import Array, FeatureTable
from engine.core.counts import candidate_rows
from engine.core.errors import DomainError
from engine.core.specs import AttentionRole, ModelSpec, V41Spec

Ints = NDArray[np.int64]


def decode_steps(
    spec: ModelSpec, contexts: Sequence[Sequence[int]], num_steps: int, saved_tails: Sequence[Sequence[int]] = ()
) -> FeatureTable:
    """[num_steps, R]. ``contexts`` [rank][request]: tokens in cache after the first step; ``saved_tails`` [step][rank], or none at all."""
    if num_steps < 1:
        raise DomainError(f"{num_steps} steps; allowed: 1 or more")
    shape = (num_steps, len(contexts))
    counts = np.array([len(rank) for rank in contexts], dtype=np.int64)
    flat = np.fromiter((context for rank in contexts for context in rank), dtype=np.int64, count=int(counts.sum()))
    sums = _Sums(flat, np.repeat(np.arange(len(contexts)), counts), shape)
    later, zero = np.arange(num_steps)[:, None], np.zeros(shape)
    requests = np.tile(counts.astype(np.float64), (num_steps, 1))
    some = (requests > 0).astype(np.float64)
    longest = np.array([max(rank, default=0) for rank in contexts], dtype=np.float64)
    context = (np.bincount(sums.ranks, weights=flat, minlength=len(contexts)) + counts * later).astype(np.float64)
    window, candidate = zero, zero
    selected: dict[int, Array] = {}
    scanned: dict[int, Array] = {}
    if isinstance(spec, V41Spec):
        window = sums.of(1, spec.sliding_window)
        layer = next((index for index in range(spec.num_layers) if spec.role(index) is AttentionRole.REINDEX), None)
        if layer is not None:
            candidate = sums.of(spec.compress_ratios[layer], candidate_rows(spec, layer))
        for ratio in sorted({ratio for ratio in spec.compress_ratios if ratio}):
            selected[ratio] = sums.of(ratio, spec.index_top_k)
            scanned[ratio] = sums.of(ratio, None)
    return FeatureTable(
        requests=requests,
        tokens=requests,
        prompt_tokens=zero,
        emitting_rows=requests,
        draft_rows=zero,
        context_tokens=context,
        longest_query_tokens=some,
        longest_context_tokens=some * (longest + later),
        context_pairs=context,
        window_pairs=window,
        candidate_pairs=candidate,
        selected_pairs=selected,
        scanned_pairs=scanned,
        copied_blocks=zero,
        swapped_blocks=zero,
        started_requests=zero,
        saved_tails=np.array(saved_tails, dtype=np.float64) if saved_tails else zero,
    )


class _Sums:
    """``contexts`` [requests] at the first step, and the rank of each; ``shape`` is (steps, ranks)."""

    def __init__(self, contexts: Ints, ranks: Ints, shape: tuple[int, int]) -> None:
        self.contexts, self.ranks, self.shape = contexts, ranks, shape

    def of(self, ratio: int, cap: int | None) -> Array:
        """Sums [steps, ranks] over requests of min(context // ratio, cap)."""
        steps, num_ranks = self.shape
        values = self.contexts // ratio
        if cap is not None:
            values = np.minimum(values, cap)
        first: Array = np.bincount(self.ranks, weights=values, minlength=num_ranks).astype(np.float64)
        if steps == 1:
            return first[None, :]
        # Of the steps after the first, number i is in row i // ratio, column i % ratio; a request grows in one column, once a row.
        rows = -(-(steps - 1) // ratio)
        places = self.ranks * ratio + (-self.contexts - 1) % ratio
        grown = np.zeros((num_ranks, rows, ratio))
        if cap is None:
            grown += np.bincount(places, minlength=num_ranks * ratio).reshape(num_ranks, 1, ratio)
        else:
            left = cap - values  # times that it still grows
            growing = left > 0
            grown += np.bincount(places[growing], minlength=num_ranks * ratio).reshape(num_ranks, 1, ratio)
            ending = growing & (left < rows)
            if ending.any():
                ends = np.zeros_like(grown)
                place = places[ending]
                np.add.at(ends, (place // ratio, left[ending], place % ratio), 1.0)
                grown -= np.cumsum(ends, axis=1)
        each = grown.reshape(num_ranks, -1)[:, : steps - 1]
        sums = np.concatenate([first[:, None], first[:, None] + np.cumsum(each, axis=1)], axis=1)
        return np.ascontiguousarray(sums.T)  # as in a table of plans: numpy adds in the order of memory
