"""From measured points and whole steps to a ModelFit: components, then what whole steps show beside them, then how far off both are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibration.campaign import CollectivePoint, Point
from calibration.cost_model import (
    CalibratedCost,
    CollectiveFit,
    ComponentFit,
    ModelFit,
    ProbeFactors,
    RankFit,
    StepFit,
    hull_features,
)
from calibration.features import Array, FeatureTable, table_of, table_of_plans
from calibration.fit import column_matrix, column_names, conformal_bounds, fit_held_out, fit_non_negative, log_ratio
from calibration.floors import terms
from engine.core.errors import DomainError
from engine.core.features import Features
from engine.core.layout import parse_layout
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec

# A component's errors are relative to itself, but what is less than this share of a step cannot spoil it.
_LEAST_SHARE = 0.02
_MAX_STEPS_PER_RUN = 200
_TABLE_WEIGHT = 0.5  # of the collectives' table beside a run of whole steps


class EngineRun(msgspec.Struct, frozen=True):
    """Whole steps of one load: features of each plan, seconds from commit to commit, the slowest rank's forward, and how slow the machine
    was meanwhile beside what the calibration stands for."""

    model: str
    layout: str
    cores: int
    busy_neighbours: int
    batch: int
    context: int
    new_tokens: int
    method: str
    features: tuple[Features, ...]
    step_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    speed: ProbeFactors = ProbeFactors()

    @property
    def median_s(self) -> float:
        return float(np.median(self.step_s))

    def table(self) -> FeatureTable:
        return table_of(self.features)


# Not components, but what a HeldOut may also be of: all components of a rank together, and a whole step of the engine.
RANK, STEP = "rank", "step"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a fit is of."""

    model: str
    model_hash: str
    dtype: str
    element_bytes: int
    draft_tokens: int
    num_cores: int


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One prediction of something the fit behind it had not seen, for the report."""

    layout: str
    component: str  # or RANK, STEP
    tokens: float
    context_tokens: float
    measured_s: float
    predicted_s: float
    requests: float = 0.0
    prompt_tokens: float = 0.0


def assemble(
    identity: Identity,
    spec: ModelSpec,
    points: Sequence[Point],
    collectives: Sequence[CollectivePoint],
    runs: Sequence[EngineRun],
    speed_changes: Sequence[float] = (),
) -> tuple[ModelFit, list[HeldOut]]:
    """Points and collectives as of one speed, which the result stands for; ``speed_changes``: logarithms of how much slower the machine was
    in a run than just before it. Raises DomainError where there are too few points to fit.
    """
    held_out: list[HeldOut] = []
    keys = sorted({(point.cores, point.busy_neighbours, point.layout) for point in points}, reverse=True)
    ranks = tuple(_rank_fit(identity, spec, _of(points, *key), held_out) for key in keys)
    fit = ModelFit(
        model=identity.model,
        model_hash=identity.model_hash,
        dtype=identity.dtype,
        element_bytes=identity.element_bytes,
        draft_tokens=identity.draft_tokens,
        num_cores=identity.num_cores,
        ranks=ranks,
        collectives=_collective_fits(collectives),
        steps=(),
    )
    layouts = dict.fromkeys(run.layout for run in runs)
    steps = tuple(_step_fit(fit, spec, [run for run in runs if run.layout == layout], held_out) for layout in layouts)
    return msgspec.structs.replace(fit, steps=_pooled(steps, held_out, speed_changes)), held_out


def _of(points: Sequence[Point], cores: int, busy: int, layout: str) -> list[Point]:
    return [point for point in points if (point.cores, point.busy_neighbours, point.layout) == (cores, busy, layout)]


def _rank_fit(identity: Identity, spec: ModelSpec, points: Sequence[Point], held_out: list[HeldOut]) -> RankFit:
    first = points[0]
    if len(points) < 10:
        raise DomainError(
            f"{identity.model}, layout {first.layout}: {len(points)} shapes were measured; needed: at least 10. Give more time"
        )
    place = RankPlace(layout=parse_layout(first.layout).decode.unit)
    table = table_of_plans([point.shape.plan(place.layout.dp) for point in points], spec)
    work = terms(spec, place, table, identity.element_bytes, identity.draft_tokens)
    total = np.array([point.median_s for point in points])
    seconds = {name: np.zeros(len(points)) for name in work}
    for index, point in enumerate(points):
        for name, value in point.components.items():
            seconds[name if name in work else "other"][index] += value
    components: dict[str, ComponentFit] = {}
    unseen = np.zeros(len(points))
    for name, parts in work.items():
        if not seconds[name].any():
            continue
        columns = column_matrix(parts)[:, 0]
        scale = np.maximum(seconds[name], _LEAST_SHARE * total)
        fitted = fit_held_out(columns, seconds[name], scale)
        weighty = seconds[name] >= _LEAST_SHARE * total
        errors = np.abs(np.expm1(fitted.held_out[weighty])) if weighty.any() else np.zeros(1)
        components[name] = ComponentFit(
            columns=column_names(parts),
            coefficients=tuple(float(value) for value in fitted.coefficients),
            held_out_median=float(np.median(errors)),
            held_out_p90=float(np.quantile(errors, 0.9)),
            share=float(seconds[name].sum() / total.sum()),
        )
        predicted = seconds[name] * np.exp(-fitted.held_out)
        unseen += predicted
        held_out += held_out_of(first.layout, name, table, seconds[name], predicted, weighty)
    held_out += held_out_of(first.layout, RANK, table, total, unseen, np.ones(len(points), dtype=bool))
    hull = hull_features(table)
    return RankFit(
        layout=first.layout,
        cores=first.cores,
        busy_neighbours=first.busy_neighbours,
        components=components,
        low={name: float(values.min()) for name, values in hull.items()},
        high={name: float(values.max()) for name, values in hull.items()},
        num_points=len(points),
    )


def held_out_of(layout: str, name: str, table: FeatureTable, measured: Array, predicted: Array, chosen: NDArray[np.bool_]) -> list[HeldOut]:
    """The chosen ones of N predictions of ``name``."""
    tokens, context, requests, prompts = (
        column.max(axis=1) for column in (table.tokens, table.context_tokens, table.requests, table.prompt_tokens)
    )
    return [
        HeldOut(
            layout, name, float(tokens[index]), float(context[index]), float(one), float(two), float(requests[index]), float(prompts[index])
        )
        for index, (one, two, keep) in enumerate(zip(measured, predicted, chosen, strict=True))
        if keep
    ]


def _collective_fits(points: Sequence[CollectivePoint]) -> tuple[CollectiveFit, ...]:
    """Tables by size, made to grow with it: a larger message is never cheaper."""
    fits = []
    for count in sorted({point.num_ranks for point in points}):
        chosen = sorted((point.bytes_sent, point.seconds) for point in points if point.num_ranks == count)
        seconds = np.maximum.accumulate([one for _, one in chosen])
        fits.append(CollectiveFit(count, tuple(float(size) for size, _ in chosen), tuple(float(value) for value in seconds)))
    return tuple(fits)


# --- whole steps -----------------------------------------------------------------------------------------------------------------


def _step_fit(fit: ModelFit, spec: ModelSpec, runs: Sequence[EngineRun], held_out: list[HeldOut]) -> StepFit:
    """Factors and gaps of one layout, and its runs' errors by fits that had not seen them."""
    first = runs[0]
    layout = parse_layout(first.layout).decode.unit
    plain = StepFit(first.layout, first.cores, first.busy_neighbours)
    bare = msgspec.structs.replace(fit, steps=(plain,))
    parts = [_Parts.of(CalibratedCost(bare, spec, layout, probe=run.speed), run) for run in runs]
    whole = _fit_parts(plain, parts)
    for index, (run, part) in enumerate(zip(runs, parts, strict=True)):
        others = [other for number, other in enumerate(parts) if number != index]
        step = _fit_parts(plain, others) if len(others) > 1 else whole
        predicted = float(np.median(part.predicted(step)))
        table = part.table
        tokens, context = float(np.median(table.tokens.sum(axis=1))), float(np.median(table.context_tokens.sum(axis=1)))
        held_out.append(HeldOut(first.layout, STEP, tokens, context, run.median_s, predicted))
    return msgspec.structs.replace(whole, num_runs=len(runs))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a run's steps are made of, before the factors: [N] each."""

    table: FeatureTable
    compute_s: Array
    collective_s: Array
    step_s: Array
    forward_s: Array
    host_speed: float

    @staticmethod
    def of(cost: CalibratedCost, run: EngineRun) -> _Parts:
        every = max(1, -(-len(run.step_s) // _MAX_STEPS_PER_RUN))
        table = run.table().take(np.arange(0, len(run.step_s), every))
        priced = cost.price_table(table)
        compute = np.sum(list(cost.rank_seconds(table).values()), axis=0).max(axis=1)
        steps_s, forwards_s = np.array(run.step_s[::every]), np.array(run.forward_s[::every])
        return _Parts(table, compute, priced.step_s - compute, steps_s, forwards_s, run.speed.host)

    def gap_columns(self) -> Array:
        ones = np.ones(len(self.step_s))
        return self.host_speed * np.stack((ones, self.table.requests.sum(axis=1), self.table.started_requests.sum(axis=1)), axis=1)

    def predicted(self, step: StepFit) -> Array:
        gap = self.gap_columns() @ np.array((step.gap_s, step.gap_per_request_s, step.gap_per_start_s))
        return np.asarray(step.compute_scale * self.compute_s + step.collective_scale * self.collective_s + gap)


def _fit_parts(plain: StepFit, parts: Sequence[_Parts]) -> StepFit:
    """Every run has the same say, however many steps it has."""
    weights = np.concatenate([np.full(len(part.step_s), 1.0 / len(part.step_s)) for part in parts])
    compute, collective = (np.concatenate([getattr(part, name) for part in parts]) for name in ("compute_s", "collective_s"))
    forward, step = (np.concatenate([getattr(part, name) for part in parts]) for name in ("forward_s", "step_s"))
    scales = _scales(compute, collective, forward, weights)
    gap = fit_non_negative(np.concatenate([part.gap_columns() for part in parts]), np.maximum(step - forward, 0.0), step, weights)
    return msgspec.structs.replace(
        plain,
        compute_scale=float(scales[0]),
        collective_scale=float(scales[1]) if collective.any() else 1.0,
        gap_s=float(gap[0]),
        gap_per_request_s=float(gap[1]),
        gap_per_start_s=float(gap[2]),
    )


def _scales(compute_s: Array, collective_s: Array, forward_s: Array, weights: Array) -> Array:
    """Factors on a rank's own work and on its collectives. The latter are a small part of a step, which a few noisy runs do not tell from
    the rest: the measured table has a say, as if half a run had found it to be right."""
    columns = np.stack((compute_s, collective_s), axis=1)
    share = float(np.median(collective_s / np.maximum(forward_s, 1e-12)))
    if share <= 0:
        return fit_non_negative(columns, forward_s, None, weights)
    typical_s = float(np.median(forward_s))
    known = np.array([[0.0, share * typical_s]])
    return fit_non_negative(
        np.vstack((columns, known)),
        np.append(forward_s, share * typical_s),
        np.append(forward_s, typical_s),
        np.append(weights, _TABLE_WEIGHT),
    )


def _pooled(steps: Sequence[StepFit], held_out: Sequence[HeldOut], speed_changes: Sequence[float]) -> tuple[StepFit, ...]:
    """Conformal factors, of all layouts of the model together: a dozen runs of one alone have no 5 % tail.

    Runs are few and cover few shapes, shapes are many and know nothing of whole steps: the wider of the two bounds holds on each side.
    These are errors at a known speed. A prediction knows the speed before its run: how that may move on is an error of its own, and
    independent ones add up by their squares.
    """
    bounds = []
    for kind in (STEP, RANK):
        chosen = [entry for entry in held_out if entry.component == kind]
        measured, predicted = (np.array([getattr(entry, name) for entry in chosen]) for name in ("measured_s", "predicted_s"))
        bounds.append(conformal_bounds(log_ratio(measured, predicted)))
    moved = np.quantile(speed_changes, (0.05, 0.95)) if len(speed_changes) else np.zeros(2)
    low = float(np.exp(-np.hypot(min(0.0, *(np.log(one) for one, _ in bounds)), min(0.0, moved[0]))))
    high = float(np.exp(np.hypot(max(0.0, *(np.log(one) for _, one in bounds)), max(0.0, moved[1]))))
    return tuple(msgspec.structs.replace(step, low_factor=low, high_factor=high) for step in steps)
