"""What routed experts of one layer have to do on a rank, for ``floors`` to make terms and messages of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.features import Array
from calibration.imbalance import ExpertLoads
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec, V41Spec
from engine.core.traffic import sends_everything


@dataclass(frozen=True, slots=True)
class ExpertShape:
    num_experts: int
    top_k: int
    num_layers: int  # that have routed experts


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """[N, R] each, of one layer. ``rows`` reach a rank; ``tokens``: what it multiplies, as tokens of which each gives all ranks the same;
    ``touched``: experts whose weights it reads."""

    rows: Array
    tokens: Array
    touched: Array


def expert_shape(spec: ModelSpec) -> ExpertShape | None:
    if isinstance(spec, V41Spec):
        return ExpertShape(spec.num_experts, spec.experts_per_token, spec.num_layers)
    return None if spec.moe is None else ExpertShape(spec.moe.num_experts, spec.moe.experts_per_token, spec.num_moe_layers)


def expert_work(place: RankPlace, shape: ExpertShape, rows: Array, loads: ExpertLoads | None) -> ExpertWork:
    """``rows`` [N, R] are those of the data ranks: one data rank's own are all there are, else a rank has experts for all ranks' tokens.
    ``loads`` None: the mean rank's work."""
    layout, top_k = place.layout, shape.top_k
    total = rows if layout.dp == 1 else rows.sum(axis=1, keepdims=True)
    goes_everywhere = layout.dp == 1 or sends_everything(layout, top_k)
    if loads is None:
        touched = shape.num_experts / layout.ep * (1.0 - (1.0 - top_k / shape.num_experts) ** total)
        reached, tokens = total * (1.0 if goes_everywhere else reach(place, top_k, None)), total
    else:
        touched, tokens = loads.touched(total), loads.choices(total) * (layout.ep / top_k)
        reached = total if goes_everywhere else loads.rows(total)
    return ExpertWork(*(np.broadcast_to(values, rows.shape) for values in (reached, tokens, touched)))


def reach(place: RankPlace, top_k: int, loads: ExpertLoads | None) -> float:
    """The part of all ranks that a token travels to."""
    if sends_everything(place.layout, top_k):
        return 1.0
    return 1.0 - (1.0 - 1.0 / place.layout.ep) ** top_k if loads is None else loads.visited
