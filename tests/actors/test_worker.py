"""One worker process and its parent's side: start, work, every way to die, time-outs on a mock clock."""

# ruff: noqa: ARG001  (a clock fixture works by being asked for)

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from typing import Any, Literal

import msgspec
import pytest
import trio
from trio.testing import MockClock

from engine.actors.channel import TrioChannel
from engine.actors.config import RecordConfig, SupervisionConfig
from engine.actors.messages import Execute, Forget, HeartbeatCommand, HeartbeatReply, Ping, Register, WorkerReply
from engine.actors.worker import Worker
from engine.actors.worker_group import open_workers
from engine.core.errors import ConfigError, WorkerError
from engine.core.plan import ItemResult, PlanItem, RankPlan, RankResult, SequenceStart, StepPlan
from engine.core.sampling import SamplingParams
from tests.actors.harness import MODULE, children, is_alive, until, worker_config
from tests.actors.scripted_worker import Script

QUICK = SupervisionConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.5, worker_exit_timeout_s=1.0)
PLAN = RankPlan(starts=(SequenceStart(0, 5, 0, (1, 2)),), items=(PlanItem(0, 5, 0, 3, 0, True),))

# Seconds on a busy machine; on an idle one these take a fraction of it. What they rule out is waiting for ever.
PATIENCE_S = 20.0


def spawn(script: Script, supervision: SupervisionConfig = QUICK, module: str = MODULE) -> Worker:
    return Worker(worker_config(script), supervision, module)


@pytest.fixture
def patient_clock() -> MockClock:
    """Runs like a real one until ``jump``: a process takes its time to start, and more on a busy machine."""
    return MockClock(rate=1.0)


def jump(clock: MockClock) -> None:
    """From here on, go to the next deadline whenever nothing has happened for half a real second."""
    clock.rate = 0.0
    clock.autojump_threshold = 0.5


async def test_start_work_stop() -> None:
    worker = spawn(Script(tokens=(11, 12, 13, 14)))
    ready = await worker.start()
    assert ready.vocab_size == 1000
    worker.queue(Register(5, (1, 2, 3), SamplingParams(seed=1), 1))
    await worker.send(Execute(0, PLAN))
    executed = await worker.receive_executed(0)
    assert executed.result == RankResult((ItemResult(5, (14,)),))
    await worker.send(Forget(5))
    await worker.stop(graceful=True)
    assert not is_alive(worker.pid)
    assert worker._process.returncode == 0


async def test_group_of_two_in_lock_step() -> None:
    configs = [worker_config(Script(tokens=(11,)), rank) for rank in range(2)]
    async with open_workers(configs, QUICK, MODULE) as group:
        for rank in range(2):
            group.queue(rank, Register(5, (1, 2, 3), SamplingParams(seed=1), 1))
        plan = StepPlan(0, (PLAN, RankPlan()))
        await group.send_plan(plan)
        result = await group.receive_result(plan)
        assert [len(rank.items) for rank in result.ranks] == [1, 0]
        assert result.components == (("other", 0.25),)
    assert children() == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(raise_at_step=0), "failed during step 0: ValueError: scripted failure"),
        (Script(kill_at_step=0), "was killed by SIGKILL"),
        (Script(exit_at_step=0), "exited with code 7"),
    ],
)
async def test_death_in_a_step(script: Script, words: str) -> None:
    worker = spawn(script)
    await worker.start()
    await worker.send(Execute(0, RankPlan()))
    with trio.fail_after(5), pytest.raises(WorkerError, match=words) as caught:
        await worker.receive_executed(0)
    assert caught.value.worker == "worker-0"
    with pytest.raises(WorkerError, match=words):  # later calls tell the same
        await worker.receive_executed(1)
    await worker.stop(graceful=True)
    assert worker._process.returncode != 0
    assert children() == []


async def test_config_error_stays_the_operators() -> None:
    worker = spawn(Script(start_error="no such folder: /x"))
    with pytest.raises(ConfigError, match="no such folder"):
        await worker.start()
    await worker.stop(graceful=True)


async def test_module_that_does_not_exist() -> None:
    worker = spawn(Script(), module="tests.actors.no_such_module")
    with pytest.raises(WorkerError, match="exited with code 1"):
        await worker.start()
    await worker.stop(graceful=True)


async def test_stopped_process_is_noticed() -> None:
    worker = spawn(Script())
    await worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    with pytest.raises(WorkerError, match="is stopped"):
        await worker.run_heartbeat()
    assert time.monotonic() - begin_s < PATIENCE_S
    await worker.stop(graceful=True)
    assert not is_alive(worker.pid)


async def test_long_step_does_not_look_dead() -> None:
    worker = spawn(Script(step_s=1.0))
    await worker.start()
    await worker.send(Execute(0, RankPlan()))
    with trio.move_on_after(0.9) as scope:
        await worker.run_heartbeat()
    assert scope.cancelled_caught
    assert (await worker.receive_executed(0)).step == 0
    await worker.stop(graceful=True)


async def test_hung_step_meets_its_deadline(patient_clock: MockClock) -> None:
    worker = spawn(Script(hang_at_step=0), SupervisionConfig(step_timeout_s=300.0))
    await worker.start()
    jump(patient_clock)
    await worker.send(Execute(0, RankPlan()))
    with pytest.raises(WorkerError, match="did not finish step 0 within step_timeout_s = 300; killed"):
        await worker.receive_executed(0)
    await worker.stop(graceful=True)
    await until(lambda: not is_alive(worker.pid))


async def test_a_result_that_came_while_this_process_stood_still_counts(patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = spawn(Script(), SupervisionConfig(step_timeout_s=300.0))
    await worker.start()
    await worker.send(Execute(0, RankPlan()))
    await trio.lowlevel.wait_readable(worker._plans._sock)
    receive = worker.receive

    async def receive_late() -> WorkerReply:
        monkeypatch.setattr(worker, "receive", receive)
        patient_clock.jump(1000.0)
        await trio.lowlevel.checkpoint()  # the deadline comes first
        return await receive()

    monkeypatch.setattr(worker, "receive", receive_late)
    assert (await worker.receive_executed(0)).step == 0
    await worker.stop(graceful=True)


async def test_start_meets_its_deadline(patient_clock: MockClock) -> None:
    worker = spawn(Script(start_s=60.0), SupervisionConfig(start_timeout_s=100.0))
    jump(patient_clock)
    with pytest.raises(WorkerError, match="was not ready within start_timeout_s = 100; killed"):
        await worker.start()
    await worker.stop(graceful=True)
    await until(lambda: not is_alive(worker.pid))


async def test_worker_that_does_not_shut_down_is_killed(patient_clock: MockClock) -> None:
    worker = spawn(Script(hang_at_close=True), SupervisionConfig(worker_exit_timeout_s=50.0))
    await worker.start()
    jump(patient_clock)
    await worker.stop(graceful=True)
    await until(lambda: not is_alive(worker.pid))


async def test_signals_to_the_worker_are_the_parents_business() -> None:
    worker = spawn(Script())
    await worker.start()
    os.kill(worker.pid, signal.SIGINT)
    os.kill(worker.pid, signal.SIGTERM)
    await worker.send(Execute(0, RankPlan()))
    assert (await worker.receive_executed(0)).step == 0
    assert os.getpgid(worker.pid) != os.getpgid(0)  # Ctrl-C does not even reach it
    await worker.stop(graceful=True)


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"\xc1\xc1\xc1"])
async def test_garbage_from_the_parent_ends_the_worker(junk: bytes) -> None:
    worker = spawn(Script())
    await worker.start()
    worker._plans._sock.send(junk)
    with trio.fail_after(5), pytest.raises(WorkerError, match="FrameError"):
        await worker.receive_executed(0)
    await worker.stop(graceful=True)


async def test_cancel_at_any_moment_of_the_start_leaves_no_process() -> None:
    configs = [worker_config(Script(start_s=0.05), rank) for rank in range(2)]
    for delay_s in (0.0, 0.001, 0.01, 0.05, 0.1, 0.2):
        with trio.move_on_after(delay_s):
            async with open_workers(configs, QUICK, MODULE):
                await trio.sleep_forever()
        await until(lambda: children() == [])


# -- heartbeats against a scripted other side, on a clock that jumps ----------------------------------------------------------


class _Beating(Worker):
    """A worker whose heartbeat channel is in the test's hands."""

    def __init__(self, supervision: SupervisionConfig, record: RecordConfig | None = None) -> None:
        super().__init__(msgspec.structs.replace(worker_config(Script()), record=record), supervision, MODULE)
        ours, theirs = socket.socketpair()
        self._heartbeat.close()
        self._heartbeat = TrioChannel(ours, HeartbeatReply)
        self.other: TrioChannel[HeartbeatReply, HeartbeatCommand] = TrioChannel(theirs, HeartbeatCommand)


async def beat(script: Any, supervision: SupervisionConfig, record: RecordConfig | None = None) -> str:
    """Run the heartbeat against ``script(worker)`` and give what it raised."""
    worker = _Beating(supervision, record)
    message = ""
    begin_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(script, worker)
        try:
            await worker.run_heartbeat()
        except WorkerError as error:
            message = f"{error} after {trio.current_time() - begin_s:.0f} s"
        nursery.cancel_scope.cancel()
    worker.kill()
    worker._process.wait()
    await worker.stop(graceful=False)
    worker.other.close()
    return message


SLOW = SupervisionConfig(heartbeat_interval_s=1.0, heartbeat_timeout_s=10.0)


async def test_silence_is_bounded(autojump_clock: MockClock) -> None:
    async def silent(worker: _Beating) -> None:
        del worker

    assert await beat(silent, SLOW) == "worker-0: gave no heartbeat for heartbeat_timeout_s = 10; killed after 10 s"


@pytest.mark.parametrize(("mode", "seconds"), [("profile", 60), ("timers", 10)])
async def test_a_profile_takes_its_time_to_be_written(mode: Literal["profile", "timers"], seconds: int, autojump_clock: MockClock) -> None:
    async def silent(worker: _Beating) -> None:
        del worker

    assert (await beat(silent, SLOW, RecordConfig("unused", mode))).endswith(f"after {seconds} s")


async def test_late_answers_are_no_death(autojump_clock: MockClock) -> None:
    beats = 0

    async def late(worker: _Beating) -> None:
        nonlocal beats
        while beats < 100:
            ping = await worker.other.receive()
            await trio.sleep(0.9)
            await worker.other.send(pong(ping))
            beats += 1

    assert "no heartbeat" in await beat(late, SLOW)
    assert beats == 100


async def test_answers_after_a_pause_reset_the_count(autojump_clock: MockClock) -> None:
    answered = 0

    async def moody(worker: _Beating) -> None:
        nonlocal answered
        for _ in range(5):  # nine beats of silence, then the answers to all of them
            await trio.sleep(9.0)
            pings = [await worker.other.receive() for _ in range(9)]
            for ping in pings:
                await worker.other.send(pong(ping))
                answered += 1

    assert "no heartbeat" in await beat(moody, SLOW)
    assert answered == 45


async def test_garbage_heartbeat(autojump_clock: MockClock) -> None:
    async def garbage(worker: _Beating) -> None:
        worker.other._sock.send(b"\x00\x00\x00\x00")

    assert "garbage" in await beat(garbage, SLOW)


def pong(ping: Ping) -> HeartbeatReply:
    return HeartbeatReply(ping.number)
