"""Clients that come and go: after hundreds of streams, a fifth of them cut at random moments, nothing is left of any of them."""

from __future__ import annotations

import gc
import json
import os
import random
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from engine.core.cache_config import CacheConfig
from tests.actors.harness import engine_config, until
from tests.api.harness import RawClient, Server, assert_idle, open_server, raw_client, request_bytes, script_of

NUM_REQUESTS = 500
CONCURRENCY = 50
MAX_RSS_GROWTH_BYTES = 24 << 20
# Half of what the running requests want: there are preemptions, and requests that wait.
CACHE = CacheConfig(num_blocks=64, block_size=4, max_running=8, max_batched_tokens=64, context_length=200)


class Footprint(msgspec.Struct, frozen=True):
    """What a server holds while nobody asks for anything."""

    num_tasks: int
    num_files: int
    num_records: int
    num_engine_streams: int
    num_event_streams: int
    num_free_or_cached_blocks: int


def footprint(server: Server) -> Footprint:
    ranks = server.gateway.stats().core.ranks
    return Footprint(
        num_tasks=trio.lowlevel.current_statistics().tasks_living,
        num_files=len(os.listdir("/proc/self/fd")),
        num_records=len(server.gateway._scheduler._records) + len(server.context.metrics._running),
        num_engine_streams=len(server.gateway._open_streams),
        num_event_streams=server.context.metrics.open_streams,
        num_free_or_cached_blocks=sum(rank.free_blocks + rank.cached_only_blocks for rank in ranks),
    )


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Churn:
    """Requests drawn from one seed. ``answered`` counts those read to their end, ``cut`` the others by how they ended."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.draw = random.Random(seed)
        self.answered = 0
        self.cut: dict[str, int] = {}

    async def run(self, count: int) -> None:
        limiter = trio.CapacityLimiter(CONCURRENCY)
        async with trio.open_nursery() as nursery:
            for number in range(count):
                way = self.draw.choice(("in the head", "in the body", "before the headers", "among the events", "by reset"))
                nursery.start_soon(self._one, limiter, number, way if number % 5 == 0 else None)

    async def _one(self, limiter: trio.CapacityLimiter, number: int, way: str | None) -> None:
        async with limiter, raw_client(self.server) as client:
            prompt = [3 + number % 50] * self.draw.randint(1, 40)
            body = {
                "model": "scripted",
                "prompt": prompt,
                "max_tokens": self.draw.randint(1, 24),
                "n": self.draw.choice((1, 1, 2)),
                "stream": True,
                "ignore_eos": True,
            }
            data = request_bytes("POST", "/v1/completions", json.dumps(body).encode(), "connection: close\r\n")
            if way is not None:
                await self._cut(client, data, way)
                self.cut[way] = self.cut.get(way, 0) + 1
                return
            await client.send(data)
            self._check(await self._read(client, slow=number % 7 == 0), int(str(body["n"])))
            self.answered += 1

    async def _cut(self, client: RawClient, data: bytes, way: str) -> None:
        head = data.index(b"\r\n\r\n")
        if way == "in the head":
            await client.send(data[: self.draw.randrange(head)])
            return
        if way == "in the body":
            await client.send(data[: self.draw.randrange(head + 4, len(data) - 1)])
            return
        await client.send(data)
        if way == "before the headers":
            for _ in range(self.draw.randint(0, 5)):
                await trio.lowlevel.checkpoint()
            return
        await client.receive_until(b"data: ")
        for _ in range(self.draw.randint(0, 10)):
            if not await client.receive():
                break
        if way == "by reset":
            client.stream.setsockopt(*_LINGER_ZERO)

    async def _read(self, client: RawClient, *, slow: bool) -> bytes:
        parts: list[bytes] = []
        while part := await client.receive():
            parts.append(part)
            if slow:
                await trio.sleep(0.01)
        return b"".join(parts)

    def _check(self, data: bytes, num_samples: int) -> None:
        """A whole answer: an end for each sample, and nothing after [DONE]."""
        assert data.startswith(b"HTTP/1.1 200"), data
        assert data.count(b'"finish_reason":"length"') == num_samples, data[-1000:]
        assert data.count(b"data: [DONE]") == 1
        assert data.endswith(b"0\r\n\r\n")


_LINGER_ZERO = (1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SOL_SOCKET, SO_LINGER, (on, 0 s): closing sends a reset


async def settle(server: Server, expected: Footprint) -> None:
    """Connections end a moment after their answers."""
    await assert_idle(server)
    await until(lambda: footprint(server) == expected, timeout_s=10.0)


@pytest.mark.timeout(120)
async def test_nothing_is_left_of_hundreds_of_streams() -> None:
    async with open_server(engine=engine_config(script_of("Say something. "), cache=CACHE)) as server:
        await trio.testing.wait_all_tasks_blocked()
        empty = footprint(server)
        assert empty.num_free_or_cached_blocks == CACHE.num_blocks
        await Churn(server, 1).run(100)  # imports, caches, threads: what is held from the first requests on
        await settle(server, empty)
        metrics, rss_before_bytes = server.context.metrics, rss_bytes()
        ended_before = sum(metrics.finished.values())
        churn = Churn(server, 2)
        await churn.run(NUM_REQUESTS)
        await settle(server, empty)
        assert rss_bytes() - rss_before_bytes < MAX_RSS_GROWTH_BYTES

        assert churn.answered == NUM_REQUESTS * 4 // 5
        assert len(churn.cut) == 5
        assert sum(churn.cut.values()) == NUM_REQUESTS // 5
        # Conservation: whoever was let in has ended in one way, and those who were cut ended as aborted, or just before.
        finished = metrics.finished
        assert metrics.counters.started == sum(finished.values()) - finished["rejected"]
        assert finished["error"] == finished["rejected"] == 0
        assert finished["abort"] > 0
        assert sum(finished.values()) - ended_before >= churn.answered
        assert sum(metrics.preemptions.values()) > 0
        assert metrics.counters.invariant_violations == 0
        statuses = {status for _, status in metrics.http_requests}
        assert statuses == {200, 499}
