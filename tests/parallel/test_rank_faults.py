"""A rank that dies, freezes, raises or is slow somewhere in a step: every request ends, the right rank is blamed, nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import trio

from engine.actors.config import EngineConfig
from engine.actors.gateway import Gateway, Generation
from engine.actors.supervisor import open_engine
from engine.core.errors import CapacityError, ConfigError, WorkerError
from engine.core.sampling import SamplingParams
from tests.actors.harness import is_alive, until, until_sync, worker_pids
from tests.parallel.engines import engine_config
from tests.parallel.faulty_worker import FOLDER, Action, Fault

ROOT = Path(__file__).parents[2]
MODULE = "tests.parallel.faulty_worker"
COLLECTIVE_TIMEOUT_S = 1.0
# On a busy machine; on an idle one an error takes a third of it. What it rules out is waiting for ever.
PATIENCE_S = 10.0

WORDS = {
    "kill": "was killed by SIGKILL",
    "stop": "is stopped",
    "raise": r"failed during step \d+: ValueError: injected failure",
    "slow": "hangs or is too slow; hence worker-0: failed during step",
}

DATA = "tp1dp2ep2"
TENSOR = "tp2dp1ep2"

CASES = [
    (DATA, Fault("kill", "step", "first")),
    (DATA, Fault("kill", "dispatch", "prefill")),
    (DATA, Fault("kill", "combine", "decode")),
    (DATA, Fault("kill", "engram.fetch", "decode")),
    (DATA, Fault("kill", "draft", "decode")),
    (DATA, Fault("kill", "sampling", "decode")),
    (DATA, Fault("kill", "dispatch", "idle")),
    (DATA, Fault("kill", "draft", "idle")),
    (DATA, Fault("kill", "dispatch", "decode", rank=0)),
    (DATA, Fault("stop", "dispatch", "prefill")),
    (DATA, Fault("stop", "engram.fetch", "idle")),
    (DATA, Fault("stop", "draft", "decode")),
    (DATA, Fault("stop", "sampling", "decode")),
    (DATA, Fault("raise", "step", "first")),
    (DATA, Fault("raise", "combine", "idle")),
    (DATA, Fault("raise", "draft", "decode")),
    (DATA, Fault("raise", "sampling", "decode")),
    (DATA, Fault("slow", "step", "idle")),
    (DATA, Fault("slow", "dispatch", "decode")),
    (DATA, Fault("slow", "engram.fetch", "prefill")),
    (TENSOR, Fault("kill", "all_reduce", "prefill")),
    (TENSOR, Fault("kill", "all_gather", "decode")),
    (TENSOR, Fault("stop", "all_reduce", "decode")),
    (TENSOR, Fault("raise", "all_reduce", "decode")),
    (TENSOR, Fault("slow", "all_reduce", "decode")),
]


def name_of(case: object) -> str:
    return f"{case.action}-{case.point}-{case.when}-{case.rank}" if isinstance(case, Fault) else str(case)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_workers: None) -> Path:  # noqa: ARG001
    """Where faults are armed, and below it where the ranks meet."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "meetings").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "meetings"))
    return tmp_path


def config_of(layout: str, collective_timeout_s: float = COLLECTIVE_TIMEOUT_S, **supervision: object) -> EngineConfig:
    config = engine_config("tiny-v41", layout=layout, draft_tokens=3, collective_timeout=collective_timeout_s, max_total_tokens=2048)
    quick: dict[str, object] = {"heartbeat_interval_s": 0.2, "restart_backoff_s": 0.01}
    return msgspec.structs.replace(config, supervision=msgspec.structs.replace(config.supervision, **(quick | supervision)))


def arm(folder: Path, fault: Fault) -> None:
    (folder / "fired").unlink(missing_ok=True)
    (folder / "new").write_bytes(msgspec.json.encode(fault))
    (folder / "new").rename(folder / "armed")


def generation(length: int = 40, max_tokens: int = 400) -> Generation:
    return Generation(prompt=tuple(range(100, 100 + length)), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def ended(engine: Gateway, request: Generation, errors: list[str]) -> None:
    try:
        await engine.complete(request)
    except (CapacityError, WorkerError) as error:
        errors.append(str(error))


async def provoke(engine: Gateway, folder: Path, fault: Fault) -> tuple[list[str], float]:
    """Errors of the requests under way when ``fault`` happens, and the seconds from the fault to the last of them."""
    errors: list[str] = []
    async with trio.open_nursery() as nursery:
        arm(folder, fault)
        # One request goes to the shorter queue, which is rank 0's where both are empty: rank 1 is idle then.
        for index in range(1 if fault.when == "idle" else 4):
            nursery.start_soon(ended, engine, generation(30 + 7 * index), errors)
        await until(lambda: (folder / "fired").exists(), PATIENCE_S)
        fired_s = time.monotonic()
    return errors, time.monotonic() - fired_s


@pytest.mark.parametrize(("layout", "fault"), CASES, ids=name_of)
async def test_every_request_ends_and_the_rank_at_fault_is_named(layout: str, fault: Fault, folder: Path) -> None:
    pids: list[int] = []
    errors: list[str] = []
    took_s = 0.0

    async def body() -> None:
        nonlocal errors, took_s
        async with open_engine(config_of(layout), worker_module=MODULE) as engine:
            assert engine._group is not None
            pids.extend(worker.pid for worker in engine._group.near)
            errors, took_s = await provoke(engine, folder, fault)
            await trio.sleep_forever()

    with pytest.raises(WorkerError, match=WORDS[fault.action]) as caught:
        await body()
    assert caught.value.worker == f"worker-{fault.rank}"
    assert set(errors) == {str(caught.value)}
    assert len(errors) == (1 if fault.when == "idle" else 4)
    assert took_s < PATIENCE_S
    assert not any(is_alive(pid) for pid in pids)
    assert list((folder / "meetings").iterdir()) == []


async def test_restarts_meet_anew_and_give_the_same_tokens(folder: Path) -> None:
    faults = [Fault("kill", "combine", "decode"), Fault("raise", "draft", "idle"), Fault("stop", "engram.fetch", "prefill", rank=0)]
    meetings: set[Path] = set()
    async with open_engine(config_of(DATA, on_worker_death="restart"), worker_module=MODULE) as engine:
        expected = await engine.complete(generation(max_tokens=12))
        for fault in faults:
            group = engine._group
            assert group is not None
            meetings.update((folder / "meetings").iterdir())
            errors, _ = await provoke(engine, folder, fault)
            assert all(error.startswith(f"worker-{fault.rank}: ") for error in errors), errors
            with pytest.raises(CapacityError, match=f"worker-{fault.rank}"):
                await engine.complete(generation())
            await until(lambda: engine.health.ok, PATIENCE_S)
            assert not any(is_alive(worker.pid) for worker in group.near)
            assert (await engine.complete(generation(max_tokens=12))).samples == expected.samples
        meetings.update((folder / "meetings").iterdir())
        assert len(list((folder / "meetings").iterdir())) == 1
    assert len(meetings) == 4
    assert list((folder / "meetings").iterdir()) == []


def test_a_rank_gives_up_waiting_before_the_step_is_given_up() -> None:
    """Else the parent is the first to give up, and does not know which rank the others wait for."""
    for step_timeout, expected_s in ((10.0, 8.0), (600.0, 60.0)):
        config = engine_config("tiny-v41", layout=DATA, step_timeout=step_timeout)
        assert {worker.collective_timeout_s for worker in config.workers} == {expected_s}


# -- at the start -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "words"), [("config", "^injected mistake$"), ("kill", "^worker-1: was killed by SIGKILL$")])
async def test_a_rank_that_cannot_start_ends_the_start(action: Action, words: str, folder: Path) -> None:
    """Its peer waits for it at the meeting, for as long as collectives may take."""
    arm(folder, Fault(action, "load", "load"))
    begin_s = time.monotonic()
    with pytest.raises((ConfigError, WorkerError), match=words):
        async with open_engine(config_of(DATA, 60.0, on_worker_death="restart"), worker_module=MODULE):
            pass
    assert time.monotonic() - begin_s < PATIENCE_S
    assert list((folder / "meetings").iterdir()) == []


async def test_a_rank_that_does_not_come_to_the_meeting(folder: Path) -> None:
    arm(folder, Fault("slow", "load", "load"))
    with pytest.raises(WorkerError, match="worker-1: hangs or is too slow; hence worker-0: failed during start: rank 0 of 2 did not meet"):
        async with open_engine(config_of(DATA), worker_module=MODULE):
            pass


# -- leaving ------------------------------------------------------------------------------------------------------------------


async def test_leaving_does_not_wait_for_a_blocked_collective(folder: Path) -> None:
    errors: list[str] = []
    async with trio.open_nursery() as nursery:
        async with open_engine(config_of(DATA, 60.0, worker_exit_timeout_s=0.3), worker_module=MODULE) as engine:
            assert engine._group is not None
            pids = [worker.pid for worker in engine._group.near]
            arm(folder, Fault("slow", "dispatch", "idle"))
            nursery.start_soon(ended, engine, generation(), errors)
            await until(lambda: (folder / "fired").exists(), PATIENCE_S)
            begin_s = time.monotonic()
        assert time.monotonic() - begin_s < PATIENCE_S
    assert errors == ["the engine was stopped"]
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_the_command_ends(victim: str) -> None:
    """As an operator sees it: a rank killed, or the command itself while its ranks are in a collective."""
    command = [sys.executable, "-m", "twinfer", "generate", "tiny-v41", "--prompt", "x", "--max-tokens", "3000", "--ignore-eos"]
    process = subprocess.Popen([*command, "--layout", DATA], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)  # the first text: they decode
        workers = worker_pids(process.pid, "engine.actors.worker_main")
        assert len(workers) == 2
        os.kill(workers[1] if victim == "worker" else process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    until_sync(lambda: not any(is_alive(pid) for pid in workers))
    assert process.returncode == (1 if victim == "worker" else -signal.SIGKILL)
    if victim == "worker":
        assert errors.decode().splitlines()[-1] == "twinfer generate: worker-1: was killed by SIGKILL"
