"""Measurements of a machine whose speed changed between them are brought to one speed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from calibration.assemble import EngineRun, Identity, assemble
from calibration.calibrate import spec_hash
from calibration.campaign import CollectivePoint, Point
from calibration.cost_model import ModelFit, ProbeFactors
from engine.core.specs import ModelSpec
from tests.calibration import synthetic

SLOW = 1.4
SLOWED = "tp2dp1ep1"
Measured = tuple[list[Point], list[CollectivePoint], list[EngineRun]]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return synthetic.tiny()


@pytest.fixture(scope="module")
def measured(spec: ModelSpec) -> Measured:
    return synthetic.measurements(spec, noise=0.0, count=50)


def fitted(spec: ModelSpec, measured: Measured, speeds: dict[str, ProbeFactors] | None = None) -> ModelFit:
    identity = Identity("tiny-v41", spec_hash(spec), "float32", 4, 0, synthetic.NUM_CORES)
    return assemble(identity, spec, *measured, speeds)[0]


def test_points_of_a_slow_time(spec: ModelSpec, measured: Measured) -> None:
    points, collectives, runs = measured
    slowed = [_slower(point) if point.layout == SLOWED else point for point in points]
    speeds = {SLOWED: ProbeFactors(SLOW, SLOW, SLOW)}
    plain, known, unknown = (
        {rank.layout: rank.components["projection"].coefficients for rank in fit.ranks}
        for fit in (fitted(spec, measured), fitted(spec, (slowed, collectives, runs), speeds), fitted(spec, (slowed, collectives, runs)))
    )
    for layout, coefficients in plain.items():
        assert np.allclose(known[layout], coefficients, rtol=1e-3, atol=1e-18), layout
    assert sum(unknown[SLOWED]) > 1.3 * sum(plain[SLOWED])


def _slower(point: Point) -> Point:
    components = {name: seconds * SLOW for name, seconds in point.components.items()}
    return msgspec.structs.replace(point, forward_s=tuple(seconds * SLOW for seconds in point.forward_s), components=components)


def test_runs_of_a_slow_time(spec: ModelSpec, measured: Measured) -> None:
    """Half of a layout's runs are slow, and say so: the factors are those of the machine at its own speed."""
    points, collectives, runs = measured
    slowed = [
        msgspec.structs.replace(
            run,
            step_s=tuple(seconds * SLOW for seconds in run.step_s),
            forward_s=tuple(seconds * SLOW for seconds in run.forward_s),
            speed=ProbeFactors(SLOW, SLOW, SLOW),
        )
        if index % 2
        else run
        for index, run in enumerate(runs)
    ]
    for plain, known in zip(fitted(spec, measured).steps, fitted(spec, (points, collectives, slowed)).steps, strict=True):
        for name in ("compute_scale", "collective_scale", "gap_s", "gap_per_request_s"):
            assert getattr(known, name) == pytest.approx(getattr(plain, name), rel=0.02), name
