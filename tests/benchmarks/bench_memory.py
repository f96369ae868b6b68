"""Predicted against resident memory of a worker: what ``twinfer model show`` says, and what the process grows by.

    python -m tests.benchmarks.bench_memory MODEL [--max-total-tokens N]

One process loads the model, fills the whole KV pool through prompts, and reports the growth of its resident set since before the load
(VmRSS) and at the peak (VmHWM; loading holds one tensor twice for a moment). Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from engine.config import ENGINE_OPTIONS
from engine.core.plan import PlanItem, RankPlan, SequenceStart
from engine.core.sampling import SamplingParams
from engine.launch import Launch, open_model, plan_launch
from engine.options import resolve


def resident_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def launch_for(model: str, max_total_tokens: int) -> Launch:
    flags = {"max_total_tokens": max_total_tokens, "max_running_requests": 8}
    return plan_launch(resolve(ENGINE_OPTIONS, flags, {}, None), open_model(model).spec, model)


def child(model: str, max_total_tokens: int) -> None:
    import torch

    from engine.model.build import build_runner

    launch = launch_for(model, max_total_tokens)
    torch.nn.functional.linear(torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))  # its own set-up
    before = resident_bytes("VmRSS")
    runner = build_runner(launch.config.workers[0])
    cache = launch.config.scheduler.cache
    per_sequence = min(cache.max_blocks_per_sequence, cache.num_blocks)
    step = 0
    for number in range(cache.num_blocks // per_sequence):
        length = per_sequence * cache.block_size - 1
        blocks = tuple(range(number * per_sequence, (number + 1) * per_sequence))
        runner.register(number, [3] * length, SamplingParams(), 0)
        starts: tuple[SequenceStart, ...] = (SequenceStart(0, number, 0, blocks),)
        done = 0
        while done < length:
            new = min(512, length - done)
            runner.execute(step, RankPlan(starts=starts, items=(PlanItem(0, number, done, new, 0, done + new == length),)))
            done, step, starts = done + new, step + 1, ()
    print(
        json.dumps(
            {
                "reported": runner.weight_bytes + runner.cache_bytes,
                "grown": resident_bytes("VmRSS") - before,
                "peak": resident_bytes("VmHWM") - before,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--max-total-tokens", type=int, default=4096)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.model, arguments.max_total_tokens)
        return
    command = [sys.executable, "-m", "tests.benchmarks.bench_memory", arguments.model, "--child"]
    done = subprocess.run([*command, "--max-total-tokens", str(arguments.max_total_tokens)], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    predicted = launch_for(arguments.model, arguments.max_total_tokens).memory.total_bytes
    shares = {f"{name}_over_predicted": value / predicted for name, value in measured.items()}
    print(json.dumps({"model": arguments.model, "predicted": predicted, **measured, **shares}, indent=1))


if __name__ == "__main__":
    main()
