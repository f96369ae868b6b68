"""Through the actors, a layout changes no token: layouts x models x drafts x Engram placement x redundant experts, in float32.

Each engine serves the same work: prompts of very different length all at once in a pool too small for them, so that somebody is preempted;
some of them again, which now hit the prefix cache; several samples of one prompt.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from engine.actors.gateway import CompletedSample, Completion, Gateway, Generation
from engine.actors.supervisor import open_engine
from engine.core.plan import TokenLogprobs
from engine.core.sampling import SamplingParams
from engine.launch import open_model
from tests.parallel.engines import engine_config

FIXTURES = Path(__file__).parents[1] / "fixtures"
BLOCK = 16
# A rank's pool holds the longest request and nothing else: any two of the others are admitted together and then grow too long for it.
LENGTHS = (1, 30, 100, 45)
NEW = 40
POOL_TOKENS = 144
AGAIN = (2, 2, 1, 1)  # prompts
FEW = 5
# Where the best two tokens are closer than this (natural log), sums in another order may choose the other one.
MARGIN = 1e-4
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 211, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

CASES: list[tuple[str, dict[str, Any]]] = [
    ("tiny-v41", {"layout": "tp1dp2ep2"}),
    ("tiny-v41", {"layout": "tp1dp2ep2", "draft_tokens": 3, "engram": "host", "redundant_experts": 2, "draft_redundant_experts": 4}),
    ("tiny-v41", {"layout": "tp1dp2ep1", "draft_tokens": 3, "engram": "replicated"}),
    ("tiny-v41", {"layout": "tp2dp1ep1", "draft_tokens": 3}),
    ("tiny-v41", {"layout": "tp2dp1ep2", "engram": "host", "redundant_experts": 4}),
    ("tiny-v41", {"layout": "tp2dp2ep4", "draft_tokens": 3, "redundant_experts": 4, "rank_policy": "prefix-aware"}),
    ("qwen3-moe", {"layout": "tp1dp2ep2", "redundant_experts": 2}),
    ("qwen3-moe", {"layout": "tp2dp2ep2"}),
    ("llama", {"layout": "tp2dp1ep1"}),
]


class Served(NamedTuple):
    """Completions in the order of the prompts: all at once, some again, two samples of one, two sampled at a temperature."""

    first: list[Completion]
    again: list[Completion]
    twins: Completion
    sampled: Completion


def prompt(length: int, vocab_size: int) -> tuple[int, ...]:
    draw = random.Random(length)
    return tuple(draw.randrange(100 if vocab_size > 1000 else 3, vocab_size) for _ in range(length))


async def serve(engine: Gateway, vocab_size: int) -> Served:
    prompts = [prompt(length, vocab_size) for length in LENGTHS]
    first: dict[int, Completion] = {}

    async def one(index: int) -> None:
        first[index] = await engine.complete(Generation(prompt=prompts[index], params=greedy(NEW)))

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(one, index)
            while engine.num_requests <= index:  # in this order, which decides who is preempted
                await trio.lowlevel.checkpoint()
    assert engine.stats().core.preemptions_total > 0
    again = []
    for index in AGAIN:  # the first of each pair fills the cache, wherever the preemptions have left it
        again.append(await engine.complete(Generation(prompt=prompts[index], params=greedy(FEW))))
    twins = await engine.complete(Generation(prompt=prompts[1], params=greedy(FEW), n=2))
    sampled = SamplingParams(max_tokens=FEW, ignore_eos=True, temperature=0.8, seed=5)
    return Served(
        [first[index] for index in range(len(prompts))],
        again,
        twins,
        await engine.complete(Generation(prompt=prompts[3], params=sampled, n=2)),
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2)


async def served_by(name: str, folder: Path, options: dict[str, Any]) -> Served:
    model, extra = name, {}
    if name == "qwen3-moe":
        model = str(FIXTURES / "qwen3_moe")
    elif name == "llama":
        (folder / "config.json").write_text(json.dumps(LLAMA))
        model, extra = str(folder), {"load_format": "random"}
    config = engine_config(
        model,
        dtype="float32",
        cache_rounding="off",
        block_size=BLOCK,
        max_total_tokens=POOL_TOKENS,
        max_running_requests=8,
        max_num_batched_tokens=64,
        **extra,
        **options,
    )
    async with open_engine(config) as engine:
        return await serve(engine, open_model(model).spec.vocab_size)


def settled(logprobs: tuple[TokenLogprobs, ...]) -> int:
    """How many tokens are chosen by more than the margin, up to the first that is not."""
    close = (index for index, entry in enumerate(logprobs) if entry.top_logprobs[0] - entry.top_logprobs[1] < MARGIN)
    return next(close, len(logprobs))


def assert_same(found: CompletedSample, expected: CompletedSample) -> int:
    """Compare as many tokens as there are and are settled; returns their number."""
    count = min(settled(expected.logprobs), len(found.token_ids))
    assert found.token_ids[:count] == expected.token_ids[:count]
    return count


@pytest.fixture(scope="module")
def witnesses() -> dict[str, Served]:
    return {}


def name_of(value: object) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("model", "options"), CASES, ids=name_of)
@pytest.mark.usefixtures("forked_workers")
async def test_the_tokens_are_those_of_one_rank(model: str, options: dict[str, Any], tmp_path: Path, witnesses: dict[str, Served]) -> None:
    if model not in witnesses:
        witnesses[model] = await served_by(model, tmp_path, {"layout": "tp1dp1ep1"})
    witness, found = witnesses[model], await served_by(model, tmp_path, options)
    expected = [completion.samples[0] for completion in witness.first]
    compared = sum(assert_same(got.samples[0], sample) for got, sample in zip(found.first, expected, strict=True))
    assert compared > 0.9 * NEW * len(LENGTHS)
    for got, index in zip(found.again, AGAIN, strict=True):
        assert_same(got.samples[0], expected[index])
    assert [completion.usage.cached_tokens for completion in found.again[1::2]] == [96, 16]
    for sample in found.twins.samples:
        assert_same(sample, expected[1])
    if not options.get("draft_tokens"):  # with drafts a request makes other draws
        assert [sample.token_ids for sample in found.sampled.samples] == [sample.token_ids for sample in witness.sampled.samples]
