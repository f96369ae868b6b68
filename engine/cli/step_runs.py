"""Whole steps of the engine for who calibrates on them: several loads, one after the other, in one engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from engine.cli.step_bench import StepLoad, StepRecorder, record_in, with_room
from engine.config import ENGINE_OPTIONS
from engine.core.plan import StepPlan
from engine.options import resolve

if TYPE_CHECKING:
    from engine.launch import Launch


@dataclass(frozen=True, slots=True)
class StepRun:
    """The steps that count of one load: plans, seconds from commit to commit, and the slowest rank's forward."""

    load: StepLoad
    plans: list[StepPlan]
    step_s: list[float]
    forward_s: list[float]


def run_steps(
    model: str,
    layout: str,
    loads: Sequence[StepLoad],
    *,
    budget_s: float,
    draft_tokens: int = 0,
    load_format: str = "auto",
    dtype: str = "auto",
    done: Callable[[StepRun], None] | None = None,
) -> list[StepRun]:
    """Measure ``loads`` in order until ``budget_s`` is spent; at least one. Raises what opening an engine raises."""
    from engine.launch import open_model, plan_launch

    values = {"layout": layout, "draft_tokens": draft_tokens, "load_format": load_format, "dtype": dtype, "device": "cpu"}
    options = resolve(ENGINE_OPTIONS, values, os.environ, None)
    largest = StepLoad(max(load.batch for load in loads), max(load.context for load in loads), max(load.new_tokens for load in loads))
    opened = open_model(model)
    launch = plan_launch(with_room(options, largest), opened.spec, model)
    return trio.run(_run, launch, loads, time.monotonic() + budget_s, done)


async def _run(launch: Launch, loads: Sequence[StepLoad], end_s: float, done: Callable[[StepRun], None] | None) -> list[StepRun]:
    from engine.actors.supervisor import open_engine

    recorder, runs = StepRecorder(), list[StepRun]()
    async with open_engine(launch.config, None, observers=(recorder,)) as engine:
        for load in loads:
            if runs and time.monotonic() > end_s:
                break
            recording = await record_in(engine, recorder, launch.config.scheduler.num_ranks, load)
            chosen = recording.chosen
            run = StepRun(
                load,
                [recorder.plans[index] for index in chosen],
                [recording.step_s(index) for index in chosen],
                [recorder.results[index].forward_s for index in chosen],
            )
            runs.append(run)
            if done is not None:
                done(run)
    return runs
