"""Drives a workload: the open loop keeps a schedule whatever the server does, the closed loop keeps a number of requests running.

A request that could not be sent at its time has a schedule slip (sent - scheduled); a client that slips is no open loop, so the slip is
reported. With a cap on the open loop the wait for a place is part of the slip.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import httpx
import msgspec
import trio

from engine.bench.client import Client, Prepared
from engine.bench.endpoints import Asked, Endpoint
from engine.bench.prompts import PromptMaker
from engine.bench.record import RequestRecord
from engine.bench.workload import Work
from engine.version import VERSION

# What the operating system's default of open files leaves room for; an open loop may not grow beyond it.
MAX_CONNECTIONS = 65536
CONNECT_TIMEOUT_S = 30.0


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``max_concurrency`` None leaves the open loop without a cap. ``duration_s`` stops sending; what runs is finished."""

    asked: Asked
    endpoint: Endpoint
    timeout_s: float = 600.0
    max_concurrency: int | None = None
    duration_s: float | None = None


class Run(msgspec.Struct):
    """Records in the order the requests ended. ``start_s`` is the schedule's zero on trio's clock."""

    records: list[RequestRecord]
    start_s: float
    wall_s: float
    cpu_s: float


def make_http(base_url: str, api_key: str | None, max_connections: int | None) -> httpx.AsyncClient:
    """A pool as large as the concurrency: no request waits for a connection. Proxies of the environment are not used."""
    headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": f"twinfer/{VERSION}"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    most = max_connections or MAX_CONNECTIONS
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=60.0)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=timeout, trust_env=False)


async def run_workload(
    http: httpx.AsyncClient,
    settings: RunSettings,
    prompts: PromptMaker,
    workload: Iterator[Work],
    progress: Callable[[], None] | None = None,
) -> Run:
    """Send all of it. Arrivals decide between open and closed loop."""
    driver = _Driver(Client(http, settings.endpoint, settings.timeout_s), settings, prompts, progress)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    first = next(workload, None)
    driver.start_s = trio.current_time()
    if first is not None:
        rest = _chained(first, workload)
        await (driver.closed_loop(rest) if first.arrival_s is None else driver.open_loop(rest))
    return Run(driver.records, driver.start_s, time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _chained(first: Work, rest: Iterator[Work]) -> Iterator[Work]:
    yield first
    yield from rest


class _Driver:
    def __init__(self, client: Client, settings: RunSettings, prompts: PromptMaker, progress: Callable[[], None] | None) -> None:
        self._client = client
        self._settings = settings
        self._prompts = prompts
        self._progress = progress
        self.start_s = 0.0
        self.records: list[RequestRecord] = []

    def _prepare(self, work: Work) -> Prepared:
        prompt = self._prompts.make(work)
        digest = hashlib.blake2b(msgspec.json.encode(prompt), digest_size=16).digest()
        body = self._settings.endpoint.body(self._settings.asked, prompt, work.output_tokens)
        scheduled_s = None if work.arrival_s is None else self.start_s + work.arrival_s
        return Prepared(work, body, digest, scheduled_s)

    async def _send(self, prepared: Prepared) -> None:
        record = await self._client.send(prepared)
        self.records.append(record)
        if self._progress is not None:
            self._progress()

    def _is_over(self, now_s: float) -> bool:
        return self._settings.duration_s is not None and now_s - self.start_s >= self._settings.duration_s

    async def closed_loop(self, workload: Iterator[Work]) -> None:
        async def slot() -> None:
            # The iterator is shared: there is no await between a request's turn and the next one's.
            for work in workload:
                if self._is_over(trio.current_time()):
                    return
                await self._send(self._prepare(work))

        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.max_concurrency or 1):
                nursery.start_soon(slot)

    async def open_loop(self, workload: Iterator[Work]) -> None:
        places = trio.Semaphore(self._settings.max_concurrency or MAX_CONNECTIONS)

        async def one(prepared: Prepared) -> None:
            try:
                await self._send(prepared)
            finally:
                places.release()

        async with trio.open_nursery() as nursery:
            for work in workload:
                prepared = self._prepare(work)  # while its time has not come yet
                scheduled_s = prepared.scheduled_s if prepared.scheduled_s is not None else self.start_s
                if self._is_over(max(scheduled_s, trio.current_time())):
                    break
                await trio.sleep_until(scheduled_s)
                await places.acquire()
                nursery.start_soon(one, prepared)


def raise_open_files() -> None:
    """Every connection is a file; the soft limit of 1,024 is too few for a large run."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
