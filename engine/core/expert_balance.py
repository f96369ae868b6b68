"""When to move experts: a window of expert counts, and the placements that would even out the ranks' loads.

Pure: the caller brings the counts of a while (summed over the ranks) and has what is proposed carried out by all ranks between two steps.
Layers are those of the backbone, then the draft's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.core.errors import InvariantError
from engine.core.expert_map import ExpertMap, balanced_map, kept_in_place, rank_loads
from engine.core.sharding import RankPlace, num_routed_experts
from engine.core.specs import ModelSpec, V41Spec

DEFAULT_WINDOW_REPORTS = 4  # one alone would chase the prompts of the moment
MIN_GAIN = 1.05  # moving weights pays only where the busiest rank gets noticeably less
LEAST_CHOICES_PER_EXPERT = 8  # fewer in the window say nothing about an expert


def first_maps(spec: ModelSpec, place: RankPlace) -> tuple[ExpertMap, ...]:
    """The placements a replica starts with, one for each layer with experts; none where one rank holds all of them."""
    num_experts = num_routed_experts(spec)
    if place.num_ranks == 1 or not num_experts:
        return ()
    if not isinstance(spec, V41Spec):
        return (place.expert_map(num_experts),) * spec.num_moe_layers
    maps = (place.expert_map(num_experts),) * spec.num_layers
    if spec.dspark is None:
        return maps
    return maps + (place.expert_map(spec.dspark.num_experts, draft=True),) * spec.dspark.num_layers


def imbalance(placement: ExpertMap, loads: Sequence[float]) -> float:
    """Load of the busiest rank over the mean of all; 1 is even, and so is a layer that nobody used."""
    ranks = rank_loads(placement, loads)
    total = sum(ranks)
    return max(ranks) * len(ranks) / total if total else 1.0


class ExpertBalancer:
    """One replica's. ``maps`` are the placements in force."""

    def __init__(self, maps: Sequence[ExpertMap], *, window_reports: int = DEFAULT_WINDOW_REPORTS) -> None:
        self.maps = tuple(maps)
        self.num_rebalances = 0
        self._window: deque[tuple[tuple[int, ...], ...]] = deque(maxlen=window_reports)
        self._sums = [[0] * placement.num_experts for placement in maps]

    def add(self, counts: Sequence[Sequence[int]]) -> None:
        """How often each expert of each layer was chosen since the last report. Raises InvariantError for other shapes."""
        if [len(layer) for layer in counts] != [placement.num_experts for placement in self.maps]:
            raise InvariantError(f"expert counts of {len(counts)} layers do not fit the {len(self.maps)} expert maps")
        if len(self._window) == self._window.maxlen:
            self._change(self._window[0], -1)
        self._window.append(tuple(tuple(layer) for layer in counts))
        self._change(self._window[-1], 1)

    def _change(self, counts: tuple[tuple[int, ...], ...], sign: int) -> None:
        for sums, layer in zip(self._sums, counts, strict=True):
            for expert, count in enumerate(layer):
                sums[expert] += sign * count

    def propose(self) -> tuple[ExpertMap, ...] | None:
        """Maps for all layers, from now on in force, where some layer gains by other ones; None where nothing is to be moved."""
        proposed = tuple(self._better(placement, sums) for placement, sums in zip(self.maps, self._sums, strict=True))
        if proposed == self.maps:
            return None
        self.maps = proposed
        self.num_rebalances += 1
        return proposed

    def _better(self, placement: ExpertMap, sums: list[int]) -> ExpertMap:
        if sum(sums) < LEAST_CHOICES_PER_EXPERT * placement.num_experts:
            return placement
        num_redundant = len(placement.logical) - placement.num_experts
        other = kept_in_place(placement, balanced_map(sums, num_redundant, placement.num_ranks))
        return other if max(rank_loads(placement, sums)) >= MIN_GAIN * max(rank_loads(other, sums)) else placement
