"""The parent's side of worker processes: spawn, talk, watch, stop. Every failure becomes a WorkerError with the worker's name.

Two sockets lead to a worker. The plan channel carries commands and results, in order. The heartbeat channel is served by a
thread of its own over there, so that a long forward does not look dead while a stopped or dead process does not look busy.
"""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from typing import NoReturn, assert_never

import trio

from engine.actors.channel import TrioChannel
from engine.actors.config import SupervisionConfig, WorkerConfig
from engine.actors.ipc import ChannelClosedError, FrameError
from engine.actors.messages import (
    Executed,
    Failed,
    HeartbeatCommand,
    HeartbeatReply,
    Loading,
    Ping,
    Ready,
    Shutdown,
    Start,
    WorkerCommand,
    WorkerReply,
)
from engine.actors.process import describe_exit, is_stopped, open_pidfd, spawn_module, wait_exit
from engine.core.errors import ConfigError, TwinferError, WorkerError

WORKER_MODULE = "engine.actors.worker_main"
# Called with a worker's name, the parameters it has read, and those there are.
LoadProgress = Callable[[str, int, int], None]
# After its channel ended a process is at its own exit; after SIGKILL only the kernel is. Both take milliseconds.
_REAP_TIMEOUT_S = 5.0
# A profile is put together and written at its end: seconds in which the worker's interpreter answers nobody.
_RECORD_TIMEOUT_S = 60.0
_LATE_RESULT_S = 0.1


class RankWorker(abc.ABC):
    """The worker of one rank, in this node or another one (``leader.RemoteWorker``): what a WorkerGroup drives."""

    def __init__(self, config: WorkerConfig, supervision: SupervisionConfig) -> None:
        self.name = config.name
        self.config = config
        self.let_down = False  # it failed because another rank did not come
        self._supervision = supervision
        self._failure: TwinferError | None = None
        self._heard_s = trio.current_time()  # the last sign of life

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the worker, or the node it is in, last gave a sign of life."""
        return trio.current_time() - self._heard_s

    async def start(self, loading: LoadProgress | None = None) -> Ready:
        """Have the model loaded. Raises ConfigError where the configuration is at fault, WorkerError otherwise."""
        timeout_s = self._supervision.start_timeout_s
        with trio.move_on_after(timeout_s):
            await self.send(Start(self.config))
            while isinstance(reply := await self.receive(), Loading):
                if loading is not None:
                    loading(self.name, reply.done_parameters, reply.total_parameters)
            if not isinstance(reply, Ready):
                raise self._give_up(f"answered Start with {type(reply).__name__}")
            self._heard_s = trio.current_time()
            return reply
        raise self._give_up(f"was not ready within start_timeout_s = {timeout_s:g}")

    async def receive_executed(self, step: int) -> Executed:
        """The result of ``step``, the oldest one under way."""
        timeout_s = self._supervision.step_timeout_s
        # Looked at once more after the deadline: where this process stood still itself, the result has come meanwhile.
        for wait_s in (timeout_s, _LATE_RESULT_S):
            with trio.move_on_after(wait_s):
                reply = await self.receive()
                if not isinstance(reply, Executed) or reply.step != step:
                    raise self._give_up(f"answered step {step} with {reply!r:.100}")
                return reply
        raise self._give_up(f"did not finish step {step} within step_timeout_s = {timeout_s:g}")

    async def wait_failed(self) -> TwinferError:
        """Read until the worker says why it fails, or its process ends. For a worker that nobody else reads from any more."""
        try:
            while True:
                await self.receive()
        except TwinferError as error:
            return error

    @abc.abstractmethod
    def queue(self, command: WorkerCommand) -> None:
        """Let a command leave together with the next one sent."""

    @abc.abstractmethod
    async def flush(self) -> None:
        """Send what is queued. Raises WorkerError, or what the worker said it failed with."""

    async def send(self, command: WorkerCommand) -> None:
        self.queue(command)
        await self.flush()

    @abc.abstractmethod
    async def receive(self) -> WorkerReply:
        """The next reply; a Failed is raised as the error it stands for."""

    @abc.abstractmethod
    async def run_heartbeat(self) -> NoReturn:
        """Watch the worker; ends only by raising what is wrong with it."""

    @abc.abstractmethod
    async def stop(self, *, graceful: bool) -> None:
        """Runs to its end under cancellation; never raises for a dead worker."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it now."""

    @abc.abstractmethod
    def hanging(self, consequence: TwinferError) -> WorkerError:
        """The error of a worker that neither failed nor went on, and so made another one fail."""

    @abc.abstractmethod
    def killed_by_others(self) -> WorkerError | None:
        """The error of a worker that a signal from outside has ended; None for any other."""

    @abc.abstractmethod
    def _give_up(self, reason: str) -> TwinferError:
        """Decide that the worker is of no use and end it; the first reason stays."""

    def _note_failed(self, reply: Failed) -> TwinferError:
        if self._failure is None:
            match reply.fault:
                case "config":
                    self._failure = ConfigError(reply.message)
                case "internal" | "peer":
                    self.let_down = reply.fault == "peer"
                    self._failure = WorkerError(self.name, f"failed during {reply.during}: {reply.message}")
                case _:
                    assert_never(reply.fault)
        return self._failure


class Worker(RankWorker):
    """One worker process. The scheduler's task uses the plan channel, the heartbeat task the other; nobody else touches either."""

    def __init__(self, config: WorkerConfig, supervision: SupervisionConfig, module: str = WORKER_MODULE) -> None:
        """Spawn at once: there is no worker object without a process."""
        super().__init__(config, supervision)
        self._missed_beats = 0
        self._exit_lock = trio.Lock()
        plan_ours, plan_theirs = socket.socketpair()
        heartbeat_ours, heartbeat_theirs = socket.socketpair()
        with plan_theirs, heartbeat_theirs:
            try:
                self._process = _spawn(module, plan_theirs.fileno(), heartbeat_theirs.fileno())
            except OSError as error:
                plan_ours.close()
                heartbeat_ours.close()
                raise WorkerError(self.name, f"could not be started: {error}") from error
        self._plans: TrioChannel[WorkerCommand, WorkerReply] = TrioChannel(plan_ours, WorkerReply)
        self._heartbeat: TrioChannel[HeartbeatCommand, HeartbeatReply] = TrioChannel(heartbeat_ours, HeartbeatReply)
        self._pidfd = open_pidfd(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def queue(self, command: WorkerCommand) -> None:
        try:
            self._plans.queue(command)
        except FrameError as error:
            raise self._give_up(str(error)) from error

    async def flush(self) -> None:
        try:
            await self._plans.flush()
        except (ChannelClosedError, trio.ClosedResourceError):
            raise await self._died() from None

    def post(self, command: WorkerCommand) -> None:
        """Send without waiting, for who receives in another task; a closed channel is noticed there."""
        with contextlib.suppress(ChannelClosedError):
            self._plans.post(command)

    async def run_writer(self) -> None:
        await self._plans.run_writer()

    async def run_heartbeat(self) -> NoReturn:
        """Watch the process; ends only by raising what is wrong with it.

        Missed beats are counted, not the clock read: when the whole process group was suspended and resumed, one beat is
        missed however long that took.
        """
        interval_s = self._supervision.heartbeat_interval_s
        timeout_s = self._supervision.heartbeat_timeout_s
        record = self.config.record
        patience_s = timeout_s if record is None or record.mode != "profile" else max(timeout_s, _RECORD_TIMEOUT_S)
        number = 0
        while True:
            number += 1
            begin_s = trio.current_time()
            answered = False
            try:
                with trio.move_on_after(interval_s):
                    await self._heartbeat.send(Ping(number))
                    answered = await self._await_pong(number)
            except (ChannelClosedError, trio.ClosedResourceError):
                raise await self._died() from None
            except FrameError as error:
                raise self._give_up(f"sent garbage as a heartbeat: {error}") from error
            if answered:
                await trio.sleep_until(begin_s + interval_s)
                continue
            self._missed_beats += 1
            if self._missed_beats >= 2 and is_stopped(self.pid):
                raise self._give_up(f"is stopped: {self._missed_beats} heartbeats of {interval_s:g} s missed")
            if self._missed_beats * interval_s >= patience_s:
                limit = "heartbeat_timeout_s =" if patience_s == timeout_s else "the time that writing a profile may take,"
                raise self._give_up(f"gave no heartbeat for {limit} {patience_s:g}")

    async def stop(self, *, graceful: bool) -> None:
        """Shutdown -> bounded wait -> SIGKILL -> reap. Runs to its end under cancellation; never raises for a dead worker."""
        with trio.CancelScope(shield=True):
            if graceful and self._failure is None:
                timeout_s = self._supervision.worker_exit_timeout_s + (_RECORD_TIMEOUT_S if self.config.record is not None else 0.0)
                with (
                    trio.move_on_after(timeout_s),
                    contextlib.suppress(ChannelClosedError, trio.ClosedResourceError),
                ):
                    await self._plans.send(Shutdown())
                    await self._wait_exit()
            self.kill()
            with trio.move_on_after(_REAP_TIMEOUT_S):
                await self._wait_exit()
            self._plans.close()
            self._heartbeat.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def kill(self) -> None:
        """SIGKILL, which ends a stopped process too. The channels' ends then wake whoever waits."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def hanging(self, consequence: TwinferError) -> WorkerError:
        return WorkerError(self.name, f"{'is stopped' if is_stopped(self.pid) else 'hangs or is too slow'}; hence {consequence}")

    def killed_by_others(self) -> WorkerError | None:
        code = self._process.poll()
        if self._failure is not None or code is None or code >= 0:
            return None
        return WorkerError(self.name, describe_exit(code))

    async def _await_pong(self, number: int) -> bool:
        # Late answers to earlier pings come first. They too say that the worker lives.
        while True:
            pong = await self._heartbeat.receive()
            self._missed_beats = 0
            self._heard_s = trio.current_time()
            if pong.number == number:
                return True

    async def receive(self) -> WorkerReply:
        try:
            reply = await self._plans.receive()
        except (ChannelClosedError, trio.ClosedResourceError):
            raise await self._died() from None
        except FrameError as error:
            raise self._give_up(f"sent garbage: {error}") from error
        if isinstance(reply, Failed):
            raise self._note_failed(reply)
        return reply

    def _give_up(self, reason: str) -> TwinferError:
        """Decide that the worker is of no use and kill it; the first reason stays."""
        self.kill()
        if self._failure is None:
            self._failure = WorkerError(self.name, f"{reason}; killed")
        return self._failure

    async def _died(self) -> TwinferError:
        """Find out why a channel ended: what the worker said last, or how its process exited."""
        if self._failure is None:
            with contextlib.suppress(ChannelClosedError, FrameError):
                while (reply := self._plans.receive_nowait()) is not None:
                    if isinstance(reply, Failed):
                        return self._note_failed(reply)
        with trio.move_on_after(_REAP_TIMEOUT_S):
            code = await self._wait_exit()
            if self._failure is None:
                self._failure = WorkerError(self.name, describe_exit(code))
        return self._failure or self._give_up("closed its channel without exiting")

    async def _wait_exit(self) -> int:
        # The lock: several tasks may find the worker dead at once, and a descriptor has one waiter.
        async with self._exit_lock:
            return await wait_exit(self._process, self._pidfd)


def _spawn(module: str, plan_fd: int, heartbeat_fd: int) -> subprocess.Popen[bytes]:
    return spawn_module(module, {"plan-fd": plan_fd, "heartbeat-fd": heartbeat_fd})
