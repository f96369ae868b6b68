"""Unusable logits in one row: its request ends, the others say what they say alone, and nothing it left in memory reaches anybody."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from engine.core.specs import DenseSpec
from engine.model.base import ForwardOutput, Model
from engine.model.batch import ForwardBatch
from engine.model.dense import DenseModel
from engine.model.dense_cache import DenseCache
from engine.model.load import RandomWeights
from engine.model.runner import Runner
from tests.model.engine_harness import Engine, Finished, random_v41, small_v41_spec

NEW = 14
VICTIM = 23  # a request with this token in its prompt goes wrong


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def model_of(kind: str) -> Model:
    if kind == "v41":
        return random_v41(small_v41_spec())
    spec = DenseSpec(
        name="small", architecture="llama", vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, rope_theta=10_000.0, rope_scaling=None, max_positions=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
        attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, bos_token_id=None, eos_token_ids=(), pad_token_id=None,
    )  # fmt: skip
    return DenseModel(spec, RandomWeights(spec, 0), dtype=torch.float32, device=torch.device("cpu"))


class Poisoner:
    """Makes the logits of sequences that have ``VICTIM`` at position 0 NaN, and what they write to a dense cache too."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward = runner.model.forward
        self.count = 0
        monkeypatch.setattr(runner.model, "forward", self)

    def __call__(self, batch: ForwardBatch, cache: Any, *args: Any) -> ForwardOutput:
        output = self._forward(batch, cache, *args)
        is_victim_B = batch.token_history_SL[batch.slots_B, 0] == VICTIM
        victim_T = is_victim_B[batch.seq_of_token_T]
        if isinstance(cache, DenseCache) and victim_T.any():
            rows = cache.write_rows(batch.kv_rows_T[victim_T])
            for layer in range(len(cache.layers())):
                cache.layer(layer).view(-1, cache.layer(layer).shape[-1])[rows] = torch.nan
        bad_R = victim_T[batch.logit_rows_R]
        self.count += int(bad_R.sum())
        output.logits_RV[bad_R] = torch.nan
        return output


def prompt(first: int, length: int = 30) -> list[int]:
    return [first, *[(first * 7 + index) % 200 + 30 for index in range(length - 1)]]


def alone(model: Model, first: int) -> list[int]:
    return Engine(model, overlap=False, prefix_caching=False).generate(prompt(first), max_tokens=NEW)


@pytest.mark.parametrize(("kind", "draft_tokens"), [("dense", 0), ("v41", 0), ("v41", 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_others_say_what_they_say_alone(kind: str, draft_tokens: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    expected = {first: alone(model, first) for first in (4, 5, 6, 7)}
    # Barely enough blocks, so that everything the victims held is soon somebody else's.
    engine = Engine(model, draft_tokens=draft_tokens, num_blocks=14, watermark_blocks=0, chunked_prefill_size=11)
    poisoner = Poisoner(engine.runner, monkeypatch)
    ids: dict[int, int] = {}
    victims = []
    for first in expected:
        victims += engine.submit(prompt(VICTIM, 40 + first), max_tokens=NEW, temperature=temperature, logprobs=1)
        ids[first] = engine.submit(prompt(first), max_tokens=NEW)[0]
    tokens = engine.run()
    assert poisoner.count >= len(victims)
    assert {first: tokens[ids[first]] for first in expected} == expected
    ends = {event.request: event for event in engine.of_kind(Finished)}
    assert all(ends[victim].reason == "error" for victim in victims)
    assert all("unusable" in ends[victim].message for victim in victims)
    assert not any(victim in tokens for victim in victims)
    again = engine.submit(prompt(4), max_tokens=NEW)[0]
    assert engine.run()[again] == expected[4]


@pytest.mark.parametrize("kind", ["dense", "v41"])
def test_forks_of_a_failed_prompt_fail_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    engine = Engine(model)
    Poisoner(engine.runner, monkeypatch)
    victims = engine.submit(prompt(VICTIM), n=3, max_tokens=NEW)
    other = engine.submit(prompt(4), max_tokens=NEW)[0]
    assert engine.run()[other] == alone(model, 4)
    assert sorted(event.request for event in engine.of_kind(Finished) if event.reason == "error") == victims
