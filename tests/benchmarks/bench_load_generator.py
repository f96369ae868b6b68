"""How many events the load generator takes in per second of one core: run by hand. It shares its machine with the server it measures, so
aim: 10,000/s at 64 streams. python -m tests.benchmarks.bench_load_generator [--streams 64] [--json]

A process of its own sends prepared bytes as fast as they are taken; ``paced`` sends one event at a time to every stream, so that each
costs a read of its own, as behind a real server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial

import trio

from engine.bench.endpoints import ENDPOINTS, Asked
from engine.bench.prompts import PromptMaker
from engine.bench.runner import RunSettings, make_http, run_workload
from engine.bench.workload import Lengths, WorkloadSettings, make_workload
from tests.bench.fake_server import chat_chunk, fake_server, role_chunk, stream, usage


async def serve(tokens: int, pause_s: float) -> None:
    """Answers every request with ``tokens`` events of one token."""
    values = [chat_chunk(" word", id="chatcmpl-0123456789abcdef", created=1, model="m", usage=usage(100, n + 1)) for n in range(tokens)]
    whole = stream(role_chunk(), *values, chat_chunk(finish="length", usage=usage(100, tokens)))
    answer = [b"".join(whole)] if not pause_s else [part for frame in whole for part in (frame, pause_s)][:-1]
    async with fake_server(lambda *_: answer) as server:
        print(server.url, flush=True)
        await trio.sleep_forever()


async def measure(url: str, streams: int) -> dict[str, float]:
    settings = RunSettings(asked=Asked("m"), endpoint=ENDPOINTS["chat"], max_concurrency=streams)
    workload = make_workload(WorkloadSettings(num_prompts=streams, input_tokens=Lengths(100, 100)))
    async with make_http(url, None, streams) as http:
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        run = await run_workload(http, settings, PromptMaker("words", 0), workload)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - begin_s
    assert all(record.error is None for record in run.records)
    events = sum(record.num_events for record in run.records)
    return {"events": events, "events_per_s": events / wall_s, "events_per_cpu_s": events / cpu_s, "client_cpu_share": cpu_s / wall_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=float, metavar="PAUSE_S", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        trio.run(partial(serve, arguments.tokens, arguments.serve))
        return
    results = {}
    for name, pause_s in (("flood", 0.0), ("paced", 0.001)):
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.bench_load_generator",
            "--serve",
            str(pause_s),
            "--tokens",
            str(arguments.tokens),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            results[name] = trio.run(measure, server.stdout.readline().strip(), arguments.streams)
            server.terminate()
        print(f"{name}: " + ", ".join(f"{key} {value:,.2f}" for key, value in results[name].items()), file=sys.stderr)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
