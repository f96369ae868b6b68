"""Whole steps of the engine for who calibrates on them: several loads, one after the other, in one engine."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from engine.cli import bench
from engine.config import ENGINE_OPTIONS
from engine.core.plan import StepPlan
from engine.options import resolve

if TYPE_CHECKING:
    from engine.launch import Launch


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A closed loop as ``bench steps`` drives it: ``batch`` requests per DP rank."""

    batch: int
    context: int
    new_tokens: int
    method: str = "window"


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
    batch = max(load.batch for load in loads)
    tokens = max(load.context + load.new_tokens for load in loads)
    opened = open_model(model)
    launch = plan_launch(bench.with_room(options, batch, tokens), opened.spec, model)
    return trio.run(_run, launch, loads, time.monotonic() + budget_s, done)


async def _run(launch: Launch, loads: Sequence[StepLoad], end_s: float, done: Callable[[StepRun], None] | None) -> list[StepRun]:
    from engine.actors.supervisor import open_engine

    recorder, runs = bench.StepRecorder(), list[StepRun]()
    async with open_engine(launch.config, None, observers=(recorder,)) as engine:
        for load in loads:
            if runs and time.monotonic() > end_s:
                break
            arguments = argparse.Namespace(context=load.context, new_tokens=load.new_tokens, method=load.method)
            recording = await bench.record_in(engine, recorder, launch, load.batch, arguments)
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
