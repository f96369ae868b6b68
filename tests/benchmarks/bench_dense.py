"""Step times of a dense model through the runner, against the floor that memory bandwidth sets. SmolLM2-135M in bf16 by default.

    python -m tests.benchmarks.bench_dense [--model smollm2-135m] [--sequences 1,16] [--prompt 64] [--new-tokens 128]

The floor of a decode step is (weight bytes + KV bytes of the attended tokens) / read bandwidth, measured here by reducing a
buffer larger than any cache, between the runs, so that a machine that slows down is seen. The median is reported with the 10th
and 90th percentile; on a busy machine the spread says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch

from engine.core.cache_config import CacheConfig
from engine.core.counts import kv_bytes_per_token, step_weight_bytes
from engine.core.plan import PlanItem, RankPlan, SequenceStart
from engine.core.sampling import SamplingParams
from engine.core.specs import DenseSpec
from engine.model.dense import DenseModel
from engine.model.load import load_model
from engine.model.runner import Runner

BLOCK_SIZE = 128


@dataclass(frozen=True)
class Point:
    """Times in seconds. ``floor_share`` is floor over median: 1 would be a step that only waits for memory."""

    sequences: int
    prompt_tokens: int
    prefill_s: float
    prefill_tokens_per_s: float
    step_s: float
    step_p10_s: float
    step_p90_s: float
    tokens_per_s: float
    floor_s: float
    floor_share: float
    bandwidth_bytes_per_s: float


def read_bandwidth() -> float:
    """Bytes per second of the best of several reductions of 256 MiB."""
    buffer = torch.ones(64 << 20)
    best_s = float("inf")
    for _ in range(8):
        begin_s = time.perf_counter()
        buffer.amax()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return buffer.numel() * 4 / best_s


def run(model: DenseModel, sequences: int, prompt_tokens: int, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds of one prefill step with all prompts, and of each decode step. Greedy, random prompts."""
    context = prompt_tokens + new_tokens + 1
    blocks = -(-context // BLOCK_SIZE)
    runner = Runner(model, CacheConfig(blocks * sequences, BLOCK_SIZE, sequences, sequences * prompt_tokens, context))
    generator = torch.Generator().manual_seed(0)
    starts, items = [], []
    for index in range(sequences):
        prompt = torch.randint(0, model.spec.vocab_size, (prompt_tokens,), generator=generator).tolist()
        runner.register(index, prompt, SamplingParams(max_tokens=new_tokens), seed=index)
        starts.append(SequenceStart(index, index, 0, tuple(range(index * blocks, (index + 1) * blocks))))
        items.append(PlanItem(index, index, 0, prompt_tokens, 0, True))
    begin_s = time.perf_counter()
    runner.execute(0, RankPlan(starts=tuple(starts), items=tuple(items)))
    prefill_s = time.perf_counter() - begin_s
    steps_s = []
    for step in range(1, new_tokens):
        plan = RankPlan(items=tuple(PlanItem(index, index, prompt_tokens + step - 1, 1, 0, True) for index in range(sequences)))
        begin_s = time.perf_counter()
        runner.execute(step, plan)
        steps_s.append(time.perf_counter() - begin_s)
    return prefill_s, steps_s


def measure(model: DenseModel, sequences: int, prompt_tokens: int, new_tokens: int) -> Point:
    run(model, sequences, prompt_tokens, 8)  # warm: oneDNN compiles its kernels per shape
    bandwidth = read_bandwidth()
    prefill_s, steps_s = run(model, sequences, prompt_tokens, new_tokens)
    step_s = statistics.median(steps_s)
    deciles = statistics.quantiles(steps_s, n=10)
    floor_s = floor_bytes(model.spec, sequences, prompt_tokens + new_tokens // 2, model.dtype.itemsize) / bandwidth
    return Point(
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        prefill_s=prefill_s,
        prefill_tokens_per_s=sequences * prompt_tokens / prefill_s,
        step_s=step_s,
        step_p10_s=deciles[0],
        step_p90_s=deciles[-1],
        tokens_per_s=sequences / step_s,
        floor_s=floor_s,
        floor_share=floor_s / step_s,
        bandwidth_bytes_per_s=bandwidth,
    )


def floor_bytes(spec: DenseSpec, sequences: int, context_tokens: int, element_bytes: int) -> float:
    """Bytes a decode step cannot avoid reading: every weight (of routed experts the touched ones; of a table its rows), and the KV."""
    return step_weight_bytes(spec, sequences, element_bytes) + sequences * context_tokens * kv_bytes_per_token(spec, element_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--sequences", default="1,16", help="comma-separated numbers of sequences")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of a sequence")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill", default="4x768", help="prompts x tokens of the prefill measurement")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = load_model(arguments.model, dtype=getattr(torch, arguments.dtype)).model
    assert isinstance(model, DenseModel), "this benchmark is for the dense family"
    points = [measure(model, int(count), arguments.prompt, arguments.new_tokens) for count in arguments.sequences.split(",")]
    count, tokens = (int(part) for part in arguments.prefill.split("x"))
    points.append(measure(model, count, tokens, 16))
    if arguments.json:
        print(json.dumps({"model": model.spec.name, "threads": torch.get_num_threads(), "points": [asdict(point) for point in points]}))
        return
    print(f"{model.spec.name} {arguments.dtype}, {torch.get_num_threads()} threads")
    for point in points:
        print(
            f"{point.sequences:3d} x {point.prompt_tokens:4d}: prefill {point.prefill_tokens_per_s:.0f} tok/s | "
            f"step {point.step_s * 1e3:.2f} ms (p10 {point.step_p10_s * 1e3:.2f}, p90 {point.step_p90_s * 1e3:.2f}) = "
            f"{point.tokens_per_s:.1f} tok/s | floor {point.floor_s * 1e3:.2f} ms at {point.bandwidth_bytes_per_s / 1e9:.1f} GB/s, "
            f"share {point.floor_share:.0%}"
        )


if __name__ == "__main__":
    main()
