"""The worker process: receives commands, drives one runner, sends results. ``python -m engine.actors.worker_main``.

It lives exactly as long as its parent wants: it ignores SIGINT and SIGTERM (the parent decides when to stop), and it dies with
the parent even where the parent was killed without a word.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, assert_never

from engine.actors.config import WorkerConfig
from engine.actors.ipc import ChannelClosedError, SyncChannel
from engine.actors.messages import (
    Execute,
    Executed,
    Failed,
    Forget,
    HeartbeatCommand,
    HeartbeatReply,
    Loading,
    Pong,
    Prepare,
    Ready,
    Rebalance,
    Record,
    Register,
    Shutdown,
    Start,
    WorkerCommand,
    WorkerReply,
)
from engine.core.errors import CollectiveError, ConfigError, OutputError
from engine.core.expert_map import ExpertMap
from engine.core.plan import RankPlan, RankResult, RequestId, StepPeers
from engine.core.rank_counters import RankCounters
from engine.core.sampling import SamplingParams

if TYPE_CHECKING:
    from calibration.recorder import Recorder

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_ORPHANED = 3
# A traceback is for a person; a recursion error's would fill the log.
MAX_TRACEBACK_CHARS = 16_384
_PR_SET_PDEATHSIG = 1


class Runner(Protocol):
    """What the worker asks of the thing that executes plans: ``engine.model.build.build_runner`` makes the real one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    def register(self, request: RequestId, tokens: Sequence[int], params: SamplingParams, seed: int) -> None: ...

    def forget(self, request: RequestId) -> None: ...

    def prepare(self, grammar: str) -> None:
        """Begin to compile a grammar beside the steps; returns at once."""
        ...

    def execute(self, step: int, plan: RankPlan, peers: StepPeers | None) -> RankResult: ...

    def take_components(self) -> tuple[tuple[str, float], ...]:
        """Where the time of the last step went, by component; empty where it is not timed."""
        ...

    def time_components(self, timer: Any) -> Any:
        """Charge the steps' components to ``timer`` (engine.kernels.timing) from now on; the one before is returned."""
        ...

    def take_counters(self) -> RankCounters:
        """What was counted since the last call."""
        ...

    def rebalance(self, maps: Sequence[ExpertMap]) -> None:
        """Take up other expert placements; a collective of all ranks."""
        ...

    def close(self) -> None: ...


class Recording:
    """A worker's recording, where it has one. What goes wrong with it ends it with a warning, and nothing else."""

    def __init__(self, config: WorkerConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._recorder: Recorder | None = None
        self._begun = False
        self._timer_before: Any = None
        self._timer: Any = None  # of single steps
        self._components: tuple[tuple[str, float], ...] = ()

    def begin(self) -> None:
        """Record from the next step on; the second call does nothing."""
        record = self._config.record
        if record is None or self._begun:
            return
        self._begun = True
        import torch

        from calibration.errors import TraceError
        from calibration.recorder import Recorder

        recorder = Recorder(
            Path(record.folder),
            mode=record.mode,
            rank=self._config.rank,
            num_ranks=self._config.num_ranks,
            device=torch.device(self._config.device),
            max_steps=record.max_steps,
            environment=record.environment,
        )
        try:
            recorder.start()
        except TraceError as error:
            self._warn(f"nothing is recorded: {error}")
            return
        self._recorder = recorder
        self._timer_before = self._runner.time_components(recorder.timer)

    @contextlib.contextmanager
    def step(self, step: int, plan: RankPlan, time_components: bool) -> Iterator[None]:
        """Around one step; ``time_components`` times its parts where nothing else does."""
        if self._recorder is not None:
            with self._recorder.step(step, plan):
                yield
        elif time_components and not self._config.time_components:
            before = self._runner.time_components(self._step_timer())
            try:
                yield
            finally:
                self._components = self._runner.take_components()
                self._runner.time_components(before)
        else:
            yield

    def take_components(self) -> tuple[tuple[str, float], ...]:
        if self._recorder is not None:
            return self._recorder.components
        taken, self._components = self._components, ()
        return taken or self._runner.take_components()

    def _step_timer(self) -> Any:
        if self._timer is None:
            import torch

            from engine.kernels.timing import ComponentTimer

            self._timer = ComponentTimer(torch.device(self._config.device))
        return self._timer

    def end_if_over(self) -> None:
        """To be called once a step's result is on its way: writing a profile takes its time."""
        if self._recorder is not None and not self._recorder.is_recording:
            self.end()

    def end(self) -> None:
        """Close what is open, and write the profile."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        self._runner.time_components(self._timer_before)
        try:
            recorder.stop()
        except OutputError as error:
            self._warn(f"the recording ended after {recorder.num_steps} steps: {error}")

    def _warn(self, text: str) -> None:
        sys.stderr.write(f"WARNING twinfer.{self._config.name}: {text}\n")


LoadReport = Callable[[int, int], None]  # parameters read, parameters there are
RunnerFactory = Callable[[WorkerConfig, LoadReport], Runner]
_Channel = SyncChannel[WorkerReply, WorkerCommand]


def serve(channel: _Channel, build: RunnerFactory) -> int:
    """The command loop; returns the exit code. Every exception of the runner is reported before the process ends."""
    during = "start"
    try:
        first = channel.receive()
        if not isinstance(first, Start):
            raise TypeError(f"the first command is {type(first).__name__}, not Start")
        if first.config.cpu_cores:
            os.sched_setaffinity(0, first.config.cpu_cores)  # before numeric libraries count the cores and start threads
        if first.config.interface:
            for library in ("GLOO", "NCCL"):  # what the operator has set is better known
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", first.config.interface)
        begin_s = time.perf_counter()
        runner = build(first.config, lambda done_parameters, total_parameters: channel.send(Loading(done_parameters, total_parameters)))
        recording = Recording(first.config, runner)
        ready = Ready(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            weight_bytes=runner.weight_bytes,
            cache_bytes=runner.cache_bytes,
            load_s=time.perf_counter() - begin_s,
        )
        # What was loaded stays: scanning it again in every collection would put pauses between steps.
        gc.collect()
        gc.freeze()
        channel.send(ready)
        while True:
            command = channel.receive()
            match command:
                case Execute(step=step, plan=plan, peers=peers, report_counters=report_counters, time_components=time_components):
                    during = f"step {step}"
                    with recording.step(step, plan, time_components):
                        begin_s = time.perf_counter()
                        result = runner.execute(step, plan, peers)
                        forward_s = time.perf_counter() - begin_s
                    counters = runner.take_counters() if report_counters else None
                    channel.send(Executed(step, result, forward_s, recording.take_components(), counters))
                    recording.end_if_over()
                case Rebalance(maps=maps):
                    during = "rebalance"
                    runner.rebalance(maps)
                case Register(request=request, tokens=tokens, params=params, seed=seed):
                    during = f"register {request}"
                    runner.register(request, tokens, params, seed)
                case Forget(request=request):
                    during = f"forget {request}"
                    runner.forget(request)
                case Prepare(grammar=grammar):
                    during = "prepare"
                    runner.prepare(grammar)
                case Record():
                    recording.begin()
                case Shutdown():
                    during = "shutdown"
                    recording.end()
                    runner.close()
                    return EXIT_OK
                case Start():
                    raise TypeError("Start arrived twice")
                case _:
                    assert_never(command)
    except ChannelClosedError:
        return EXIT_ORPHANED
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
        fault = _fault_of(error)
        if fault == "internal":  # mistakes of the operator or of a peer are one line at the parent, and where they were found is no help
            sys.stderr.write(text)
        message = f"{type(error).__name__}: {error}" if fault == "internal" else str(error)
        with contextlib.suppress(ChannelClosedError):
            channel.send(Failed(fault=fault, during=during, message=message, traceback=text))
        return EXIT_FAULT


def _fault_of(error: Exception) -> Literal["config", "internal", "peer"]:
    match error:
        case ConfigError():
            return "config"
        case CollectiveError():
            return "peer"
        case _:
            return "internal"


def _serve_heartbeat(channel: SyncChannel[HeartbeatReply, HeartbeatCommand]) -> None:
    """Answer pings until the parent is gone; then end the process, even out of the middle of a forward."""
    try:
        while True:
            channel.send(Pong(channel.receive().number))
    finally:
        os._exit(EXIT_ORPHANED)


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends: that reaches even a stopped process, which reads no end of stream."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request was in place
        os._exit(EXIT_ORPHANED)


def run_worker(build: RunnerFactory, argv: Sequence[str] | None = None) -> None:
    """The whole life of a worker process. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    parser = argparse.ArgumentParser(description="twinfer worker process; started by the engine, not by hand")
    parser.add_argument("--plan-fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args(argv)
    _die_with_parent(arguments.parent_pid)
    heartbeat: SyncChannel[HeartbeatReply, HeartbeatCommand] = SyncChannel(socket.socket(fileno=arguments.heartbeat_fd), HeartbeatCommand)
    threading.Thread(target=_serve_heartbeat, args=(heartbeat,), name="heartbeat", daemon=True).start()
    exit_code = serve(SyncChannel(socket.socket(fileno=arguments.plan_fd), WorkerCommand), build)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a numeric library may hold up the interpreter's own end, and there is nothing left to save.
    os._exit(exit_code)


def _build_runner(config: WorkerConfig, report: LoadReport) -> Runner:
    # Imported here: it takes seconds, and the heartbeat thread is to answer meanwhile.
    from engine.model.build import build_runner

    return build_runner(config, report)


if __name__ == "__main__":
    run_worker(_build_runner)
