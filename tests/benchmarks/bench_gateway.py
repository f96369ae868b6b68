"""What the gateway and the API cost beside the bare HTTP stack: run by hand, prints a table and, with --json, one JSON object.

    python tests/benchmarks/bench_gateway.py [--streams 64] [--rounds 3] [--json]

Both servers run on hypercorn and trio, in processes of their own, in turn within one run, under the same client in another process. The
gateway serves a scripted worker (a process too); the bare one is Starlette's StreamingResponse with as many events of the same size. Aims
at 64 streams: at least 80 % of the bare stack's events/s, and at most 50 ms of TTFT (p99) on top of the engine's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route as StarletteRoute

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engine.api.call import Call  # noqa: E402
from engine.api.context import ApiContext  # noqa: E402
from engine.api.histogram import Histogram  # noqa: E402
from engine.api.metrics import LATENCY_BOUNDS_S  # noqa: E402
from engine.api.routes import ROUTES, Route  # noqa: E402
from engine.core.cache_config import CacheConfig  # noqa: E402
from engine.core.metrics import percentile  # noqa: E402
from tests.actors.harness import engine_config  # noqa: E402
from tests.api.harness import open_server, script_of  # noqa: E402

FRAME = b"data: "
TOKENS = 128
PACED_STEP_S = 0.04
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


# -- servers ------------------------------------------------------------------------------------------------------------------


class RecordingHistogram(Histogram):
    """Keeps the values: the engine's own TTFT, to be taken off the client's."""

    def __init__(self) -> None:
        super().__init__(LATENCY_BOUNDS_S)
        self.values: list[float] = []

    def observe(self, value: float, times: int = 1) -> None:
        super().observe(value, times)
        self.values += [value] * times


async def serve_gateway(streams: int, step_s: float) -> None:
    cache = CacheConfig(num_blocks=streams * 24, block_size=16, max_running=streams, max_batched_tokens=8192, context_length=384)
    ttft_s = RecordingHistogram()

    async def engine_ttft(_: ApiContext, call: Call) -> None:
        await call.send_json(ttft_s.values)
        ttft_s.values.clear()

    script = script_of("A server that says the same few words over and over. ", step_s=step_s)
    routes = (*ROUTES, Route("/engine_ttft", "public", {"GET": engine_ttft}))
    async with open_server(engine=engine_config(script, cache=cache, heartbeat_timeout_s=30.0), routes=routes) as server:
        server.context.metrics.histograms.ttft_s = ttft_s
        print(server.port, flush=True)
        await trio.sleep_forever()


async def serve_bare(frame_bytes: int, step_s: float) -> None:
    from hypercorn.config import Config
    from hypercorn.trio import serve

    async def stream(request: Request) -> StreamingResponse:
        body = json.loads(await request.body())
        num_frames, per_chunk = body["max_tokens"], body.get("frames_per_chunk", 1)
        chunk = (FRAME + b"x" * (frame_bytes - len(FRAME) - 2) + b"\n\n") * per_chunk

        async def chunks() -> Any:
            for _ in range(num_frames // per_chunk):
                if step_s:
                    await trio.sleep(step_s)
                yield chunk

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def engine_ttft(_: Request) -> JSONResponse:
        return JSONResponse([])

    app = Starlette(
        routes=[StarletteRoute("/v1/completions", stream, methods=["POST"]), StarletteRoute("/engine_ttft", engine_ttft, methods=["GET"])]
    )
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = bound.getsockname()[1]
    bound.close()
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.accesslog = config.errorlog = None
    config.keep_alive_max_requests = 1 << 20
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: serve(app, config, task_status=task_status))  # type: ignore[arg-type]
        print(port, flush=True)


class Server:
    """A server process, and its CPU time with its workers'."""

    def __init__(self, kind: str, *options: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, *options], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(kind: str, *options: str) -> Iterator[Server]:
    server = Server(kind, *options)
    try:
        yield server
    finally:
        server.close()


# -- the client ---------------------------------------------------------------------------------------------------------------


class Measured(msgspec.Struct):
    """One pass of a client: ``frames`` events in ``seconds``; ``ttft_s`` from the request's last byte out to the first event's in."""

    requests: int
    frames: int
    bytes: int
    seconds: float
    ttft_s: list[float]
    client_cpu_s: float
    server_cpu_s: float = 0.0


class _Connection:
    """Sends its requests one after the other on one connection."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.requests = list(requests)
        self.frames = 0
        self.bytes = 0
        self.ttft_s: list[float] = []
        self._tail = b""
        self._sent_s = 0.0
        self._waiting = False

    def send(self) -> None:
        self._waiting = True
        self._tail = b""
        self.socket.sendall(self.requests.pop())
        self._sent_s = time.perf_counter()

    def receive(self) -> bool:
        """False once the last answer is complete."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise SystemExit(f"the server closed a connection after {self.frames} events: {self._tail!r}")
        joined = self._tail + data
        found = joined.count(FRAME)
        if found and self._waiting:
            self.ttft_s.append(time.perf_counter() - self._sent_s)
            self._waiting = False
        self.frames += found
        self.bytes += len(data)
        self._tail = joined[-5:]  # shorter than what is counted, as long as the end of a chunked body
        if self._tail != b"0\r\n\r\n":
            return True
        if self._waiting:
            raise SystemExit(f"an answer without an event: {joined!r}")
        if not self.requests:
            return False
        self.send()
        return True


def request_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def run_client(port: int, streams: int, requests: int, body: dict[str, Any]) -> Measured:
    """``spread_tokens`` in the body is ours: it varies max_tokens, so that the streams do not stay in step."""
    spread, draw = body.pop("spread_tokens", 0), random.Random(streams)
    connections = [
        _Connection(port, [request_bytes(body | {"max_tokens": body["max_tokens"] + draw.randint(0, spread)}) for _ in range(requests)])
        for _ in range(streams)
    ]
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send()
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.receive():
                    selector.unregister(key.fileobj)
    seconds = time.perf_counter() - begin_s
    return Measured(
        requests=streams * requests,
        frames=sum(connection.frames for connection in connections),
        bytes=sum(connection.bytes for connection in connections),
        seconds=seconds,
        ttft_s=[ttft_s for connection in connections for ttft_s in connection.ttft_s],
        client_cpu_s=time.process_time() - cpu_s,
    )


def measure(server: Server, streams: int, requests: int, max_tokens: int = TOKENS, **extra: Any) -> Measured:
    """One pass, in a client process of its own."""
    body = {"model": "scripted", "prompt": list(range(3, 19)), "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **extra}
    arguments = [str(server.port), str(streams), str(requests), json.dumps(body)]
    cpu_s = server.cpu_s()
    done = subprocess.run([sys.executable, __file__, "--client", *arguments], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return msgspec.structs.replace(msgspec.json.decode(done.stdout, type=Measured), server_cpu_s=server.cpu_s() - cpu_s)


def engine_ttft_s(server: Server) -> list[float]:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /engine_ttft HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    values: list[float] = json.loads(data.partition(b"\r\n\r\n")[2])
    return values


# -- the comparison -----------------------------------------------------------------------------------------------------------


def quantiles_ms(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return percentile(ordered, 0.5) * 1e3, percentile(ordered, 0.99) * 1e3


def run_saturated(streams: int, rounds: int) -> dict[str, float]:
    """Steps that take no time: how many events a second the HTTP side can carry, and the TTFT of requests of one token, as many of them
    as there are streams at any moment.
    """
    passes: dict[str, list[Measured]] = {"gateway": [], "bare": [], "bare, 16 events a chunk": []}
    short: list[Measured] = []
    bare_short: list[Measured] = []
    with serving("gateway", f"--streams={streams}") as gateway:
        warm = measure(gateway, streams, 1)
        frame_bytes = warm.bytes // warm.frames
        with serving("bare", f"--frame-bytes={frame_bytes}") as bare:
            measure(bare, streams, 1)
            for _ in range(rounds):
                passes["gateway"].append(measure(gateway, streams, 3))
                passes["bare"].append(measure(bare, streams, 3))
                passes["bare, 16 events a chunk"].append(measure(bare, streams, 3, frames_per_chunk=16))
                short.append(measure(gateway, streams, 10, max_tokens=1))
                bare_short.append(measure(bare, streams, 10, max_tokens=1))
    per_s = {name: statistics.median(one.frames / one.seconds for one in found) for name, found in passes.items()}
    tokens_per_s = statistics.median(one.requests * TOKENS / one.seconds for one in passes["gateway"])
    request_us = statistics.median(one.server_cpu_s / one.requests for one in short) * 1e6
    bare_request_us = statistics.median(one.server_cpu_s / one.requests for one in bare_short) * 1e6

    def token_us(found: Sequence[Measured], one_request_us: float) -> float:
        return statistics.median((one.server_cpu_s * 1e6 - one.requests * one_request_us) / (one.requests * (TOKENS - 1)) for one in found)

    ttft_ms = {
        f"{name}_saturated_ttft_ms_{quantile}": value
        for name, found in (("gateway", short), ("bare", bare_short))
        for quantile, value in zip(("p50", "p99"), quantiles_ms([ttft_s for one in found for ttft_s in one.ttft_s]), strict=True)
    }
    return {
        "frame_bytes": frame_bytes,
        "gateway_events_per_s": per_s["gateway"],
        "gateway_tokens_per_s": tokens_per_s,
        "bare_events_per_s": per_s["bare"],
        "client_limit_events_per_s": per_s["bare, 16 events a chunk"],
        "share_of_bare": tokens_per_s / per_s["bare"],
        "gateway_token_us": token_us(passes["gateway"], request_us),
        "bare_event_us": token_us(passes["bare"], bare_request_us),
        "gateway_request_us": request_us,
        "bare_request_us": bare_request_us,
        **ttft_ms,
        "client_cpu_share": statistics.median(one.client_cpu_s / one.seconds for one in passes["gateway"]),
    }


def run_paced(streams: int, rounds: int, spread_tokens: int) -> dict[str, float]:
    """Steps of a modest model: what a client waits for its first token on top of the engine's own TTFT, quantile by quantile.

    With a spread the streams end, and the next begin, at different steps, as clients do; without one all of them begin at once.
    """
    client_s: list[float] = []
    engine_s: list[float] = []
    with serving("gateway", f"--streams={streams}", f"--step-s={PACED_STEP_S}") as gateway:
        measure(gateway, streams, 1, max_tokens=8)
        engine_ttft_s(gateway)
        for _ in range(rounds):
            client_s += measure(gateway, streams, 4, max_tokens=16, spread_tokens=spread_tokens).ttft_s
            engine_s += engine_ttft_s(gateway)
    (client_p50, client_p99), (engine_p50, engine_p99) = quantiles_ms(client_s), quantiles_ms(engine_s)
    return {
        "client_ttft_ms_p50": client_p50,
        "client_ttft_ms_p99": client_p99,
        "engine_ttft_ms_p50": engine_p50,
        "engine_ttft_ms_p99": engine_p99,
        "added_ttft_ms_p50": client_p50 - engine_p50,
        "added_ttft_ms_p99": client_p99 - engine_p99,
    }


def compare(streams: int, rounds: int, as_json: bool) -> None:
    burst = {f"burst_{name}": value for name, value in run_paced(streams, rounds, 0).items()}
    result = {"streams": streams, **run_saturated(streams, rounds), **run_paced(streams, rounds, 64), **burst}
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:30} {value:10.3f}" if value < 10 else f"{name:30} {value:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=["gateway", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--frame-bytes", type=int, default=200, help=argparse.SUPPRESS)
    parser.add_argument("--step-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        port, streams, requests, body = arguments.client
        sys.stdout.buffer.write(msgspec.json.encode(run_client(int(port), int(streams), int(requests), json.loads(body))))
    elif arguments.serve:
        serve: Callable[[], Any] = {
            "gateway": lambda: serve_gateway(arguments.streams, arguments.step_s),
            "bare": lambda: serve_bare(arguments.frame_bytes, arguments.step_s),
        }[arguments.serve]
        trio.run(serve)
    else:
        compare(arguments.streams, arguments.rounds, arguments.json)


if __name__ == "__main__":
    main()
