"""Goodput with --tpot-slo against fixed chunk sizes: in the twin, where the cost model is the truth, and in the engine, where it is not.

    .venv/bin/python tests/benchmarks/bench_slo_policy.py twin --calibration FILE [--rates 2,4,8] [--tpot 40] [--ttft 2000]
    .venv/bin/python tests/benchmarks/bench_slo_policy.py engine --calibration FILE [--rates 4] [--rounds 3] [--policies 2048,256,slo]

The same requests (isl, osl, Poisson arrivals by seed) go to every policy. A request is good where its TTFT and its TPOT (the mean of its
gaps) keep the limits; goodput is good requests a second, the share is of all. In the engine the policies take turns over the rounds, each
with a server of its own and another seed a round, and the figures are all rounds together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from calibration.service import Service, cost_of_service
from engine.core.cache_config import CacheConfig
from engine.core.metrics import Slo
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepCost
from engine.model.files import read_model_files
from twin.cluster import TwinConfig, simulate
from twin.given_cost import parse_given_cost
from twin.workload.spec import WorkloadSpec, make_workload

ROOT = Path(__file__).parents[2]
SLO_POLICY = "slo"
PORT = 18731


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("twin", "engine"))
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--step-cost", help="twin: S,S/TOKEN,S/CONTEXT_TOKEN instead of a calibration")
    parser.add_argument("--model", default="tiny-v41")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", default="2048,512,256,128,64,slo", help="chunk sizes in tokens, or slo")
    parser.add_argument("--rates", default="2,4,6", help="requests/s")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--isl", default="256:768")
    parser.add_argument("--osl", default="16:64")
    parser.add_argument("--ttft", type=float, default=2000.0, help="limit in ms")
    parser.add_argument("--tpot", type=float, default=40.0, help="limit in ms")
    parser.add_argument("--itl", type=float, help="limit of a request's longest gap in ms")
    parser.add_argument("--arrival", default="poisson", help="twin: poisson or burst")
    parser.add_argument("--policy-tpot", type=float, help="what the policy is told, in ms; --tpot if not given")
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="budget of a step under the slo policy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--correct", action="store_true", help="engine: --calibration-correction")
    arguments = parser.parse_args()
    run = in_twin if arguments.where == "twin" else in_engine
    for rate in map(float, arguments.rates.split(",")):
        run(arguments, rate)


def in_twin(arguments: argparse.Namespace, rate: float) -> None:
    spec = read_model_files(arguments.model).spec
    cost: StepCost
    if arguments.step_cost:
        cost = parse_given_cost(arguments.step_cost)
    else:
        service = Service(arguments.model, spec, "tp1dp1ep1", arguments.dtype, "cpu", None, "gpu", 0)
        cost = cost_of_service(arguments.calibration, service)
    for policy in arguments.policies.split(","):
        rows = []
        for round_number in range(arguments.rounds):
            scheduler = _scheduler(arguments, policy, spec.has_sequence_state)
            itl_s = None if arguments.itl is None else arguments.itl / 1000
            limits = Slo(ttft_s=arguments.ttft / 1000, tpot_s=arguments.tpot / 1000, itl_s_max=itl_s)
            workload = make_workload(
                WorkloadSpec(
                    isl=arguments.isl, osl=arguments.osl, request_rate=rate, requests=arguments.requests, seed=round_number,
                    arrival=arguments.arrival, token_ids=(100, spec.vocab_size),
                )
            )  # fmt: skip
            found = simulate(TwinConfig(scheduler=scheduler, slo=limits), workload, cost)
            rows.append((found.goodput.per_s or 0.0, found.goodput.share or 0.0, found.ttft_s, found.tpot_s, found.itl_s))
        _print("twin", rate, policy, rows)


def _limits(arguments: argparse.Namespace) -> list[str]:
    limits = [("ttft", arguments.ttft), ("tpot", arguments.tpot), ("itl", arguments.itl)]
    return [f"{name}:{value}" for name, value in limits if value is not None]


def _scheduler(arguments: argparse.Namespace, policy: str, has_state: bool) -> SchedulerConfig:
    """As serve makes it, with room for every request."""
    is_slo = policy == SLO_POLICY
    budget = arguments.max_batched_tokens if is_slo else max(64, int(policy))  # a fixed budget bounds the step, whatever prompts are in it
    cache = CacheConfig(num_blocks=64 * 16, block_size=128, max_running=64, max_batched_tokens=budget, context_length=2048, num_tails=256)
    return SchedulerConfig(
        cache=cache,
        has_sequence_state=has_state,
        chunked_prefill_size=None if is_slo else int(policy),
        tpot_slo_s=(arguments.policy_tpot or arguments.tpot) / 1000 if is_slo else None,
    )


def in_engine(arguments: argparse.Namespace, rate: float) -> None:
    rows: dict[str, list[Any]] = {policy: [] for policy in arguments.policies.split(",")}
    for round_number in range(arguments.rounds):
        order = list(rows) if round_number % 2 == 0 else list(rows)[::-1]
        for policy in order:
            rows[policy].append(_serve_once(arguments, policy, rate, round_number))
            _print(f"engine, round {round_number}", rate, policy, rows[policy][-1:])
    for policy, found in rows.items():
        _print("engine", rate, policy, found)


def _serve_once(arguments: argparse.Namespace, policy: str, rate: float, seed: int) -> Any:
    base_url = f"http://127.0.0.1:{PORT}"
    options = ["--calibration", str(arguments.calibration), "--no-progress", "--port", str(PORT)]
    if policy == SLO_POLICY:
        options += ["--tpot-slo", str(arguments.policy_tpot or arguments.tpot)]
        options += ["--max-num-batched-tokens", str(arguments.max_batched_tokens)]
        options += ["--calibration-correction"] if arguments.correct else []
    else:
        options += ["--chunked-prefill-size", policy, "--max-num-batched-tokens", str(max(64, int(policy)))]
    with tempfile.TemporaryDirectory() as folder:
        log = (Path(folder) / "serve.log").open("w+")
        server = subprocess.Popen([sys.executable, "twinfer.py", "serve", arguments.model, *options], cwd=ROOT, stderr=log, stdout=log)
        try:
            _wait_ready(server, base_url, log)
            summary = Path(folder) / "summary.json"
            subprocess.run(
                [
                    *(sys.executable, "twinfer.py", "bench", "serve", "--base-url", base_url, "--endpoint", "completions"),
                    *("--isl", arguments.isl, "--osl", arguments.osl, "--ignore-eos", "--request-rate", str(rate)),
                    *("--num-prompts", str(arguments.requests), "--seed", str(seed), "--warmup-requests", "4"),
                    *("--goodput", *_limits(arguments), "--output", str(summary)),
                ],
                cwd=ROOT,
                check=True,
                capture_output=True,
                timeout=600,
            )  # fmt: skip
            found = json.loads(summary.read_text())
            state = json.loads(urllib.request.urlopen(f"{base_url}/server_info", timeout=10).read())["predictions"]
            print(f"    predictions: coverage {state['coverage']}, steps {state['num_compared']}, drift {state['drift_ratio']}", flush=True)
        finally:
            server.terminate()
            server.wait(timeout=60)
            log.close()
    found = found.get("summary", found)
    return (found["goodput"], found["goodput_share"], *(_Shown(**_three(found[name])) for name in ("ttft_s", "tpot_s", "itl_s")))


class _Shown(msgspec.Struct):
    p50: float
    p99: float
    max: float


def _three(distribution: dict[str, float]) -> dict[str, float]:
    return {name: distribution[name] for name in ("p50", "p99", "max")}


def _wait_ready(server: subprocess.Popen[bytes], base_url: str, log: Any) -> None:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        if server.poll() is not None:
            log.seek(0)
            raise SystemExit(f"the server ended: {log.read()[-2000:]}")
        try:
            if urllib.request.urlopen(f"{base_url}/health", timeout=2).status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not get ready within 120 s")


def _print(where: str, rate: float, policy: str, rows: list[Any]) -> None:
    mean = statistics.mean
    goodput = [row[0] for row in rows]
    spread = f" ({min(goodput):.2f}..{max(goodput):.2f})" if len(rows) > 1 else ""
    ttft, tpot, itl = ([row[index] for row in rows] for index in (2, 3, 4))
    print(
        f"{where:<16} rate {rate:>5g}  {policy:>5}  goodput {mean(goodput):.3f}/s{spread}  good {mean(row[1] for row in rows):7.2%}  "
        f"TTFT p50 {mean(d.p50 for d in ttft) * 1e3:6.0f} p99 {mean(d.p99 for d in ttft) * 1e3:6.0f}  "
        f"TPOT p50 {mean(d.p50 for d in tpot) * 1e3:5.1f} p99 {mean(d.p99 for d in tpot) * 1e3:5.1f}  "
        f"ITL p99 {mean(d.p99 for d in itl) * 1e3:5.1f} max {max(d.max for d in itl) * 1e3:5.0f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
