"""What ``twinfer validate`` does: predict a load, write that down, run it, write down what came of it; at the end compare and replay.

A prediction knows how fast the machine was in the seconds before its run. How fast it turned out to be is measured beside the run: what
the prediction would then have been is shown apart, so that the model's own error can be told from the machine's change of speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from calibration import store
from calibration.calibrate import spec_hash
from calibration.cost_model import CalibratedCost, ProbeFactors
from calibration.features import table_of_plans
from calibration.speed_meter import SpeedMeter
from engine.core.errors import ConfigError
from engine.core.layout import parse_layout
from engine.core.plan import StepPlan, StepResult
from engine.core.step_cost import StepCost, StepPrice
from engine.options import Resolved
from twin import compare
from twin.cluster import TwinConfig, simulate
from twin.compare import Outcome
from twin.ledger import Ledger, Prediction, Quantity, Speed, Value, measured, predict
from twin.parity import check_parity
from twin.questions import acceptance
from twin.result import StepTime
from twin.speed import at_probe, probe_now
from twin.validate import DEFAULT_REQUESTS, Load, PlannedEngine, RecordLike, RunLike
from twin.workload.spec import WORKLOAD_OPTIONS, WorkloadSpec, make_workload
from twin.workload.types import Workload

if TYPE_CHECKING:
    from engine.core.events import Event

MAX_DRAWN = 600
# How far back the machine's speed is looked at before a run of some tens of seconds: so long foretells it better than a moment.
_RECENT_S = 10.0


class _End:
    """The cost model's prices at one end of their intervals."""

    def __init__(self, cost: StepCost, end: str) -> None:
        self._cost, self._end = cost, end

    def price(self, plan: StepPlan) -> StepPrice:
        price = self._cost.price(plan)
        return msgspec.structs.replace(price, step_s=getattr(price, self._end))


class _Events:
    """Keeps a simulation's event log."""

    def __init__(self) -> None:
        self.log: list[Event] = []

    def planned(self, _replica: int, _plan: StepPlan, _now_s: float) -> None: ...

    def committed(self, _replica: int, _plan: StepPlan, _result: StepResult, _now_s: float) -> None: ...

    def events(self, _replica: int, events: Sequence[Event]) -> None:
        self.log += events


@dataclass(slots=True)
class Run:
    """A load in one round: what was predicted, and what came of it."""

    load: Load
    name: str
    rate_per_s: float | None
    number: int  # of the round
    cost: CalibratedCost
    speed: Speed
    predicted: Outcome
    prediction: Prediction
    began_s: float = 0.0
    measured: Outcome | None = None
    steps: dict[str, Any] | None = None
    at_speed: dict[str, Any] | None = None  # what it would have been at the speed of the run


class Validation:
    def __init__(
        self, model: str, options: Resolved, engine: PlannedEngine, loads: Sequence[Load], out: Path, say: Callable[[str], None]
    ) -> None:
        """Raises ConfigError and DomainError for what cannot be predicted, before the engine is opened."""
        self._model, self._options, self._engine, self._loads, self._say = model, options, engine, loads, say
        self._calibration = store.load(Path(options["calibration"]))
        self._fit = self._calibration.model(model, spec_hash(engine.spec))
        if engine.dtype != self._fit.dtype:
            raise ConfigError(f"the engine runs {model} in {engine.dtype}; it was calibrated in {self._fit.dtype}")
        self._cost(ProbeFactors())
        self._ledger = Ledger(out / "ledger.jsonl")
        self._config = TwinConfig(
            scheduler=engine.scheduler,
            max_requests=engine.max_requests,
            acceptance=acceptance(options),
            gpus_per_replica=parse_layout(engine.layout).decode.unit.num_gpus,
            seed=options["seed"],
        )
        for load in loads:
            make_workload(self._spec(load, 1.0))
        self._meter = SpeedMeter()
        self._saturation_per_s: float | None = None  # as predicted, of requests all at once
        self._runs: list[Run] = []
        self.details: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """The whole of it; what ``--json`` prints, but for the time it took."""
        cost = self._cost(probe_now(self._calibration)[0])
        if not any(load.concurrency is not None for load in self._loads):
            saturated, _ = self._simulate(Load(rate_per_s=math.inf), None, cost)
            self._saturation_per_s = saturated.quantities.get("served_requests_per_s")
        rounds = [(number, load) for number in range(self._options["repeat"]) for load in self._loads]
        makers = [lambda number=number, load=load: self._predict(number, load) for number, load in rounds]
        with self._meter:
            record: RecordLike = self._engine.run(makers, self._done)
        self._say("replaying the engine's log in the twin")
        parity = check_parity(record.core_config, record.log, record.requests)
        return self._summary(msgspec.to_builtins(parity))

    # -- one run ---------------------------------------------------------------------------------------------------------------

    def _cost(self, probe: ProbeFactors) -> CalibratedCost:
        options, unit = self._options, parse_layout(self._engine.layout).decode.unit
        return CalibratedCost(
            self._fit, self._engine.spec, unit, probe=probe, engram=options["engram"], draft_tokens=options["draft_tokens"]
        )

    def _speed(self, begin_s: float, end_s: float) -> tuple[ProbeFactors, Speed]:
        """What the meter saw in that time; now, where it saw nothing."""
        seen = self._meter.between(begin_s, end_s)
        if seen is None:
            self._say("the speed meter saw nothing of the last seconds; the machine is probed instead")
        return probe_now(self._calibration) if seen is None else at_probe(self._calibration, seen)

    def _spec(self, load: Load, saturation_per_s: float | None) -> WorkloadSpec:
        values: dict[str, Any] = {option.key: self._options[option.key] for option in WORKLOAD_OPTIONS}
        requests = values["requests"] or (None if values["workload"] else DEFAULT_REQUESTS)
        context = values["max_context"] or self._engine.scheduler.context_tokens
        rate = {"request_rate": load.rate(saturation_per_s), "concurrency": load.concurrency}
        return WorkloadSpec(**{**values, **rate, "requests": requests, "max_context": context})

    def _simulate(self, load: Load, saturation_per_s: float | None, cost: StepCost) -> tuple[Outcome, StepTime]:
        events = _Events()
        result = simulate(self._config, make_workload(self._spec(load, saturation_per_s)), cost, observers=(events,))
        return compare.outcome(events.log), result.step_time

    def _predict(self, number: int, load: Load) -> Workload:
        """Just before the run: predict it at the speed that the machine has now, write that down, and give the workload."""
        now_s = time.perf_counter()
        factors, speed = self._speed(now_s - _RECENT_S, now_s)
        cost, saturation_per_s = self._cost(factors), self._saturation_per_s
        middle, step_time = self._simulate(load, saturation_per_s, cost)
        low, high = (self._simulate(load, saturation_per_s, _End(cost, end))[0] for end in ("low_s", "high_s"))
        quantities = compare.interval(middle, low, high)
        prediction = predict(
            "validate",
            self._question(number, load),
            quantities,
            calibration_sha256=self._calibration.fits_sha256,
            speed=speed,
            extrapolated=step_time.extrapolated_share > 0,
            note="; ".join(step_time.notes),
        )
        self._ledger.append([prediction])
        name = load.name(saturation_per_s)
        self._runs.append(Run(load, name, load.rate(saturation_per_s), number, cost, speed, middle, prediction))
        expected = {key: quantities[key].value for key in ("ttft_p50_s", "tpot_p50_s") if key in quantities}
        text = ", ".join(f"{key.split('_')[0].upper()} {value * 1e3:.1f} ms" for key, value in expected.items())
        self._say(f"{name}{', again' if number else ''}: {text} expected (medians), {middle.duration_s:.0f} s")
        workload = make_workload(self._spec(load, saturation_per_s))
        self._runs[-1].began_s = time.perf_counter()
        return workload

    def _question(self, number: int, load: Load) -> dict[str, Value]:
        spec = msgspec.to_builtins(self._spec(load, self._saturation_per_s))
        asked: dict[str, Value] = {f"workload_{key}": value for key, value in spec.items() if isinstance(value, (str, int, float, bool))}
        if load.is_saturating:
            asked["workload_request_rate"] = "inf"
        return {"model": self._model, "layout": self._engine.layout, "load": load.name(self._saturation_per_s), "round": number, **asked}

    def _done(self, record: RecordLike, run: RunLike) -> None:
        """The run of the last prediction is over."""
        mine, log = self._runs[-1], record.log
        numbers = {request: sent.index for request, sent in run.requests.items()}
        mine.measured = compare.outcome(log.log[run.first_event : run.last_event], numbers)
        quantities = {name: Quantity(value, value, value) for name, value in mine.measured.quantities.items()}
        factors, speed = self._speed(mine.began_s, time.perf_counter())
        self._ledger.append([measured(mine.prediction, quantities, speed)])
        plans = log.plans[run.first_step : run.last_step]
        ends_s = np.array(log.committed_s[run.first_step : run.last_step])
        # A step begins when it was planned, or when the one before it ended.
        planned_s, before_s = np.array(log.planned_s[run.first_step : run.last_step]), np.concatenate([[-math.inf], ends_s[:-1]])
        steps_s, is_first = ends_s - np.maximum(planned_s, before_s), planned_s > before_s
        table, cost = table_of_plans(plans, self._engine.spec), self._cost(factors)
        priced, known = mine.cost.price_table(table), cost.price_table(table)
        mine.steps = compare.step_errors(priced.step_s, priced.low_s, priced.high_s, steps_s)
        expected = self._simulate(mine.load, self._saturation_per_s, cost)[0]
        mine.at_speed = {
            "speed": _factors(speed),
            "quantities": compare.quantity_errors(
                {name: Quantity(value, value, value) for name, value in expected.quantities.items()}, mine.measured.quantities
            ),
            "requests": compare.request_errors(expected.times, mine.measured.times),
            "steps": compare.step_errors(known.step_s, known.low_s, known.high_s, steps_s),
        }
        mine.steps["after_idle"] = compare.errors(priced.step_s[is_first].tolist(), steps_s[is_first].tolist())
        mine.steps["extrapolated"] = float(np.mean(priced.extrapolated))
        self.details.append(
            {
                "name": mine.name,
                "round": mine.number,
                "steps": _thinned(
                    [
                        {"tokens": plan.num_tokens, "measured_s": float(real), "predicted_s": float(expected)}
                        for plan, real, expected in zip(plans, steps_s, priced.step_s, strict=True)
                    ]
                ),
                "requests": _thinned(_pairs(mine.predicted, mine.measured)),
            }
        )

    # -- what came of it -------------------------------------------------------------------------------------------------------

    def _summary(self, parity: dict[str, Any]) -> dict[str, Any]:
        saturation = self._saturation()
        known = saturation["measured_per_s"] or saturation["predicted_per_s"]
        runs = [self._row(run, known) for run in self._runs]
        machine, options = self._calibration.machine, self._options
        return {
            "model": self._model,
            "layout": self._engine.layout,
            "dtype": self._engine.dtype,
            "machine": {name: getattr(machine, name) for name in ("cpu", "num_cores", "system", "python", "torch", "twinfer")},
            "calibration": {"made": self._calibration.made, "sha256": self._calibration.fits_sha256},
            "workload": {option.key: options[option.key] for option in WORKLOAD_OPTIONS if options.origins[option.key] != "default"},
            "engine": {key: value for key, value in options.non_default().items() if key not in {one.key for one in WORKLOAD_OPTIONS}},
            "parity": parity,
            "saturation": saturation,
            "runs": runs,
            "bands": compare.by_band(runs),
        }

    def _saturation(self) -> dict[str, float | None]:
        runs = [run for run in self._runs if run.load.is_saturating]
        rates = [run.measured.quantities.get("served_requests_per_s") for run in runs if run.measured is not None]
        real = [rate for rate in rates if rate is not None]
        predicted = runs[0].predicted.quantities.get("served_requests_per_s") if runs else self._saturation_per_s
        return {
            "predicted_per_s": predicted,
            "measured_per_s": real[0] if real else None,
            "error": predicted / real[0] - 1.0 if real and predicted is not None else None,
            "repeatability": real[1] / real[0] - 1.0 if len(real) > 1 else None,
        }

    def _row(self, run: Run, saturation_per_s: float | None) -> dict[str, Any]:
        assert run.measured is not None
        again = next((one for one in self._runs if one.load is run.load and one.number == 1 and one.measured is not None), None)
        repetition = None
        if run.number == 0 and again is not None and again.measured is not None:
            same = {name: Quantity(value, value, value) for name, value in again.measured.quantities.items()}
            repetition = {
                "requests": compare.request_errors(again.measured.times, run.measured.times),
                "quantities": compare.quantity_errors(same, run.measured.quantities),
            }
        rate = run.measured.quantities.get("served_requests_per_s") if run.load.concurrency is not None else run.rate_per_s
        share = rate / saturation_per_s if rate is not None and saturation_per_s else None
        return {
            "load": run.name,
            "round": run.number,
            "rate_per_s": None if rate is None or math.isinf(rate) else rate,
            "saturation_share": None if share is None or math.isinf(share) else share,
            "band": compare.band(share),
            "prediction": run.prediction.id,
            "predicted_at": run.prediction.time,
            "speed": _factors(run.speed),
            "counts": {name: _counts(one) for name, one in (("predicted", run.predicted), ("measured", run.measured))},
            "quantities": compare.quantity_errors(run.prediction.quantities, run.measured.quantities),
            "requests": compare.request_errors(run.predicted.times, run.measured.times),
            "steps": run.steps,
            "at_speed": run.at_speed,
            "repetition": repetition,
            "note": run.prediction.note,
        }


def _factors(speed: Speed) -> dict[str, float]:
    """How much slower than when it was calibrated."""
    return {name: getattr(speed, f"{name}_factor") for name in ("compute", "memory", "host")}


def _counts(one: Outcome) -> dict[str, float]:
    return {
        "requests": one.num_requests,
        "finished": one.num_finished,
        "rejected": one.num_rejected,
        "preemptions": one.num_preemptions,
        "duration_s": one.duration_s,
    }


def _pairs(predicted: Outcome, measured: Outcome) -> list[dict[str, Any]]:
    found = []
    for number, one in sorted(measured.times.items()):
        expected = predicted.times.get(number)
        if expected is not None:
            row: dict[str, Any] = {"request": number}
            for name in compare.LATENCIES:
                row[f"{name}_measured"], row[f"{name}_predicted"] = getattr(one, name), getattr(expected, name)
            found.append(row)
    return found


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(rows) <= MAX_DRAWN:
        return rows
    return [rows[round(place * (len(rows) - 1) / (MAX_DRAWN - 1))] for place in range(MAX_DRAWN)]


def lines(summary: Mapping[str, Any]) -> list[str]:
    """What a person reads."""
    found = []
    parity = summary["parity"]
    if parity["difference"]:
        found.append(f"PARITY FAILS after {parity['num_equal']:,} of {parity['num_plans']:,} plans: {parity['difference']}")
    else:
        size = f"{parity['num_plan_bytes']:,} bytes of {parity['num_plans']:,} plans, {parity['num_events']:,} events"
        found.append(f"parity: {size}, {parity['num_requests']:,} requests: the twin's are the engine's")
    saturation = summary["saturation"]
    if saturation["measured_per_s"] is not None and saturation["predicted_per_s"] is not None:
        found.append(
            f"saturation: {saturation['predicted_per_s']:.3g} req/s predicted, {saturation['measured_per_s']:.3g} measured "
            f"({saturation['error']:+.1%}; repeated {_signed(saturation['repeatability'])})"
        )
    head = f"{'load':<18}{'of sat.':>8}  {'TTFT p50 ms: predicted, measured':<40}{'TPOT p50 ms':<40}{'steps':>7}{'inside':>8}"
    found.append(head)
    for run in summary["runs"]:
        share = "-" if run["saturation_share"] is None else f"{run['saturation_share']:.0%}"
        cells = "".join(f"{_cell(run['quantities'].get(f'{name}_p50_s')):<40}" for name in ("ttft", "tpot"))
        steps = run["steps"]
        found.append(f"{run['load']:<18}{share:>8}  {cells}{_signed(steps['bias']):>7}{_percent(steps['coverage']):>8}")
    found.append("errors by load, median over runs (at the speed that the machine had in the run) [what two runs of the same differ by]:")
    for band, table in summary["bands"].items():
        parts = []
        for name in compare.LATENCIES:
            one = table[name]
            parts.append(
                f"{name.removesuffix('_s').upper()} {_percent(one['error_of_median'])} ({_percent(one['error_of_median_at_speed'])}) "
                f"[{_percent(one['repeatability_of_median'])}], "
                f"by request {_percent(one['median_request_error'])} [{_percent(one['request_repeatability'])}]"
            )
        tokens = table["output_tokens_per_s"]
        parts.append(f"tokens/s {_percent(tokens['error'])} ({_percent(tokens['error_at_speed'])}) [{_percent(tokens['repeatability'])}]")
        found.append(f"  {band}: {'; '.join(parts)}; {_percent(table['coverage'])} of the statistics inside their interval")
    out = Path(summary["out"])
    found.append(f"predictions and measurements: {out / 'ledger.jsonl'}; report: {out / 'report.html'}; {summary['wall_s']:.0f} s in all")
    return found


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    text = f"{one['predicted'] * 1e3:.1f} ({one['lo'] * 1e3:.1f} to {one['hi'] * 1e3:.1f}), {one['measured'] * 1e3:.1f}"
    return f"{text} {_signed(one['error'])}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
