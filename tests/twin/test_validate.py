"""validate: against an engine whose true step times are known, because it is a simulation with another cost model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import twinfer
from calibration import store
from calibration.cost_model import CalibratedCost
from calibration.probe import Probe
from dashboards.validation_report import validation_report
from engine.cli.workload_run import SessionRecord, WorkloadRun
from engine.core.cache_config import CacheConfig
from engine.core.driver_log import DriverLog
from engine.core.events import Event
from engine.core.layout import parse_layout
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduler_config import SchedulerConfig
from engine.core.specs import ModelSpec
from engine.core.step_cost import StepPrice
from tests.calibration.synthetic import tiny, true_fit
from twin.cluster import TwinConfig, simulate
from twin.ledger import Ledger, Measurement, Prediction
from twin.outcomes import sampling_params
from twin.workload.types import Workload

LAYOUT = "tp1dp2ep2"


class SlowerCost:
    """The calibrated machine, so many times as slow."""

    def __init__(self, cost: CalibratedCost, factor: float) -> None:
        self._cost, self._factor = cost, factor

    def price(self, plan: StepPlan) -> StepPrice:
        return msgspec.structs.replace(self._cost.price(plan), step_s=self._cost.price(plan).step_s * self._factor)


class SimulatedEngine:
    """Stands for the engine: each run is a simulation, and its log is what the engine's observer would have seen."""

    def __init__(self, factor: float, spoil: bool = False) -> None:
        self.spec: ModelSpec = tiny()
        cache = CacheConfig(num_blocks=64, block_size=128, max_running=8, max_batched_tokens=512, context_length=1024, num_tails=32)
        self.scheduler = SchedulerConfig(cache=cache, num_ranks=2, has_sequence_state=True, max_waiting=512)
        self.max_requests, self.layout, self.dtype = 512, LAYOUT, "float32"
        self._factor, self._spoil = factor, spoil

    def run(self, workloads: Sequence[Callable[[], Workload]], done: Callable[[Any, Any], None]) -> SessionRecord:
        config = msgspec.structs.replace(self.scheduler, max_waiting=self.max_requests)
        cost = SlowerCost(CalibratedCost(true_fit(self.spec), self.spec, parse_layout(LAYOUT).decode.unit), self._factor)
        record = SessionRecord(DriverLog(), {}, config)
        for make in workloads:
            workload, log = make(), DriverLog()
            record = SessionRecord(log, {}, config)
            simulate(TwinConfig(scheduler=self.scheduler, max_requests=512), workload, cost, observers=(_OfReplica(log),))
            run = WorkloadRun(0.0, 0, 0, len(log.plans), len(log.log))
            for sent in workload.arrivals():
                run.requests[sent.index] = sent
                record.requests[sent.index] = Request(sent.index, tuple(sent.prompt), sampling_params(sent), cache_salt=sent.cache_salt)
            done(record, run)
        if self._spoil:
            record.log.plans[3] = record.log.plans[2]
        return record


class _OfReplica:
    def __init__(self, log: DriverLog) -> None:
        self._log = log

    def planned(self, _replica: int, plan: StepPlan, now_s: float) -> None:
        self._log.planned(plan, now_s)

    def committed(self, _replica: int, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self._log.committed(plan, result, now_s)

    def events(self, _replica: int, events: Sequence[Event]) -> None:
        self._log.events(events)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.zip"
    store.save(path, store.new_calibration((true_fit(tiny()),), Probe(1.0, 1.0, 1.0)), [], [])
    return path


class KnownSpeed:
    """A speed meter by which the machine is ``slower`` in every run, and as it was calibrated before it."""

    def __init__(self, slower: float) -> None:
        self._slower, self._asked = slower, 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def between(self, begin_s: float, end_s: float) -> Probe | None:
        assert begin_s <= end_s
        self._asked += 1
        return None if self._asked == 1 else Probe(1.0, 1.0, 1.0) if self._asked % 2 else Probe(*[self._slower] * 3)


def validate(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: SimulatedEngine | None,
    *arguments: str,
    during: float = 1.0,
) -> tuple[int, str, str]:
    monkeypatch.setattr("twin.speed.run_probe", lambda: Probe(1.0, 1.0, 1.0))
    monkeypatch.setattr("twin.validation.SpeedMeter", lambda: KnownSpeed(during))
    if engine is not None:
        monkeypatch.setattr(twinfer, "_plan_engine", lambda _model, _options: engine)
    code = twinfer.main(["validate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


ARGUMENTS = ("tiny-v41", "--isl", "96", "--osl", "24", "--range-ratio", "0.5", "--requests", "24", "--request-rate", "inf,50%", "--json")


def test_an_engine_that_is_slower_by_a_quarter_is_seen_to_be(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, text, _ = validate(monkeypatch, capsys, SimulatedEngine(1.25), *ARGUMENTS, "--calibration", str(calibration), "--out", str(out))
    assert code == 0
    found = json.loads(text)
    assert found["parity"]["difference"] == ""
    assert found["parity"]["num_equal"] == found["parity"]["num_plans"] > 20
    assert [run["load"] for run in found["runs"]][::2] == ["all at once"] * 2
    # All at once, time only scales: every latency, statistic and rate is wrong by exactly as much as the steps.
    run = found["runs"][0]
    assert run["band"] == "saturated"
    for name, one in run["quantities"].items():
        assert one["error"] == pytest.approx(1.25 - 1.0 if name.endswith("per_s") else 1 / 1.25 - 1.0), name
        assert one["inside"] is False  # the interval is a tenth
    for one in (*run["requests"].values(), run["steps"]):
        assert one["bias"] == pytest.approx(1 / 1.25 - 1.0)
    assert run["steps"]["coverage"] == 0.0
    assert found["saturation"]["error"] == pytest.approx(0.25)
    # At half the load a step is wrong by as much, and a token later by less than that or as much.
    half = found["runs"][1]
    assert half["saturation_share"] == pytest.approx(0.625)
    assert half["band"] == "50 to 80 %"
    assert half["steps"]["bias"] == pytest.approx(-0.2)
    assert -0.5 < half["quantities"]["ttft_p50_s"]["error"] < 0.0
    # A simulation repeats itself.
    assert run["repetition"]["quantities"]["tpot_p50_s"]["error"] == 0.0
    assert found["saturation"]["repeatability"] == 0.0
    entries = Ledger(out / "ledger.jsonl").entries()
    assert [type(entry) for entry in entries] == [Prediction, Measurement] * 4
    assert entries[0].quantities["tpot_p50_s"].value == run["quantities"]["tpot_p50_s"]["predicted"]
    assert (out / "report.html").stat().st_size > 100_000


def test_a_machine_that_slows_down_in_the_run_is_told_from_a_wrong_model(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*ARGUMENTS, "--repeat", "1", "--calibration", str(calibration), "--out", str(tmp_path))
    code, text, err = validate(monkeypatch, capsys, SimulatedEngine(1.25), *arguments, during=1.25)
    assert code == 0
    assert err.count("the speed meter saw nothing") == 1  # as the first time it was asked
    run = json.loads(text)["runs"][0]
    assert run["quantities"]["tpot_p50_s"]["error"] == pytest.approx(1 / 1.25 - 1.0)
    assert run["at_speed"]["quantities"]["tpot_p50_s"]["error"] == pytest.approx(0.0, abs=1e-9)
    assert run["at_speed"]["requests"]["ttft_s"]["p90"] == pytest.approx(0.0, abs=1e-9)
    assert run["at_speed"]["steps"]["p90"] == pytest.approx(0.0, abs=1e-9)
    assert run["speed"]["host"] == 1.0
    assert run["at_speed"]["speed"]["host"] == 1.25
    (_, after) = Ledger(tmp_path / "ledger.jsonl").entries()[:2]
    assert after.speed.host_factor == 1.25
    assert "during" in (tmp_path / "report.html").read_text()


def test_an_exact_cost_model_has_no_error_and_a_plan_that_differs_is_a_fault(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SimulatedEngine(1.0, spoil=True)
    code, text, _ = validate(
        monkeypatch, capsys, engine, *ARGUMENTS, "--repeat", "1", "--calibration", str(calibration), "--out", str(tmp_path)
    )
    assert code == 1
    found = json.loads(text)
    assert found["parity"]["difference"].startswith("plan 3 differs")
    for run in found["runs"]:
        assert run["repetition"] is None
        assert all(one["error"] == 0.0 and one["inside"] for one in run["quantities"].values())
        assert run["steps"]["coverage"] == 1.0
    page = validation_report({**found, "model": "<b>"}, [])
    assert "&lt;b&gt;" in page
    assert "No parity: plan 3 differs" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--points", "x.csv"), "--points x.csv: predicting published measurements is not in this release"),
        ((), "MODEL is missing"),
        (("tiny-v41",), "--calibration is missing"),
        (("tiny-v41", "--calibration", "none.zip"), "none.zip cannot be read"),
        (("tiny-v41", "--calibration", "{}", "--request-rate", "0%"), "needed: 1% to 200%"),
        (("tiny-v41", "--calibration", "{}", "--request-rate", "nan%"), "needed: 1% to 200%"),
        (("tiny-v41", "--calibration", "{}", "--request-rate", "fast"), "--request-rate (command line) is 'fast'"),
        (("tiny-v41", "--calibration", "{}", "--request-rate", "1,,2"), "separated by commas"),
        (("tiny-v41", "--calibration", "{}", "--request-rate", "1", "--concurrency", "1"), "are both given"),
        (("tiny-v41", "--calibration", "{}", "--concurrency", "0"), "--concurrency (command line) is '0'"),
        (("tiny-v41", "--calibration", "{}", "--draft-tokens", "2"), "needs --acceptance"),
        (("tiny-v41", "--calibration", "{}", "--nnodes", "2"), "one machine"),
        (("tiny-v41", "--calibration", "{}", "--dtype", "bfloat16"), "it was calibrated in float32"),
        (("tiny-v41", "--calibration", "{}", "--workload", "x", "--isl", "3"), "are both given"),
        (("tiny-v41", "--calibration", "{}", "--isl", "1000000"), "1000000"),
    ],
)
def test_what_cannot_be_validated_is_refused_before_anything_runs(
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    filled = [str(calibration) if argument == "{}" else argument for argument in arguments]
    code, out, err = validate(monkeypatch, capsys, None, *filled)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_options_are_those_of_the_engine_and_of_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert twinfer.main(["validate", "--print-config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"layout", "block_size", "max_total_tokens", "random_seed", "isl", "osl", "request_rate", "seed"} <= set(found)
