"""The recorder: what a worker's steps do, kept for calibration. A folder of one recording holds, for each rank N:

    environment.rankN.json   device, versions, layout, model and its hash, mode: as the caller gives them, and what this process knows
    steps.rankN.jsonl        one line a step: the number, the plan, seconds from before to after it, and in mode ``timers`` the components
    trace.rankN.json.gz      mode ``profile``: torch.profiler's Chrome trace, with a range a component and a range a step

Mode ``timers`` reads component timers alone (CUDA events on a GPU, clocks on a CPU) and is cheap enough for service; ``profile`` slows the
steps. Both end by themselves after ``max_steps``. A worker holds one Recorder and uses it so:

    recorder = Recorder(folder, mode="profile", rank=0, device=device, environment={...})
    runner.time_components(recorder.timer)
    recorder.start()
    with recorder.step(number, plan): runner.execute(number, plan, peers)      # for every step; does nothing once it is through
    recorder.stop()                                                            # at the end, also early: writes the trace

A disk that takes no more ends the recording and not the step; ``stop`` then says so.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from calibration.errors import TraceError
from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, OutputError
from engine.core.plan import RankPlan, StepPlan, StepResult
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.specs import V41Spec
from engine.kernels.timing import ComponentTimer
from engine.model.build import DTYPES
from engine.model.files import fingerprint, read_model_files
from engine.model.load import load_model
from engine.model.runner import Runner
from engine.version import VERSION

Mode = Literal["profile", "timers"]
MAX_STEPS = 10_000
DEFAULT_STEPS = {"profile": 32, "timers": 2000}
SCHEMA_VERSION = 1
_BLOCK_SIZE = 128


class RangeTimer(ComponentTimer):
    """Opens a profiler range where a component timer would read a clock; inert while ``active`` is false."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.active = False
        self._ranges: list[record_function | None] = []

    def enter(self, name: str) -> None:
        self._ranges.append(record_function(name) if self.active else None)
        if (opened := self._ranges[-1]) is not None:
            opened.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        if (opened := self._ranges.pop()) is not None:
            opened.__exit__(None, None, None)

    def take(self) -> tuple[tuple[str, float], ...]:
        """Nothing: the seconds are in the trace."""
        return ()


class Recorder:
    """See the module's text. Not thread-safe; steps do not nest."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: Mode = "profile",
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | None = None,
        max_steps: int | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError for a mode or number out of range."""
        if mode not in DEFAULT_STEPS:
            raise ConfigError(f"recording mode is {mode!r}; allowed: {', '.join(DEFAULT_STEPS)}")
        self.max_steps = DEFAULT_STEPS[mode] if max_steps is None else max_steps
        if not 1 <= self.max_steps <= MAX_STEPS:
            raise ConfigError(f"a recording of {max_steps} steps; allowed: 1 to {MAX_STEPS}")
        self.folder, self.mode, self.rank = folder, mode, rank
        self.trace_path = folder / f"trace.rank{rank}.json.gz"
        self.steps_path = folder / f"steps.rank{rank}.jsonl"
        self.num_steps = 0
        self.components: tuple[tuple[str, float], ...] = ()  # of the last step, in mode ``timers``
        self._device = device or torch.device("cpu")
        self.timer: ComponentTimer = RangeTimer(self._device) if mode == "profile" else ComponentTimer(self._device)
        self._num_ranks = num_ranks
        self._environment = dict(environment or {})
        self._profiler: profile | None = None
        self._steps: IO[bytes] | None = None
        self._end_of_steps = 0  # bytes of whole lines
        self._failure: OutputError | None = None

    @property
    def is_recording(self) -> bool:
        return self._steps is not None

    def start(self) -> None:
        """Write the environment and begin. Raises TraceError where the folder cannot take the recording."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._steps = self.steps_path.open("xb", buffering=0)  # a step is in the file once it is over, whatever happens next
            (self.folder / f"environment.rank{self.rank}.json").write_text(json.dumps(self._describe(), indent=1) + "\n")
        except FileExistsError as error:
            raise TraceError(f"{self.folder} already holds a recording of rank {self.rank}; choose a new folder") from error
        except OSError as error:
            self._close_steps()
            raise TraceError(f"{self.folder} cannot be written: {error.strerror}") from error
        if isinstance(self.timer, RangeTimer):
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # else the profiler says it itself
                self._profiler.add_metadata_json("distributedInfo", json.dumps({"rank": self.rank, "world_size": self._num_ranks}))
            self.timer.active = True

    @contextmanager
    def step(self, number: int, plan: RankPlan) -> Iterator[None]:
        """Record what runs inside. After ``max_steps`` the recording is closed and this does nothing."""
        if self._steps is None:
            yield
            return
        self.timer.take()  # what was charged between the steps belongs to none
        begin_s = time.perf_counter()
        if self._profiler is None:
            yield
            self.components = self.timer.take()
        else:
            with record_function(f"twinfer.step#{number}"):
                yield
        seconds = time.perf_counter() - begin_s
        line = {"step": number, "rank": self.rank, "seconds": seconds, "components": dict(self.components), "plan": plan}
        self._write(self._steps, msgspec.json.encode(line) + b"\n")
        if self.num_steps == self.max_steps or self._failure is not None:
            self._close_steps()

    def _write(self, steps: IO[bytes], line: bytes) -> None:
        """All of the line, or nothing and a failure."""
        try:
            written = steps.write(line)
            if written == len(line):
                self.num_steps += 1
                self._end_of_steps += written
                return
            steps.truncate(self._end_of_steps)
            reason = "the disk is full"
        except OSError as error:
            reason = error.strerror or str(error)
        self._failure = OutputError(f"{self.steps_path} cannot be written: {reason}")

    def _close_steps(self) -> None:
        """The end of what is recorded; the trace is not written yet."""
        if self._steps is None:
            return
        self._steps.close()
        self._steps = None
        if self._profiler is not None and isinstance(self.timer, RangeTimer):
            self.timer.active = False
            self._profiler.stop()

    def stop(self) -> None:
        """Close the recording and write the trace; a second call does nothing. Raises OutputError where the disk has not taken all."""
        self._close_steps()
        failure, self._failure = self._failure, None
        if self._profiler is not None:
            self._export(self._profiler)
        if failure is not None:
            raise failure

    def _export(self, profiler: profile) -> None:
        self._profiler = None
        partial = self.folder / f".trace.rank{self.rank}.json.gz"  # the profiler compresses by the name's end
        try:
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, self.trace_path)
        except (OSError, RuntimeError) as error:
            raise OutputError(f"{self.trace_path} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def _describe(self) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": self.mode,
            "rank": self.rank,
            "num_ranks": self._num_ranks,
            "max_steps": self.max_steps,
            "device": torch.cuda.get_device_name(self._device) if on_gpu else platform.processor() or platform.machine(),
            "num_threads": torch.get_num_threads(),
            "cpu_cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "versions": {"twinfer": VERSION, "torch": torch.__version__, "python": platform.python_version()},
            "unix_s": time.time(),
            **self._environment,
        }


def record_model(
    model: str,
    recorder_folder: Path,
    *,
    mode: Mode,
    batch: int,
    context: int,
    new_tokens: int,
    dtype: str | None,
    device: str,
    max_steps: int | None,
) -> Recorder:
    """Load a model on one rank and record ``batch`` requests of ``context`` random tokens, each going on for ``new_tokens`` steps.

    Scheduler and runner are joined in a plain loop: the device's work is the engine's, the time between steps is not. One step of each
    kind runs before the recording, so that nothing is measured at its first use. Raises ConfigError for the model, TraceError for the
    folder.
    """
    files = read_model_files(model)
    if dtype is None:
        dtype = "float32" if device == "cpu" and isinstance(files.spec, V41Spec) else "bfloat16"
    loaded = load_model(files, dtype=DTYPES[dtype], device=device)
    spec, vocab_size = loaded.spec, loaded.spec.vocab_size
    blocks_each = -(-(context + new_tokens + 1) // _BLOCK_SIZE)
    cache = CacheConfig(
        num_blocks=(batch + 1) * (blocks_each + 1),
        block_size=_BLOCK_SIZE,
        max_running=batch,
        max_batched_tokens=max(2048, batch),
        context_length=blocks_each * _BLOCK_SIZE,
        num_tails=4 * batch if spec.has_sequence_state else 0,
    )
    runner = Runner(loaded.model, cache)
    environment = {
        "model": spec.name,
        "model_fingerprint": fingerprint(loaded.files.path),
        "layout": "tp1dp1ep1",
        "dtype": dtype,
        "batch": batch,
        "context": context,
    }
    recorder = Recorder(recorder_folder, mode=mode, device=runner.device, max_steps=max_steps, environment=environment)
    scheduler = Scheduler(SchedulerConfig(cache=cache, has_sequence_state=spec.has_sequence_state, prefix_caching=False))
    generator = torch.Generator().manual_seed(0)

    def submit(first: int, count: int, tokens: int) -> None:
        for request in range(first, first + count):
            prompt = tuple(torch.randint(vocab_size, (context,), generator=generator).tolist())
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            runner.register(request, prompt, params, seed=0)
            scheduler.submit(Request(id=request, prompt=prompt, params=params), 0.0)

    submit(0, 1, 2)
    _drive(scheduler, runner, None)
    submit(1, batch, new_tokens)
    recorder.start()
    runner.time_components(recorder.timer)
    try:
        _drive(scheduler, runner, recorder)
    finally:
        recorder.stop()
    return recorder


def _drive(scheduler: Scheduler, runner: Runner, recorder: Recorder | None) -> None:
    """Plan, execute, commit until nothing is left, or the recording is through."""
    while (recorder is None or recorder.is_recording) and (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(plan, _execute(runner, plan, recorder), 0.0)


def _execute(runner: Runner, plan: StepPlan, recorder: Recorder | None) -> StepResult:
    if recorder is None:
        return StepResult(plan.step, (runner.execute(plan.step, plan.ranks[0]),))
    with recorder.step(plan.step, plan.ranks[0]):
        result = runner.execute(plan.step, plan.ranks[0])
    return StepResult(plan.step, (result,), components=recorder.components)
