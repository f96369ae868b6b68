"""How fast the twin simulates: run by hand, prints a table and, with --json, one JSON object.

    python -m tests.benchmarks.bench_twin [--json] [--requests 20000] [--only light|heavy|fitted|ranks|memory] [--peer PYTHON]

light   requests of 2048/256 tokens, Poisson at 20/s over 4 replicas with step times near those of the peer's model: what it replays, too
heavy   the same at 70 % of the rate that saturates such replicas
fitted  the same work at 70 %, with steps priced by a fitted cost model (of a dense model) rather than a given one
ranks   one replica of 64 data ranks with 64-way experts, 256 requests each, steps of 40 ms: every step made, with given and with fitted
        prices, and fast-forward; processor time of the steps in which all of them decode
memory  peak resident memory at 5,000 and 50,000 requests, metrics in flat memory; each in a process of its own

Aims: 1,000 requests/s at least, 6,000 hoped for; ranks, every step made: twice as fast as real time at least, 5 times hoped for; memory
the same for ten times the requests. --peer: an interpreter that has ai-dynamo-runtime 1.6.1; its offline replay runs beside ``light``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from calibration.cost_model import CalibratedCost
from engine.core.cache_config import CacheConfig
from engine.core.layout import parse_layout
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepCost
from tests.calibration.synthetic import true_fit
from tests.core.test_tensors import dense_spec
from twin.cluster import simulate
from twin.config import TwinConfig
from twin.given_cost import GivenCost
from twin.result import SimResult
from twin.workload.spec import WorkloadSpec, make_workload
from twin.workload.types import SimRequest

# Near the peer's model: a decode step of 7 ms, a prompt of 2048 tokens 45 ms more.
STEP_COST = GivenCost(6.5e-3, 2.2e-5, 2e-8)
LIGHT_PER_S = 20.0
# A prompt, and a 256th of 256 full decode steps, per request and replica.
HEAVY_PER_S = 0.7 * 4 / (2048 * 2.2e-5 + 256 * (6.5e-3 + 256 * 2.2e-5 + 256 * 2176 * 2e-8) / 256)
PEER = """
import json, sys, time
from dynamo._core import run_mocker_synthetic_trace_replay as replay
begin_s = time.perf_counter()
found = replay(2048, 256, int(sys.argv[1]), extra_engine_args={}, num_workers=4, request_rate=float(sys.argv[2]), replay_mode="offline")
print(json.dumps(int(sys.argv[1]) / (time.perf_counter() - begin_s)))
"""


def config(num_blocks: int = 8192, **options: Any) -> TwinConfig:
    cache = CacheConfig(num_blocks=num_blocks, block_size=128, max_running=256, max_batched_tokens=8192, context_length=8192)
    ranks = options.pop("num_ranks", 1)
    scheduler = SchedulerConfig(cache=cache, num_ranks=ranks, max_waiting=1 << 20, max_scanned=options.pop("max_scanned", 64))
    return TwinConfig(scheduler=scheduler, **{"num_replicas": 4, "metrics": "flat", **options})


def poisson(num_requests: int, rate_per_s: float, step_cost: StepCost, **options: Any) -> SimResult:
    workload = make_workload(WorkloadSpec(isl="2048", osl="256", requests=num_requests, request_rate=rate_per_s))
    return simulate(config(**options), workload, step_cost)


def fitted() -> tuple[StepCost, float]:
    """A cost model with the terms of a real fit, at rates that make steps of some ms; and 70 % of the rate that saturates four replicas."""
    spec = dense_spec()
    layout = parse_layout("tp1dp1ep1").decode.unit
    cost = CalibratedCost(true_fit(spec), spec, layout)
    full = cost.price_stretch([[2176] * 256], 1, []).step_s[0]
    prompt = cost.price_stretch([[1]], 1, []).step_s[0]
    return cost, 0.7 * 4 / (256 * full / 256 + prompt)


class AtOnce:
    """As many requests as there are slots, at once, each with so many output tokens."""

    def __init__(self, num_requests: int, output_tokens: int) -> None:
        self.num_requests, self._output_tokens = num_requests, output_tokens

    def arrivals(self) -> Iterator[SimRequest]:
        spec = WorkloadSpec(isl="128", osl="1", requests=self.num_requests, request_rate=float("inf"))
        for request in make_workload(spec).arrivals():
            yield SimRequest(request.index, 0.0, request.prompt, self._output_tokens, self._output_tokens)

    def follow_up(self, _request: SimRequest, _end_s: float) -> SimRequest | None:
        return None


def bench_ranks(fast_forward: bool, steps: int, step_cost: StepCost | None = None) -> dict[str, float]:
    """Processor time of the steps that only decode: of a run with ``steps`` of them, less that of one with 20."""
    times_s = []
    for count in (20, 20 + steps):
        begin_s = time.process_time()
        # All are admitted in the first steps, so that all of them decode together.
        options = config(2048, num_ranks=64, num_replicas=1, fast_forward=fast_forward, max_scanned=64 * 256)
        # 40 ms with 256 requests a rank, whatever their contexts.
        simulate(options, AtOnce(64 * 256, count), step_cost or GivenCost(40e-3, 1e-12, 0.0))
        times_s.append(time.process_time() - begin_s)
    cpu_s = (times_s[1] - times_s[0]) / steps
    return {"cpu_ms_a_step": cpu_s * 1e3, "times_real_time": 40e-3 / cpu_s, "ns_an_item": cpu_s / (64 * 256) * 1e9}


def bench_memory(num_requests: int) -> dict[str, float]:
    poisson(num_requests, LIGHT_PER_S, STEP_COST)
    return {"peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def requests_per_s(num_requests: int, rate_per_s: float, step_cost: StepCost) -> dict[str, float]:
    found: dict[str, float] = {"rate_per_s": rate_per_s}
    for name, fast_forward in (("", True), ("_stepping", False)):
        result = poisson(num_requests, rate_per_s, step_cost, fast_forward=fast_forward)
        found |= {f"requests_per_s{name}": num_requests / result.wall_s, f"times_real_time{name}": result.sim_s / result.wall_s}
    batch = result.output_tokens / result.steps
    return found | {"steps_a_request": result.steps / num_requests, "tokens_a_step": batch, "tpot_ms": 1e3 * (result.tpot_s.mean or 0.0)}


def run_peer(python: str, num_requests: int) -> dict[str, float]:
    command = [python, "-c", PEER, str(num_requests), str(LIGHT_PER_S)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return {"requests_per_s": float(found.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--only", choices=("light", "heavy", "fitted", "ranks", "memory", "memory-one"), help="one of the parts")
    parser.add_argument("--peer", help="interpreter of the other simulator")
    args = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}

    def wanted(part: str) -> bool:
        return args.only in (None, part)

    if wanted("light"):
        rows["light"] = requests_per_s(args.requests, LIGHT_PER_S, STEP_COST)
        if args.peer:
            rows["light, peer"] = run_peer(args.peer, args.requests)
    if wanted("heavy"):
        rows["heavy"] = requests_per_s(args.requests, HEAVY_PER_S, STEP_COST)
    if wanted("fitted"):
        step_cost, rate_per_s = fitted()
        rows["fitted"] = requests_per_s(args.requests, rate_per_s, step_cost)
    if wanted("ranks"):
        rows["ranks, stepping"] = bench_ranks(False, 100)
        spec = dense_spec()
        fitted_ranks = CalibratedCost(true_fit(spec), spec, parse_layout("tp1dp64ep1").decode.unit)
        rows["ranks, stepping, fitted"] = bench_ranks(False, 100, fitted_ranks)
        rows["ranks, fast-forward"] = bench_ranks(True, 500)
    if wanted("memory"):
        for count in (5_000, 50_000):
            command = [sys.executable, "-m", "tests.benchmarks.bench_twin", "--only", "memory-one", "--requests", str(count), "--json"]
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
            rows[f"memory, {count} requests"] = json.loads(found.stdout)["memory-one"]
    if args.only == "memory-one":
        rows["memory-one"] = bench_memory(args.requests)
    if args.json:
        print(json.dumps(rows))
    else:
        for name, values in rows.items():
            print(f"{name:22s} " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
