"""The memory prediction against what models and caches really allocate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.memory import blocks_for, plan_memory
from engine.core.model_config import model_spec
from engine.core.specs import ModelSpec
from engine.model.base import Model
from engine.model.load import load_model
from tests.model.engine_harness import FIXTURES, random_v41, small_v41_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
CACHES = (
    CacheConfig(num_blocks=5, block_size=8, max_running=3, max_batched_tokens=16, context_length=64),
    CacheConfig(num_blocks=40, block_size=32, max_running=8, max_batched_tokens=100, context_length=512, max_draft_tokens=5, num_tails=7),
)


def load_random(config: dict[str, Any], dtype: str, folder: Path) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder, dtype=DTYPES[dtype], load_format="random").model


def assert_predicted(model: Model, cache: CacheConfig, dtype: str) -> None:
    plan = plan_memory(model.spec, cache, dtype)
    held = model.new_cache(cache).num_bytes()
    # A few rows more for zero and dump entries, which the prediction leaves out.
    assert plan.cache_bytes <= held <= plan.cache_bytes * 1.05 + 16384
    assert plan.weight_bytes <= model.num_bytes() <= plan.weight_bytes * 1.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
def test_dense(cache: CacheConfig, dtype: str, tmp_path: Path) -> None:
    cache = msgspec.structs.replace(cache, max_draft_tokens=0, num_tails=0)
    # Head sizes that the compiled CPU path takes, and that it leaves to torch.
    for changes in ({}, {"tie_word_embeddings": False}, {"num_attention_heads": 3, "num_key_value_heads": 1}):
        assert_predicted(load_random(LLAMA | changes, dtype, tmp_path), cache, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
def test_v41(cache: CacheConfig, dtype: str, tmp_path: Path) -> None:
    config = json.loads((FIXTURES / "v41_engram" / "config.json").read_text())
    config["text_config"] |= {
        "num_nextn_predict_layers": 2, "dspark_block_size": 5, "dspark_target_layer_ids": [7, 8], "dspark_markov_rank": 8,
        "dspark_noise_token_id": 3, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
    }  # fmt: skip
    assert_predicted(load_random(config, dtype, tmp_path), cache, dtype)


def test_a_budget_buys_what_it_pays_for() -> None:
    spec: ModelSpec = model_spec(LLAMA, "llama")
    cache = CACHES[0]
    plan = plan_memory(spec, cache, "bfloat16")
    for blocks in (1, 7):
        budget = plan.weight_bytes + plan.fixed_cache_bytes + blocks * plan.block_bytes
        assert blocks_for(spec, cache, "bfloat16", budget) == blocks
        assert blocks_for(spec, cache, "bfloat16", budget + plan.block_bytes - 1) == blocks
    with pytest.raises(ConfigError, match=rf"weights {plan.weight_bytes} B"):
        blocks_for(spec, cache, "bfloat16", plan.weight_bytes)


def test_the_random_harness_model_is_covered_too() -> None:
    assert_predicted(random_v41(small_v41_spec()), CACHES[1], "float32")
