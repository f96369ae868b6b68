"""twinfer and its peers on the same prompts, interleaved in one run, so that a machine that drifts drifts for all of them.

    python -m tests.benchmarks.bench_peers MODEL_DIR --vllm-python PATH --transformers-python PATH [--rounds 5]

Each engine lives in its own process with its own Python and loads the model once (bf16, greedy, no prefix caching); rounds visit
the engines in turn. A case runs twice, with one new token and with n, so that decode and prefill are told apart:
decode tokens/s = sequences * (n - 1) / (t(n) - t(1)), prefill tokens/s = prompt tokens / t(1). Medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Each peer reads {"prompts": [[id]], "new_tokens": n} lines and answers "RESULT <seconds>", after one warm-up of its own.
_SERVE = """
import json, sys, time
def serve(generate):
    print("RESULT 0", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        counts = generate(job["prompts"], job["new_tokens"])
        seconds = time.perf_counter() - begin
        assert counts == [job["new_tokens"]] * len(job["prompts"]), counts
        print("RESULT", seconds, flush=True)
"""
_VLLM = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, max_num_seqs=16)
    def generate(prompts, n):
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
    serve(generate)
"""
_TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
def generate(prompts, n):
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
    return [out.shape[1] - ids.shape[1]] * len(prompts)
serve(generate)
"""
_RUNNER = """
from engine.core.cache_config import CacheConfig
from engine.core.plan import PlanItem, RankPlan, SequenceStart
from engine.core.sampling import SamplingParams
from engine.model.load import load_model
from engine.model.runner import Runner
model = load_model(sys.argv[1]).model
def generate(prompts, n):
    context = max(map(len, prompts)) + n
    blocks = -(-context // 128)
    runner = Runner(model, CacheConfig(blocks * len(prompts), 128, len(prompts), sum(map(len, prompts)), context))
    for index, prompt in enumerate(prompts):
        runner.register(index, prompt, SamplingParams(max_tokens=n), index)
    starts = tuple(SequenceStart(i, i, 0, tuple(range(i * blocks, (i + 1) * blocks))) for i in range(len(prompts)))
    items = tuple(PlanItem(i, i, 0, len(prompt), 0, True) for i, prompt in enumerate(prompts))
    counts = [len(item.tokens) for item in runner.execute(0, RankPlan(starts=starts, items=items)).items]
    for step in range(1, n):
        items = tuple(PlanItem(i, i, len(prompt) + step - 1, 1, 0, True) for i, prompt in enumerate(prompts))
        for i, item in enumerate(runner.execute(step, RankPlan(items=items)).items):
            counts[i] += len(item.tokens)
    return counts
serve(generate)
"""
# The whole engine, actors and worker process included, as the command line starts it.
_ENGINE = """
import trio
from engine.actors.gateway import Generation
from engine.actors.supervisor import open_engine
from engine.config import ENGINE_OPTIONS
from engine.core.sampling import SamplingParams
from engine.launch import open_model, plan_launch
from engine.options import resolve
async def main():
    flags = {"disable_radix_cache": True, "max_num_batched_tokens": 4096, "max_running_requests": 16}
    launch = plan_launch(resolve(ENGINE_OPTIONS, flags, {}, None), open_model(sys.argv[1]).spec, sys.argv[1])
    async with open_engine(launch.config) as engine:
        print("RESULT 0", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            job = json.loads(line)
            params = SamplingParams(max_tokens=job["new_tokens"], ignore_eos=True)
            counts = []
            async def complete(prompt):
                completion = await engine.complete(Generation(prompt=tuple(prompt), params=params))
                counts.append(len(completion.samples[0].token_ids))
            begin = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for prompt in job["prompts"]:
                    nursery.start_soon(complete, prompt)
            seconds = time.perf_counter() - begin
            assert counts == [job["new_tokens"]] * len(job["prompts"]), counts
            print("RESULT", seconds, flush=True)
trio.run(main)
"""


@dataclass(frozen=True)
class Case:
    sequences: int
    prompt_tokens: int
    new_tokens: int


CASES = (Case(1, 64, 96), Case(16, 64, 96), Case(4, 768, 2))


class Peer:
    """A process that generates on command."""

    def __init__(self, name: str, python: str, source: str, model: str) -> None:
        self.name = name
        # A file of its own, not -c: vLLM starts processes that import the main module again.
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / f"peer_{name}.py"  # not the name of a module it imports
        self._path.write_text(_SERVE + source, encoding="utf-8")
        self._log = (Path(self._folder.name) / "stderr").open("w+")
        self._process = subprocess.Popen(
            [python, str(self._path), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(python),
        )
        self._answer()

    def generate_s(self, prompts: list[list[int]], new_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # engines print banners too
            if line.startswith("RESULT "):
                return float(line.split()[1])
        code = self._process.wait()
        self._log.seek(0)
        raise RuntimeError(f"{self.name} ended with exit code {code} before it answered: {self._log.read()[-2000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()
        self._folder.cleanup()


def _environment(python: str) -> dict[str, str]:
    """The repository is on the path of our own Python alone: its names are common ones."""
    path = {"PYTHONPATH": str(Path(__file__).parents[2])} if python == sys.executable else {}
    return os.environ | path | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_KVCACHE_SPACE": "1"}


def prompts_of(case: Case, round_index: int) -> list[list[int]]:
    """Ordinary ids, different in every round, so that no engine can reuse a prefix."""
    source = random.Random(f"{case}{round_index}")
    return [[source.randrange(1000, 40_000) for _ in range(case.prompt_tokens)] for _ in range(case.sequences)]


def measure(engines: list[Any], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        times: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
        for round_index in range(-1, rounds):  # round -1 warms every engine for the case
            for engine in engines:
                prompts = prompts_of(case, round_index)
                first_s = engine.generate_s(prompts, 1)
                whole_s = engine.generate_s(prompts, case.new_tokens)
                if round_index >= 0:
                    times[engine.name].append((first_s, whole_s))
        for name, pairs in times.items():
            first_s = statistics.median(first for first, _ in pairs)
            decode_s = statistics.median(whole - first for first, whole in pairs)
            rows.append(
                {
                    "engine": name,
                    "sequences": case.sequences,
                    "prompt_tokens": case.prompt_tokens,
                    "prefill_tokens_per_s": case.sequences * case.prompt_tokens / first_s,
                    "decode_tokens_per_s": case.sequences * (case.new_tokens - 1) / decode_s if case.new_tokens > 8 else None,
                    "best_decode_tokens_per_s": case.sequences * (case.new_tokens - 1) / min(whole - first for first, whole in pairs)
                    if case.new_tokens > 8
                    else None,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", help="a model folder that every engine can read")
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--transformers-python", metavar="PATH")
    parser.add_argument(
        "--engine", choices=("whole", "runner", "both"), default="whole", help="twinfer with its actors, its runner alone, or both"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    engines: list[Any] = []
    try:
        if arguments.engine in ("whole", "both"):
            engines.append(Peer("twinfer", sys.executable, _ENGINE, arguments.model))
        if arguments.engine in ("runner", "both"):
            engines.append(Peer("runner", sys.executable, _RUNNER, arguments.model))
        if arguments.vllm_python:
            engines.append(Peer("vllm", arguments.vllm_python, _VLLM, arguments.model))
        if arguments.transformers_python:
            engines.append(Peer("transformers", arguments.transformers_python, _TRANSFORMERS, arguments.model))
        begin_s = time.perf_counter()
        rows = measure(engines, arguments.rounds)
        print(json.dumps({"rows": rows, "rounds": arguments.rounds, "wall_s": time.perf_counter() - begin_s}))
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
