"""Engines of scripted workers for the tests of the actors, and ways to look at processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from engine.actors.config import EngineConfig, GatewayConfig, SupervisionConfig, WorkerConfig
from engine.core.cache_config import CacheConfig
from engine.core.scheduler_config import SchedulerConfig
from tests.actors.scripted_worker import Script

MODULE = "tests.actors.scripted_worker"
CACHE = CacheConfig(num_blocks=64, block_size=4, max_running=8, max_batched_tokens=64, context_length=200)


def worker_config(script: Script, rank: int = 0, cache: CacheConfig = CACHE) -> WorkerConfig:
    return WorkerConfig(name=f"worker-{rank}", model=msgspec.json.encode(script).decode(), cache=cache, rank=rank, data_rank=rank)


def engine_config(
    script: Script,
    *,
    num_ranks: int = 1,
    cache: CacheConfig = CACHE,
    scheduler: dict[str, Any] | None = None,
    gateway: GatewayConfig | None = None,
    **supervision: Any,
) -> EngineConfig:
    defaults: dict[str, Any] = {
        "heartbeat_interval_s": 0.1,
        "heartbeat_timeout_s": 1.0,
        "worker_exit_timeout_s": 2.0,
        "restart_backoff_s": 0.05,
    }
    return EngineConfig(
        workers=tuple(worker_config(script, rank, cache) for rank in range(num_ranks)),
        scheduler=SchedulerConfig(cache=cache, num_ranks=num_ranks, **(scheduler or {})),
        supervision=SupervisionConfig(**(defaults | supervision)),
        gateway=gateway or GatewayConfig(),
    )


def children() -> list[int]:
    """Pids of this process's live children, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)) and _parent(int(entry.name)) == os.getpid():
            found.append(int(entry.name))
    return sorted(found)


def worker_pids(parent: int, module: str = MODULE) -> list[int]:
    """Worker processes below ``parent``, the scripted ones if not told otherwise."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or _parent(int(entry.name)) != parent:
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if module.encode() in command:
            found.append(int(entry.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait in real time, whatever trio's clock does."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true"
        await trio.to_thread.run_sync(time.sleep, 0.005)


def until_sync(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true"
        time.sleep(0.005)
