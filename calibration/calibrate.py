"""A whole calibration of some models on this machine: what is measured, for how long, and the fit of it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from calibration.assemble import EngineRun, HeldOut, Identity, assemble
from calibration.campaign import (
    COLLECTIVE_SIZES,
    CollectivePoint,
    GatherPoint,
    Point,
    PointFile,
    Progress,
    measure_ranks,
    measure_together,
    rank_cores,
)
from calibration.contention import HostMemory, measured_memory, row_bytes
from calibration.cost_model import ModelFit
from calibration.probe import PROBE_S, Probe, mean_probe, ratios, run_probe
from calibration.shapes import Job, cache_for, shapes
from calibration.speed_meter import SpeedMeter
from calibration.steady import REQUESTS_PER_SLOT
from engine.core.errors import ConfigError, InvariantError
from engine.core.features import features
from engine.core.layout import Layout
from engine.core.memory import DTYPE_BYTES
from engine.core.plan import StepPlan
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec, V41Spec

# Shares of the time: ranks, then whole steps; what is left is for starting processes and the fit.
_RANK_SHARE, _STEP_SHARE = 0.5, 0.35
# Measuring time; starting processes and collectives add some twenty seconds.
QUICK_S, FULL_S = 62.0, 540.0
# A run that is predicted takes some seconds; of the moments at which the speed before and after is compared, so many are kept.
_RUN_S, _MAX_CHANGES = 3.0, 500
_GATHERED_ELEMENT_BYTES = 4  # of the tables that the measuring process gathers from


class StepLoadLike(Protocol):
    """One load of whole steps, as the engine measured it."""

    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def new_tokens(self) -> int: ...
    @property
    def method(self) -> str: ...


class StepRunLike(Protocol):
    @property
    def load(self) -> StepLoadLike: ...
    @property
    def plans(self) -> list[StepPlan]: ...
    @property
    def step_s(self) -> list[float]: ...
    @property
    def forward_s(self) -> list[float]: ...


class RunSteps(Protocol):
    """The engine's whole steps, injected by the composition root: calibration drives no actors."""

    def __call__(
        self,
        model: str,
        layout: str,
        loads: Sequence[tuple[int, int, int]],
        *,
        budget_s: float,
        draft_tokens: int,
        load_format: str,
        dtype: str,
        done: Callable[[StepRunLike], None] | None = None,
    ) -> Sequence[StepRunLike]: ...


class OpenedModel(Protocol):
    @property
    def spec(self) -> ModelSpec: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A model to calibrate."""

    name: str
    spec: ModelSpec
    model_hash: str
    dtype: str
    load_format: Literal["auto", "random"]
    draft_tokens: int = 0


class RunSpeed(msgspec.Struct, frozen=True):
    """How fast the machine was in the PROBE_S before a run, which is what a prediction can know, and during it."""

    before: Probe
    during: Probe


@dataclass(frozen=True, slots=True)
class Measurements:
    """Everything a calibration was fitted on, and how fast the machine was meanwhile: points know it themselves. ``run_speeds`` are of each
    of the runs, or none."""

    points: list[Point]
    collectives: list[CollectivePoint]
    runs: list[EngineRun]
    run_speeds: list[RunSpeed] = field(default_factory=list)
    gathers: list[GatherPoint] = field(default_factory=list)
    together_probe: Probe | None = None  # while collectives and gathers were measured
    speed_changes: list[float] = field(default_factory=list)  # between a probe and the run after it, as logarithms


def spec_hash(spec: ModelSpec) -> str:
    """Of everything that shapes and costs follow from."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()


def auto_dtype(spec: ModelSpec) -> str:
    """The engine's own choice on a CPU."""
    return "float32" if isinstance(spec, V41Spec) else "bfloat16"


def candidate_layouts(spec: ModelSpec, num_cores: int) -> tuple[list[Layout], list[Layout]]:
    """(ranks to measure, layouts whose whole steps to measure) on so many cores. Data-parallel layouts are never run: one rank of them is,
    beside busy neighbours."""
    ranks = [Layout()]
    if num_cores >= 2:
        count = 2
        ranks += [Layout(tp=count), Layout(dp=count, ep=count), Layout(dp=count)]
    possible = [layout for layout in ranks if _fits(spec, layout)]
    if len([layout for layout in possible if layout.dp > 1]) > 1:  # experts spread is how such a layout is run
        possible = [layout for layout in possible if layout.dp == 1 or layout.ep > 1]
    return possible, [layout for layout in possible if layout.dp == 1]


def _fits(spec: ModelSpec, layout: Layout) -> bool:
    try:
        RankPlace(layout=layout).validate_for(spec)
    except ConfigError:
        return False
    return True


def whole_loads(max_batch: int, max_context: int) -> list[tuple[int, int, int]]:
    """(batch, context, new tokens) of the whole steps: corners first, prompts among them."""
    long = max(8, max_context // 2)
    loads = [
        (1, 64, 12), (max_batch, 24, 8), (4, 96, 1), (max(1, max_batch // 4), long // 4, 8), (1, long, 1), (3, 32, 16),
        (max(1, max_batch // 2), 48, 12), (max(1, max_batch // 2), 32, 1), (1, long, 8), (6, 128, 6), (1, 24, 1), (12, 64, 20),
    ]  # fmt: skip
    return [(batch, min(context, max_context), new) for batch, context, new in loads]


def affordable(loads: Sequence[tuple[int, int, int]], points: Sequence[Point], limit_s: float) -> list[tuple[int, int, int]]:
    """The loads, made smaller where their prompts alone would take more than ``limit_s``, by what prompts took so far."""
    per_token_s = [point.median_s / point.shape.num_tokens for point in points if point.shape.kind == "prefill"]
    typical_s = sorted(per_token_s)[len(per_token_s) // 2] if per_token_s else 0.0
    found = []
    for batch, context, new in loads:
        while batch * context * REQUESTS_PER_SLOT * typical_s > limit_s and (batch > 2 or context > 16):
            batch, context = (batch, context // 2) if context > 32 or batch == 1 else (batch // 2, context)
        found.append((batch, max(8, context), new))
    return list(dict.fromkeys(found))


def measure(
    target: Target,
    *,
    budget_s: float,
    max_batch: int,
    max_context: int,
    run_steps: RunSteps | None,
    partial: Path | None,
    progress: Progress,
) -> Measurements:
    """Measure one model for about ``budget_s``. Points already in ``partial`` are kept and added to."""
    run_probe()  # says where the machine is busy with something else
    with SpeedMeter() as meter:
        found = _measure(target, meter, budget_s, (max_batch, max_context), run_steps, partial, progress)
        changes = meter.changes(PROBE_S, _RUN_S)
    every = max(1, len(changes) // _MAX_CHANGES)
    return dataclasses.replace(found, speed_changes=changes[::every])


def _measure(
    target: Target,
    meter: SpeedMeter,
    budget_s: float,
    most: tuple[int, int],
    run_steps: RunSteps | None,
    partial: Path | None,
    progress: Progress,
) -> Measurements:
    max_batch, max_context = most
    num_cores = len(os.sched_getaffinity(0))
    ranks, whole = candidate_layouts(target.spec, num_cores)
    kept = PointFile(partial)
    count = max(24, min(96, int(budget_s / 2)))
    wanted = shapes(target.spec, count, max_batch=max_batch, max_context=max_context, max_tokens=2048, draft_tokens=target.draft_tokens)
    cache = cache_for(target.spec, wanted, target.draft_tokens)
    for layout in ranks:
        cores = rank_cores(layout.num_gpus)
        jobs = [
            Job(target.name, target.dtype, str(layout), rank, cores[rank], len(cores[rank]), cache, target.load_format, stand_in=True)
            for rank in range(layout.num_gpus)
        ]
        measure_ranks(jobs, target.name, wanted, budget_s * _RANK_SHARE / len(ranks), kept, meter, progress)
    collectives, gathers = list[CollectivePoint](), list[GatherPoint]()
    began_s = time.perf_counter()
    if num_cores >= 2:
        collectives, gathers = measure_together(target.name, 2, COLLECTIVE_SIZES, max(15, min(100, int(budget_s / 3))))
    together_probe = meter.between(began_s, time.perf_counter())
    runs: list[EngineRun] = []
    run_speeds: list[RunSpeed] = []
    if run_steps is not None:
        share_s = budget_s * _STEP_SHARE / len(whole)
        loads = affordable(whole_loads(max_batch, min(max_context, target.spec.max_positions)), list(kept.points.values()), share_s / 10)
        for layout in whole:
            begin_s, metered = time.monotonic(), MeteredRuns(meter)
            found = run_steps(
                target.name, str(layout), loads, budget_s=share_s, draft_tokens=target.draft_tokens,
                load_format=target.load_format, dtype=target.dtype, done=metered,
            )  # fmt: skip
            runs += [_engine_run(target, layout, num_cores, run) for run in found]
            run_speeds += metered.speeds
            progress(f"{target.name} {layout} whole steps", int(time.monotonic() - begin_s), int(share_s))
    return Measurements(list(kept.points.values()), collectives, runs, run_speeds, gathers, together_probe)


class MeteredRuns:
    """To be called after each load of an engine: the speed before it and during it."""

    def __init__(self, meter: SpeedMeter) -> None:
        self._meter = meter
        self._began_s = time.perf_counter()
        self.speeds: list[RunSpeed] = []

    def __call__(self, _run: StepRunLike) -> None:
        now_s = time.perf_counter()
        self._meter.check()
        before, during = self._meter.between(self._began_s - PROBE_S, self._began_s), self._meter.between(self._began_s, now_s)
        if before is None or during is None:
            raise InvariantError("the speed meter has not seen the run that it is asked about")
        self.speeds.append(RunSpeed(before, during))
        self._began_s = now_s


def speed_of(measured: Sequence[Measurements]) -> Probe | None:
    """The speed that a calibration of all these stands for: the mean of what was seen. None where nobody looked."""
    probes = [speed.during for one in measured for speed in one.run_speeds]
    probes += [point.probe for one in measured for point in one.points if point.probe is not None]
    return mean_probe(probes) if probes else None


def _engine_run(target: Target, layout: Layout, num_cores: int, run: StepRunLike) -> EngineRun:
    return EngineRun(
        model=target.name,
        layout=str(layout),
        cores=max(1, num_cores // layout.num_gpus),
        busy_neighbours=min(layout.num_gpus, num_cores) - 1,
        batch=run.load.batch,
        context=run.load.context,
        new_tokens=run.load.new_tokens,
        method=run.load.method,
        features=tuple(features(plan, target.spec) for plan in run.plans),
        step_s=tuple(run.step_s),
        forward_s=tuple(run.forward_s),
    )


def fit(target: Target, measured: Measurements, then: Probe | None = None) -> tuple[ModelFit, list[HeldOut]]:
    """The costs at the speed ``then`` (default: ``speed_of`` these). Raises DomainError where too little was measured."""
    then = then or speed_of([measured])
    identity = Identity(
        target.name, target.model_hash, target.dtype, DTYPE_BYTES[target.dtype], target.draft_tokens, len(os.sched_getaffinity(0))
    )
    mine = [point.at(then) for point in measured.points if point.model == target.name]
    runs = [run for run in measured.runs if run.model == target.name]
    collectives, gathers = measured.collectives, measured.gathers
    if then is not None:
        runs = [
            msgspec.structs.replace(run, speed=ratios(then, speed.during))
            for run, speed in zip(runs, measured.run_speeds or [RunSpeed(then, then)] * len(runs), strict=True)
        ]
        slower = ratios(then, measured.together_probe or then)
        collectives = [msgspec.structs.replace(one, seconds=one.seconds / slower.host) for one in collectives]
        gathers = [msgspec.structs.replace(one, seconds=one.seconds / slower.memory) for one in gathers]
    found, held_out = assemble(identity, target.spec, mine, collectives, runs, measured.speed_changes)
    return msgspec.structs.replace(found, host_memory=_host_memory(target.spec, gathers)), held_out


def _host_memory(spec: ModelSpec, gathers: Sequence[GatherPoint]) -> HostMemory | None:
    """None for a model without tables in it, or where nothing was gathered."""
    if not isinstance(spec, V41Spec) or not gathers:
        return None
    each_bytes = row_bytes(spec, _GATHERED_ELEMENT_BYTES)
    return measured_memory({point.num_ranks: point.num_tokens * each_bytes / point.seconds for point in gathers})


def silent(_phase: str, _done: int, _total: int) -> None:
    """No progress shown."""
