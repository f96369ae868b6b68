"""The twin's timing alone: the engine's real gateway, scheduler and worker processes, whose steps take a known time, beside the twin.

    python -m tests.benchmarks.bench_twin_timing [--requests 100] [--ranks 1,2]

A scripted worker sleeps for STEP_S and TOKEN_S for each token of the rank with most, so that neither a cost model nor the machine's drift
is in the errors; what is left is when newcomers are seen, what overlaps, and what the host adds. That last one is measured beforehand, on a
closed loop of one request a rank, as the median step beyond what the worker sleeps.

Printed for each load, in shares of the saturation that the twin predicts: errors of the medians of TTFT, TPOT and E2E, of single requests
(median of |predicted / measured - 1|), and of the throughput; in brackets what a second run differs by.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import msgspec
import trio

from engine.actors.supervisor import open_engine
from engine.cli.workload_run import EngineSession, WorkloadRun
from engine.core.cache_config import CacheConfig
from engine.core.driver_log import DriverLog
from engine.core.events import Event
from engine.core.plan import StepPlan, StepResult
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script
from twin import compare
from twin.cluster import TwinConfig, simulate
from twin.compare import Outcome
from twin.given_cost import GivenCost
from twin.parity import check_parity
from twin.workload.spec import WorkloadSpec, make_workload

STEP_S, TOKEN_S = 0.02, 2e-4
CACHE = CacheConfig(num_blocks=512, block_size=16, max_running=8, max_batched_tokens=256, context_length=512)
SHARES = (0.3, 0.6, 0.8, 0.95, float("inf"))
ROUNDS = 2


class _Events:
    def __init__(self) -> None:
        self.log: list[Event] = []

    def planned(self, _replica: int, _plan: StepPlan, _now_s: float) -> None: ...

    def committed(self, _replica: int, _plan: StepPlan, _result: StepResult, _now_s: float) -> None: ...

    def events(self, _replica: int, events: Sequence[Event]) -> None:
        self.log += events


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--ranks", default="1,2")
    arguments = parser.parse_args(argv)
    for num_ranks in map(int, arguments.ranks.split(",")):
        trio.run(_bench, num_ranks, arguments.requests)
    return 0


async def _bench(num_ranks: int, num_requests: int) -> None:
    config = engine_config(
        Script(step_s=STEP_S, token_s=TOKEN_S, vocab_size=4000), num_ranks=num_ranks, cache=CACHE, heartbeat_timeout_s=10.0
    )
    twin = TwinConfig(scheduler=config.scheduler, max_requests=config.max_requests)
    log = DriverLog()
    async with open_engine(config, None, observers=(log,), worker_module=MODULE) as engine:
        session = EngineSession(engine, log, {})
        await session.warm_up(num_ranks)
        alone = WorkloadSpec(isl="16", osl="60", requests=2 * num_ranks, concurrency=num_ranks)
        host_s = _host_s(log, await session.run(make_workload(alone)))
        cost = GivenCost(STEP_S + host_s, TOKEN_S, 0.0)
        base = WorkloadSpec(isl="64", osl="24", range_ratio=0.5, requests=num_requests)
        saturation_per_s = _simulated(twin, _at(base, float("inf")), cost).quantities["served_requests_per_s"]
        print(f"{num_ranks} rank(s): host {host_s * 1e3:.2f} ms a step, saturation {saturation_per_s:.1f} req/s predicted")
        for share in SHARES:
            spec = _at(base, share * saturation_per_s)
            predicted = _simulated(twin, spec, cost)
            runs = [await session.run(make_workload(spec)) for _ in range(ROUNDS)]
            real = [compare.outcome(log.log[one.first_event : one.last_event], _numbers(one)) for one in runs]
            print(_line(share, predicted, real))
            sys.stdout.flush()
        core_config = msgspec.structs.replace(config.scheduler, max_waiting=config.max_requests)
        parity = check_parity(core_config, log, session.requests)
        print(f"parity: {parity.difference or f'{parity.num_plans:,} plans, {parity.num_plan_bytes:,} bytes, equal'}")


def _at(spec: WorkloadSpec, rate_per_s: float) -> WorkloadSpec:
    return msgspec.structs.replace(spec, request_rate=rate_per_s)


def _host_s(log: DriverLog, run: WorkloadRun) -> float:
    """What a step takes beyond the worker's sleep, in the median."""
    beyond = []
    for step in range(run.first_step + 1, run.last_step):
        tokens = max(rank.num_tokens for rank in log.plans[step].ranks)
        beyond.append(log.committed_s[step] - log.committed_s[step - 1] - STEP_S - TOKEN_S * tokens)
    return max(0.0, statistics.median(beyond))


def _simulated(config: TwinConfig, spec: WorkloadSpec, cost: GivenCost) -> Outcome:
    events = _Events()
    simulate(config, make_workload(spec), cost, observers=(events,))
    return compare.outcome(events.log)


def _numbers(run: WorkloadRun) -> dict[int, int]:
    return {request: sent.index for request, sent in run.requests.items()}


def _line(share: float, predicted: Outcome, real: Sequence[Outcome]) -> str:
    first, second = real
    by_request = compare.request_errors(predicted.times, first.times)
    again_by_request = compare.request_errors(second.times, first.times)
    parts = []
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        key = f"{name.removesuffix('_s')}_p50_s"
        parts.append(
            f"{name.removesuffix('_s').upper()} {_error(predicted, first, key):+.1%} [{_error(second, first, key):+.1%}], by request "
            f"{by_request[name]['median']:.1%} [{again_by_request[name]['median']:.1%}]"
        )
    key = "output_tokens_per_s"
    parts.append(f"tokens/s {_error(predicted, first, key):+.1%} [{_error(second, first, key):+.1%}]")
    return f"  {'all at once' if share == float('inf') else f'{share:.0%}':>11}: {'; '.join(parts)}"


def _error(predicted: Outcome, measured: Outcome, key: str) -> float:
    return predicted.quantities[key] / measured.quantities[key] - 1.0


if __name__ == "__main__":
    sys.exit(main())
