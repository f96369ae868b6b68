"""Which engines a calibration is taken for, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibration import service, store
from calibration.probe import Probe
from calibration.service import Service, cost_of_service
from engine.core.errors import ConfigError
from engine.core.plan import PlanItem, RankPlan, StepPlan
from tests.calibration import synthetic

THEN = Probe(1e-3, 2e-3, 1e-3)
TINY = synthetic.tiny()
ENGINE = Service("tiny-v41", TINY, "tp1dp1ep1", "float32", "cpu", 2, "gpu", 0)
PLAN = StepPlan(0, (RankPlan(items=(PlanItem(0, 0, 99, 1, 0, True),)),))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("service") / "machine.cal"
    store.save(path, store.new_calibration((synthetic.true_fit(TINY),), THEN), [], [])
    return path


@pytest.fixture(autouse=True)
def _speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is as fast as it was."""
    monkeypatch.setattr(service, "run_probe", lambda: THEN)


def test_the_engines_own_calibration_prices_its_steps_at_todays_speed(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    price = cost_of_service(written, ENGINE).price(PLAN)
    assert 0 < price.low_s < price.step_s < price.high_s
    assert not price.note
    monkeypatch.setattr(service, "run_probe", lambda: Probe(2e-3, 4e-3, 2e-3))
    slower = cost_of_service(written, ENGINE).price(PLAN)
    assert slower.step_s == pytest.approx(2 * price.step_s)
    assert "speed probe" in slower.note


def test_of_another_machine_it_is_taken_as_it_was_and_said_so(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = msgspec.structs.replace(store.this_machine(), host="0123456789abcdef")
    monkeypatch.setattr(store, "this_machine", lambda: elsewhere)
    monkeypatch.setattr(service, "run_probe", lambda: Probe(1.0, 1.0, 1.0))
    assert not cost_of_service(written, ENGINE).price(PLAN).note
    assert "another machine" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "smollm2-135m", "spec": msgspec.structs.replace(TINY, vocab_size=8)}, "smollm2-135m is not in the calibration"),
        ({"spec": msgspec.structs.replace(TINY, vocab_size=8)}, "not the model that was calibrated"),
        ({"dtype": "bfloat16"}, "dtype float32, and the engine runs bfloat16"),
        ({"device": "cuda:0"}, "runs on cuda:0"),
        ({"num_threads": 1}, "ranks with 2 cores, and those of the engine have 1 threads"),
        ({"draft_tokens": 3}, "0 draft tokens"),
    ],
)
def test_of_another_engine_it_is_refused_with_the_reason(written: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        cost_of_service(written, msgspec.structs.replace(ENGINE, **changes))
    assert str(written) in str(caught.value)


def test_a_layout_that_was_never_measured_is_refused(tmp_path: Path) -> None:
    fit = synthetic.true_fit(TINY)
    alone = msgspec.structs.replace(fit, ranks=tuple(rank for rank in fit.ranks if rank.cores == 2))
    path = tmp_path / "one-rank.cal"
    store.save(path, store.new_calibration((alone,), THEN), [], [])
    with pytest.raises(ConfigError, match="tp2dp1ep1 gives a rank 1 cores"):
        cost_of_service(path, msgspec.structs.replace(ENGINE, layout="tp2dp1ep1", num_threads=1))
