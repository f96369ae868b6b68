"""Workers that die, freeze, raise or hang: every request ends, every block comes back, nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import trio

from engine.actors.gateway import Gateway, Generation
from engine.actors.supervisor import open_engine
from engine.actors.worker_group import open_workers
from engine.core.errors import CapacityError, ConfigError, WorkerError
from engine.core.sampling import SamplingParams
from tests.actors.harness import MODULE, children, engine_config, is_alive, until, until_sync, worker_pids
from tests.actors.scripted_worker import Script

ROOT = Path(__file__).resolve().parents[2]
LONG = Generation(prompt=tuple(range(20)), params=SamplingParams(max_tokens=150))

FAULTS = [
    (Script(step_s=0.002, raise_at_step=20), "failed during step 20: ValueError: scripted failure"),
    (Script(step_s=0.002, kill_at_step=20), "was killed by SIGKILL"),
    (Script(step_s=0.002, exit_at_step=20), "exited with code 7"),
    (Script(step_s=0.002, stop_at_step=20), "is stopped"),
    (Script(step_s=0.002, hang_at_step=20), "did not finish step 20 within step_timeout_s = 0.5"),
]

# Seconds on a busy machine; on an idle one these take a fraction of it. What they rule out is waiting for ever.
PATIENCE_S = 20.0


async def ended(engine: Gateway, errors: list[WorkerError], n: int = 1) -> None:
    """Read a request to the end that a worker's death gives it."""
    try:
        await engine.complete(Generation(prompt=LONG.prompt, params=LONG.params, n=n))
    except WorkerError as error:
        errors.append(error)


def assert_nothing_held(engine: Gateway) -> None:
    core = engine._scheduler.core
    core.check()
    for rank in core.stats().ranks:
        assert (rank.num_running, rank.free_blocks + rank.cached_only_blocks) == (0, rank.total_blocks)


@pytest.mark.parametrize(("script", "words"), FAULTS)
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_every_request_ends_and_the_engine_with_it(script: Script, words: str, num_ranks: int) -> None:
    config = engine_config(script, num_ranks=num_ranks, step_timeout_s=0.5)
    errors: list[WorkerError] = []
    engine: Gateway | None = None
    begin_s = time.monotonic()

    async def body() -> None:
        nonlocal engine
        async with open_engine(config, worker_module=MODULE) as engine, trio.open_nursery() as nursery:
            for index in range(5):
                nursery.start_soon(ended, engine, errors, 1 + index % 2)
            await trio.sleep_forever()

    with pytest.raises(WorkerError, match=words) as caught:
        await body()
    assert caught.value.worker == "worker-0"
    assert [str(error) for error in errors] == [str(caught.value)] * 5
    assert time.monotonic() - begin_s < PATIENCE_S
    assert engine is not None
    assert engine.health.state == "failed"
    assert_nothing_held(engine)
    assert children() == []


@pytest.mark.parametrize(("script", "words"), FAULTS)
async def test_restart(script: Script, words: str, tmp_path: Path) -> None:
    once = msgspec.structs.replace(script, once_file=str(tmp_path / "happened"))
    config = engine_config(once, step_timeout_s=0.5, on_worker_death="restart")
    async with open_engine(config, worker_module=MODULE) as engine:
        before = children()
        errors: list[WorkerError] = []
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ended, engine, errors)
        assert [words in str(error) for error in errors] == [True] * 5
        assert not engine.health.ok
        with pytest.raises(CapacityError, match="worker-0"):
            await engine.complete(LONG)
        await until(lambda: engine.health.ok)
        assert_nothing_held(engine)
        assert (await engine.complete(LONG)).usage.completion_tokens == 150
        assert len(children()) == 1
        assert children() != before
    assert children() == []


async def test_restarts_are_bounded() -> None:
    config = engine_config(Script(kill_at_step=0), on_worker_death="restart", max_restarts=2, restart_backoff_s=0.01)
    pids: set[int] = set()

    async def keep_asking(engine: Gateway) -> None:
        while True:
            pids.update(children())
            try:
                await engine.complete(LONG)
            except (WorkerError, CapacityError):
                await trio.sleep(0.01)

    with pytest.raises(WorkerError, match="SIGKILL"):
        async with open_engine(config, worker_module=MODULE) as engine:
            await keep_asking(engine)
    assert len(pids) == 3
    assert children() == []


async def test_the_killed_one_is_blamed_not_its_neighbour() -> None:
    configs = engine_config(Script(), num_ranks=2)
    async with open_workers(configs.workers, configs.supervision, MODULE) as group:
        heard_first = WorkerError("worker-0", "failed during step 3: RuntimeError: connection closed by peer")
        assert await group.blame(heard_first) is heard_first
        os.kill(group.near[1].pid, signal.SIGKILL)
        await until(lambda: group.workers[1].killed_by_others() is not None)
        assert str(await group.blame(heard_first)) == "worker-1: was killed by SIGKILL"


async def test_death_while_idle_is_noticed() -> None:
    begin_s = time.monotonic()

    async def body() -> None:
        async with open_engine(engine_config(Script()), worker_module=MODULE):
            os.kill(children()[0], signal.SIGKILL)
            await trio.sleep_forever()

    with pytest.raises(WorkerError, match="SIGKILL"):
        await body()
    assert time.monotonic() - begin_s < PATIENCE_S


async def test_start_failures() -> None:
    with pytest.raises(ConfigError, match="bad folder"):
        async with open_engine(
            engine_config(Script(start_error="bad folder"), num_ranks=2, on_worker_death="restart"), worker_module=MODULE
        ):
            pass
    with pytest.raises(WorkerError, match="exited with code 1"):
        async with open_engine(engine_config(Script()), worker_module="tests.actors.no_such_module"):
            pass
    assert children() == []


async def test_cancel_during_the_start() -> None:
    for delay_s in (0.0, 0.002, 0.02, 0.06, 0.1, 0.15):
        with trio.move_on_after(delay_s):
            async with open_engine(engine_config(Script(start_s=0.05), num_ranks=2), worker_module=MODULE, handle_signals=True):
                await trio.sleep_forever()
        assert children() == []


async def test_cancel_during_a_restart() -> None:
    config = engine_config(Script(kill_at_step=3), on_worker_death="restart", restart_backoff_s=1000.0)
    async with open_engine(config, worker_module=MODULE) as engine:
        with pytest.raises(WorkerError):
            await engine.complete(LONG)
    assert children() == []  # leaving does not wait for the backoff


async def test_nothing_piles_up_over_many_lives() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    for index in range(6):
        script = Script(kill_at_step=5) if index % 2 else Script()
        with contextlib.suppress(WorkerError):
            async with open_engine(engine_config(script), worker_module=MODULE, handle_signals=True) as engine:
                await engine.complete(LONG)
        counts.append(open_files())
    assert counts[2:] == [counts[2]] * 4


def test_a_worker_needs_neither_trio_nor_torch_to_start() -> None:
    code = "import sys, engine.actors.worker_main; assert not {'trio', 'torch', 'jinja2', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# -- the parent dies ----------------------------------------------------------------------------------------------------------

PARENT = """
import sys, trio
from engine.actors.supervisor import open_engine
from engine.actors.gateway import Generation
from engine.core.errors import TwinferError
from engine.core.sampling import SamplingParams
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script

async def main():
    config = engine_config(Script(**{script}), num_ranks=2, **{supervision})
    async with open_engine(config, worker_module=MODULE, handle_signals=True) as engine:
        async def one(index):
            try:
                completion = await engine.complete(Generation(prompt=(1 + index,), params=SamplingParams(max_tokens={max_tokens})))
                print("done", completion.usage.completion_tokens, flush=True)
            except TwinferError as error:
                print("error", error, flush=True)
        async with trio.open_nursery() as nursery:
            for index in range({num_requests}):
                nursery.start_soon(one, index)
            print("up", flush=True)
            if {wait}:
                await engine.wait_drained()
                nursery.start_soon(trio.sleep, {linger_s})
    print("closed", engine.exit_code, flush=True)
    sys.exit(engine.exit_code)

trio.run(main)
"""


class Parent:
    """A program around an engine, in a process of its own."""

    def __init__(self, script: str = "dict(step_s=0.01)", *, max_tokens: int = 150, num_requests: int = 2, wait: bool = True,
                 linger_s: float = 0.0, supervision: str = "dict()") -> None:  # fmt: skip
        code = PARENT.format(
            script=script, max_tokens=max_tokens, num_requests=num_requests, wait=wait, linger_s=linger_s, supervision=supervision
        )
        self.process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.workers: list[int] = []

    def wait_up(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"
        self.workers = worker_pids(self.process.pid)
        assert len(self.workers) == 2

    def end(self) -> tuple[int, list[str]]:
        """Exit code and the rest of the output; no worker may be left."""
        out, _ = self.process.communicate(timeout=20)
        until_sync(lambda: not any(is_alive(pid) for pid in self.workers))
        return self.process.returncode, out.splitlines()


@pytest.mark.parametrize("stopped_worker", [False, True])
def test_no_orphans_when_the_parent_is_killed(stopped_worker: bool) -> None:
    parent = Parent()
    parent.wait_up()
    if stopped_worker:
        os.kill(parent.workers[0], signal.SIGSTOP)
    parent.process.send_signal(signal.SIGKILL)
    assert parent.end()[0] == -signal.SIGKILL


def test_worker_death_makes_the_exit_code() -> None:
    parent = Parent()
    parent.wait_up()
    os.kill(parent.workers[1], signal.SIGKILL)
    code, lines = parent.end()
    assert code == 1  # an uncaught WorkerError
    assert lines == ["error worker-1: was killed by SIGKILL"] * 2


# -- signals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_first_signal_drains(number: int, code: int) -> None:
    parent = Parent("dict(step_s=0.004)")
    parent.wait_up()
    os.killpg(parent.process.pid, number)  # as a terminal does, to everybody in the group
    assert parent.end() == (code, ["done 150", "done 150", f"closed {code}"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_drain_is_bounded(number: int, code: int) -> None:
    parent = Parent("dict(step_s=0.1)", supervision="dict(shutdown_timeout_s=0.3)")
    parent.wait_up()
    begin_s = time.monotonic()
    parent.process.send_signal(number)
    got, lines = parent.end()
    assert got == code
    assert all("shut down before the request was finished" in line for line in lines[:2])
    assert time.monotonic() - begin_s < PATIENCE_S


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_stops_at_once(number: int, code: int) -> None:
    parent = Parent("dict(step_s=30.0)")
    parent.wait_up()
    begin_s = time.monotonic()
    parent.process.send_signal(number)
    time.sleep(0.2)
    assert parent.process.poll() is None
    parent.process.send_signal(number)
    got, lines = parent.end()
    assert got == code
    assert lines[-1] == f"closed {code}"
    assert time.monotonic() - begin_s < PATIENCE_S


def test_nothing_to_drain() -> None:
    parent = Parent(num_requests=0)
    parent.wait_up()
    begin_s = time.monotonic()
    parent.process.send_signal(signal.SIGTERM)
    assert parent.end() == (0, ["closed 0"])
    assert time.monotonic() - begin_s < PATIENCE_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_the_start(number: int) -> None:
    parent = Parent("dict(start_s=30.0)")
    until_sync(lambda: len(worker_pids(parent.process.pid)) == 2)
    parent.workers = worker_pids(parent.process.pid)
    parent.process.send_signal(number)
    code, lines = parent.end()
    assert code in (128 + number, -number)
    assert lines == []


def test_signals_at_random_times() -> None:
    """What a signal meets is one of few states; the times below reach start, requests, end."""
    for delay_s in (0.05, 0.12, 0.18, 0.22, 0.3, 0.5):
        parent = Parent("dict(step_s=0.002)", max_tokens=50, wait=False)
        time.sleep(delay_s)
        parent.process.send_signal(signal.SIGINT)
        out, _ = parent.process.communicate(timeout=20)
        assert parent.process.returncode in (0, 1, 130, -signal.SIGINT), out
    assert worker_pids(1) == []
