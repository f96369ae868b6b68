"""Measurements of a machine that never was: known rates, known noise, so that a fit can be judged."""

from __future__ import annotations

import numpy as np

from calibration.assemble import EngineRun, HeldOut, Identity, assemble
from calibration.calibrate import spec_hash, whole_loads
from calibration.campaign import COLLECTIVE_SIZES, CollectivePoint, Point
from calibration.cost_model import CalibratedCost, CollectiveFit, ComponentFit, ModelFit, RankFit, StepFit
from calibration.features import Array, FeatureTable, table_of, table_of_plans, uniform_steps
from calibration.fit import column_names
from calibration.floors import Resource, terms
from calibration.shapes import Shape, shapes
from calibration.steady import Load, closed_loop
from engine.core.features import features
from engine.core.layout import Layout, parse_layout
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec
from engine.model.files import read_model_files

NUM_CORES = 2
# Seconds per FLOP, per byte, per count of a unit of work, and per launch.
RATES: dict[Resource, float] = {"compute": 2e-11, "memory": 1e-10, "host": 2e-9}
LAUNCH_S = 2e-4
GAP_S, GAP_PER_REQUEST_S, GAP_PER_START_S = 3e-4, 2e-5, 1.5e-4
COMPUTE_SCALE, COLLECTIVE_SCALE = 1.1, 1.4
RANKS = (("tp1dp1ep1", 2, 0), ("tp2dp1ep1", 1, 1), ("tp1dp2ep2", 1, 1))


def tiny() -> ModelSpec:
    return read_model_files("tiny-v41").spec


def true_fit(spec: ModelSpec) -> ModelFit:
    """The machine itself: every term at its resource's rate, half as fast beyond 64 rows, launches at LAUNCH_S."""
    ranks = []
    for name, cores, busy in RANKS:
        place = RankPlace(layout=parse_layout(name).decode.unit)
        one = np.ones((1, place.layout.dp))
        components = {}
        for component, parts in terms(spec, place, _table_of_ones(spec, one), 4).items():
            columns = column_names(parts)
            coefficients = []
            for term in parts:
                rate = LAUNCH_S if term.name == "launch" else RATES[term.resource] * (2 if cores == 1 else 1)
                coefficients.append(rate)
                for knot in term.knots:
                    coefficients += [0.0, rate if knot == 64 else 0.0]
            components[component] = ComponentFit(columns, tuple(coefficients), 0.0, 0.0, 0.0)
        ranks.append(RankFit(name, cores, busy, components, {}, {}, 0))
    steps = tuple(
        StepFit(name, cores, busy, COMPUTE_SCALE, COLLECTIVE_SCALE, GAP_S, GAP_PER_REQUEST_S, GAP_PER_START_S, 0.9, 1.1, 1)
        for name, cores, busy in RANKS
    )
    collective = CollectiveFit(2, tuple(map(float, COLLECTIVE_SIZES)), tuple(1e-4 + 1e-9 * size for size in COLLECTIVE_SIZES))
    return ModelFit("tiny-v41", spec_hash(spec), "float32", 4, 0, NUM_CORES, tuple(ranks), (collective,), steps)


def _table_of_ones(spec: ModelSpec, one: Array) -> FeatureTable:
    return uniform_steps(spec, one, one, one)


def measured_shapes(spec: ModelSpec, count: int = 90, seed: int = 0) -> list[Shape]:
    return shapes(spec, count, max_batch=32, max_context=1024, max_tokens=2048, draft_tokens=0, seed=seed)


def measurements(
    spec: ModelSpec, noise: float = 0.02, count: int = 90, seed: int = 0
) -> tuple[list[Point], list[CollectivePoint], list[EngineRun]]:
    """What a campaign on that machine would have brought home."""
    truth, random = true_fit(spec), np.random.default_rng(seed)
    points = [point for layout, cores, busy in RANKS for point in _points(truth, spec, layout, cores, busy, noise, count, random)]
    collectives = [CollectivePoint(2, size, 1e-4 + 1e-9 * size) for size in COLLECTIVE_SIZES]
    runs = [run_of(truth, spec, layout, load, noise, random) for layout in ("tp1dp1ep1", "tp2dp1ep1") for load in whole_loads(16, 512)]
    return points, collectives, runs


def _points(
    truth: ModelFit, spec: ModelSpec, name: str, cores: int, busy: int, noise: float, count: int, random: np.random.Generator
) -> list[Point]:
    layout = parse_layout(name).decode.unit
    cost, chosen = CalibratedCost(truth, spec, layout, expert_balance=None), measured_shapes(spec, count)
    parts = cost.rank_seconds(table_of_plans([shape.plan(layout.dp) for shape in chosen], spec))
    found = []
    for index, shape in enumerate(chosen):
        seconds = {part: float(values[index, 0] * random.lognormal(0, noise)) for part, values in parts.items()}
        total = sum(seconds.values())
        found.append(Point("tiny-v41", name, cores, busy, shape, tuple(total * random.lognormal(0, noise, 5)), seconds))
    return found


def run_of(truth: ModelFit, spec: ModelSpec, name: str, load: tuple[int, int, int], noise: float, random: np.random.Generator) -> EngineRun:
    """A load's window on that machine."""
    batch, context, new_tokens = load
    layout: Layout = parse_layout(name).decode.unit
    plans = closed_loop(Load(batch, context, new_tokens, layout.dp, has_sequence_state=True)).plans
    rows = tuple(features(plan, spec) for plan in plans)
    cost = CalibratedCost(truth, spec, layout)
    priced = cost.price_table(table_of(rows))
    step = priced.step_s * random.lognormal(0, noise, len(rows))
    forward = step - priced.components["host_gap"]
    return EngineRun(
        "tiny-v41",
        name,
        cost.cores,
        cost.busy,
        batch,
        context,
        new_tokens,
        "window",
        rows,
        tuple(map(float, step)),
        tuple(map(float, forward)),
    )


def assembled(spec: ModelSpec, noise: float = 0.02, count: int = 90, seed: int = 0) -> tuple[ModelFit, list[HeldOut]]:
    identity = Identity("tiny-v41", spec_hash(spec), "float32", 4, 0, NUM_CORES)
    return assemble(identity, spec, *measurements(spec, noise, count, seed))
