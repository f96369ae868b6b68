"""Measurements of a machine whose speed changed between them are brought to one speed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from calibration import calibrate
from calibration.assemble import EngineRun
from calibration.calibrate import Measurements, RunSpeed, Target, spec_hash
from calibration.campaign import CollectivePoint, Point
from calibration.cost_model import RESOURCE_OF_COMPONENT, ModelFit, ProbeFactors
from calibration.probe import Probe
from engine.core.specs import ModelSpec
from tests.calibration import synthetic

SLOW = 1.4
SLOWED = "tp2dp1ep1"
THEN = Probe(1e-3, 2e-3, 3e-3)
# Not every resource slows down alike.
FACTORS = ProbeFactors(compute=SLOW, memory=1.1, host=1.7)
NOW = Probe(SLOW * 1e-3, 1.1 * 2e-3, 1.7 * 3e-3)
Measured = tuple[list[Point], list[CollectivePoint], list[EngineRun]]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return synthetic.tiny()


@pytest.fixture(scope="module")
def measured(spec: ModelSpec) -> Measured:
    return synthetic.measurements(spec, noise=0.0, count=50)


def fitted(spec: ModelSpec, measured: Measured, run_speeds: list[RunSpeed] | None = None, together_probe: Probe | None = None) -> ModelFit:
    target = Target("tiny-v41", spec, spec_hash(spec), "float32", "random")
    points, collectives, runs = measured
    return calibrate.fit(target, Measurements(points, collectives, runs, run_speeds or [], [], together_probe), THEN)[0]


def test_points_of_a_slow_time(spec: ModelSpec, measured: Measured) -> None:
    points, collectives, runs = measured
    at_speed = [msgspec.structs.replace(point, probe=THEN) for point in points]
    slowed = [_slower(point) if point.layout == SLOWED else point for point in at_speed]
    silent = [msgspec.structs.replace(point, probe=None) for point in slowed]
    plain, known, unknown = (
        {rank.layout: {name: part.coefficients for name, part in rank.components.items()} for rank in fit.ranks}
        for fit in (fitted(spec, (one, collectives, runs)) for one in (at_speed, slowed, silent))
    )
    for layout, parts in plain.items():
        for name, coefficients in parts.items():
            assert np.allclose(known[layout][name], coefficients, rtol=1e-3, atol=1e-18), (layout, name)
    assert sum(unknown[SLOWED]["projection"]) > 1.3 * sum(plain[SLOWED]["projection"])


def _slower(point: Point) -> Point:
    components = {name: seconds * FACTORS.of(RESOURCE_OF_COMPONENT.get(name, "host")) for name, seconds in point.components.items()}
    whole = sum(components.values()) / sum(point.components.values())
    return msgspec.structs.replace(point, forward_s=tuple(seconds * whole for seconds in point.forward_s), components=components, probe=NOW)


def test_points_at_another_speed_and_back(measured: Measured) -> None:
    point = msgspec.structs.replace(measured[0][0], probe=THEN)
    slowed = point.at(NOW)
    assert slowed.components == pytest.approx(_slower(point).components)
    assert slowed.median_s / point.median_s == pytest.approx(sum(slowed.components.values()) / sum(point.components.values()))
    assert slowed.at(THEN).components == pytest.approx(point.components)
    assert point.at(None) == point
    unprobed = msgspec.structs.replace(point, probe=None)
    assert unprobed.at(NOW) == unprobed


def test_collectives_of_a_slow_time(spec: ModelSpec, measured: Measured) -> None:
    points, collectives, runs = measured
    slowed = [msgspec.structs.replace(one, seconds=one.seconds * FACTORS.host) for one in collectives]
    (plain,), (known,) = (fit.collectives for fit in (fitted(spec, measured), fitted(spec, (points, slowed, runs), together_probe=NOW)))
    assert known.seconds == pytest.approx(plain.seconds)


def test_runs_of_a_slow_time(spec: ModelSpec, measured: Measured) -> None:
    """Half of a layout's runs are slow, and say so: the factors are those of the machine at its own speed."""
    points, collectives, runs = measured
    slow = Probe(SLOW * 1e-3, SLOW * 2e-3, SLOW * 3e-3)
    slowed = [
        msgspec.structs.replace(
            run, step_s=tuple(seconds * SLOW for seconds in run.step_s), forward_s=tuple(seconds * SLOW for seconds in run.forward_s)
        )
        if index % 2
        else run
        for index, run in enumerate(runs)
    ]
    speeds = [RunSpeed(slow, slow) if index % 2 else RunSpeed(THEN, THEN) for index in range(len(runs))]
    for plain, known in zip(fitted(spec, measured).steps, fitted(spec, (points, collectives, slowed), speeds).steps, strict=True):
        for name in ("compute_scale", "collective_scale", "gap_s", "gap_per_request_s"):
            assert getattr(known, name) == pytest.approx(getattr(plain, name), rel=0.02), name


def test_a_speed_that_moves_after_the_probe_widens_the_interval(spec: ModelSpec, measured: Measured) -> None:
    """By what the errors of the model leave of it: the two are independent."""
    target = Target("tiny-v41", spec, spec_hash(spec), "float32", "random")
    changes = np.random.default_rng(0).normal(0.0, 0.1, 5_000).tolist()
    steady, moving = (
        calibrate.fit(target, Measurements(*measured, speed_changes=changes[:count]), THEN)[0].steps[0] for count in (0, len(changes))
    )
    assert msgspec.structs.replace(moving, low_factor=steady.low_factor, high_factor=steady.high_factor) == steady
    for name in ("low_factor", "high_factor"):
        own, both = np.log(getattr(steady, name)), np.log(getattr(moving, name))
        assert both**2 == pytest.approx(own**2 + (1.645 * 0.1) ** 2, rel=0.05), name
