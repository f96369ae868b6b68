"""From the dict of a config.json to a ModelSpec, with one clear ConfigError for whatever is missing, foreign or out of range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError
from engine.core.specs import DenseSpec, DSparkSpec, EngramSpec, ModelSpec, MoeSpec, RopeScaling, V41Spec

QWEN3_MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", QWEN3_MOE_ARCHITECTURE)
V41_ARCHITECTURE = "DeepseekV41ForCausalLM"
MAX_DIMENSION = 1 << 24  # no tensor side of a real model comes near it; stops absurd allocations at the door
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 18  # of all layers together; each is three named tensors, and the largest models have some 20,000
MAX_ROWS = 1 << 40


class _Reader:
    """Typed, bounded access to one JSON object; every refusal names the key, the value and what is allowed."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def refuse(self, key: str, allowed: str) -> ConfigError:
        if key not in self.values:
            return ConfigError(f"{self.where}: {key} is missing; needed: {allowed}")
        return ConfigError(f"{self.where}: {key} is {self.values[key]!r}; allowed: {allowed}")

    def integer(self, key: str, low: int = 1, high: int = MAX_DIMENSION, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, low: int = 0, high: int = MAX_DIMENSION) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, low, high)

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN fails the comparison
            raise self.refuse(key, f"a number from {low} to {high}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def integers(self, key: str, low: int, high: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self.values.get(key, default)
        if not isinstance(value, (list, tuple)) or len(value) > MAX_LAYERS:
            raise self.refuse(key, f"a list of at most {MAX_LAYERS} integers")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int) or not low <= entry <= high:
                raise self.refuse(key, f"integers from {low} to {high}")
        return tuple(value)

    def fixed(self, key: str, expected: object) -> None:
        """A switch this project implements in one position only; absent means that position."""
        if self.values.get(key, expected) != expected:
            raise self.refuse(key, repr(expected))

    def experts(self, key: str, layers: int) -> int:
        """Experts of one of ``layers`` layers."""
        return self.integer(key, 1, MAX_EXPERTS // layers)

    def child(self, key: str) -> _Reader:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return _Reader(value, f"{self.where}: {key}")


def model_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Build and validate the spec of a model folder's config.json. ``name`` is what the spec (and errors) call the model."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}/config.json: not a JSON object")
    reader = _Reader(config, f"{name}/config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, (list, tuple)) or len(architectures) != 1:
        raise reader.refuse("architectures", "a list with one name")
    if config.get("quantization_config") is not None:
        raise ConfigError(f"{reader.where}: quantization_config is set; quantised checkpoints are not supported yet, convert to bf16")
    architecture = architectures[0]
    spec: ModelSpec
    if architecture == V41_ARCHITECTURE:
        spec = _v41_spec(reader, name)
    elif architecture in DENSE_ARCHITECTURES:
        spec = _dense_spec(reader, name, architecture)
    else:
        known = ", ".join((V41_ARCHITECTURE, *DENSE_ARCHITECTURES))
        raise ConfigError(f"{reader.where}: architecture {architecture!r} is unknown; known: {known}")
    spec.validate()
    return spec


def _eos(reader: _Reader) -> tuple[int, ...]:
    value = reader.values.get("eos_token_id")
    if isinstance(value, (list, tuple)):
        return reader.integers("eos_token_id", 0, MAX_DIMENSION)
    return () if value is None else (reader.integer("eos_token_id", 0),)


def _rope_scaling(reader: _Reader, max_positions: int) -> RopeScaling | None:
    key = "rope_scaling" if reader.values.get("rope_scaling") is not None else "rope_parameters"
    if reader.values.get(key) is None:
        return None
    scaling = reader.child(key)
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("yarn", "llama3", "linear"):
        raise ConfigError(f"{scaling.where}: rope_type is {kind!r}; allowed: default, linear, llama3, yarn")
    factor = scaling.real("factor", 1.0, 1e6)
    attention_factor = 1.0
    if kind == "yarn" and reader.values.get("model_type", "") not in ("deepseek_v41_text", "deepseek_v41"):
        # YaRN's published temperature (arXiv 2309.00071, eq. 22); V4.1 has none.
        attention_factor = scaling.real("attention_factor", 1e-3, 1e3, 0.1 * math.log(factor) + 1.0)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_positions=scaling.integer("original_max_position_embeddings", 1, 1 << 30, default=max_positions),
        beta_fast=scaling.real("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=scaling.real("beta_slow", 1e-3, 1e6, 1.0),
        low_freq_factor=scaling.real("low_freq_factor", 1e-3, 1e6, 1.0),
        high_freq_factor=scaling.real("high_freq_factor", 1e-3, 1e6, 4.0),
        attention_factor=attention_factor,
    )


def _rope_theta(reader: _Reader) -> float:
    if "rope_theta" not in reader.values and isinstance(reader.values.get("rope_parameters"), Mapping):
        return reader.child("rope_parameters").real("rope_theta", 1.0, 1e12)
    return reader.real("rope_theta", 1.0, 1e12, 10_000.0)


def _dense_spec(reader: _Reader, name: str, architecture: str) -> DenseSpec:
    qwen2 = architecture == "Qwen2ForCausalLM"
    hidden = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    if reader.values.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"{reader.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is missing")
    reader.fixed("hidden_act", "silu")
    if reader.values.get("use_sliding_window"):
        raise reader.refuse("use_sliding_window", "false")
    attention_bias = reader.boolean("attention_bias", qwen2)
    max_positions = reader.integer("max_position_embeddings", 1, 1 << 30)
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    return DenseSpec(
        name=name,
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", default=heads),
        head_dim=reader.integer("head_dim", default=hidden // heads) if reader.values.get("head_dim") else hidden // heads,
        intermediate_size=reader.integer("intermediate_size"),
        rope_theta=_rope_theta(reader),
        rope_scaling=_rope_scaling(reader, max_positions),
        max_positions=max_positions,
        rms_norm_eps=reader.real("rms_norm_eps", 0.0, 1.0),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias or qwen2,
        output_bias=attention_bias and not qwen2,
        mlp_bias=reader.boolean("mlp_bias", False),
        qk_norm=architecture in ("Qwen3ForCausalLM", QWEN3_MOE_ARCHITECTURE),
        bos_token_id=reader.optional_integer("bos_token_id"),
        eos_token_ids=_eos(reader),
        pad_token_id=reader.optional_integer("pad_token_id"),
        moe=_moe_spec(reader, layers) if architecture == QWEN3_MOE_ARCHITECTURE else None,
    )


def _moe_spec(reader: _Reader, layers: int) -> MoeSpec | None:
    """None where no layer has experts: every ``decoder_sparse_step``-th layer has them, but for ``mlp_only_layers``."""
    step = reader.integer("decoder_sparse_step", 1, MAX_DIMENSION, 1)
    plain = () if reader.values.get("mlp_only_layers") is None else reader.integers("mlp_only_layers", 0, layers - 1)
    moe = MoeSpec(
        num_experts=reader.experts("num_experts", layers),
        experts_per_token=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        normalise_weights=reader.boolean("norm_topk_prob", False),
        layer_ids=tuple(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in plain),
    )
    return moe if moe.layer_ids else None


def _v41_spec(top: _Reader, name: str) -> V41Spec:
    reader = top.child("text_config") if "text_config" in top.values else top
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    last = layers - 1
    for key, expected in (
        ("hidden_act", "silu"), ("num_key_value_heads", 1), ("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True), ("tie_word_embeddings", False), ("hc_shifted", True),
    ):  # fmt: skip
        reader.fixed(key, expected)
    max_positions = reader.integer("max_position_embeddings", 1, 1 << 30)
    candidate = reader.optional_integer("candidate_source_layer_id", 0, last)
    engram_layers = reader.integers("engram_layer_ids", 0, last, ())
    return V41Spec(
        name=name,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        num_layers=layers,
        num_heads=reader.integer("num_attention_heads"),
        head_dim=reader.integer("head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim"),
        q_lora_rank=reader.integer("q_lora_rank"),
        o_lora_rank=reader.integer("o_lora_rank"),
        o_groups=reader.integer("o_groups"),
        sliding_window=reader.integer("sliding_window"),
        compress_ratios=reader.integers("compress_ratios", 0, 128)[:layers],
        kv_source_layer_ids=reader.integers("kv_source_layer_ids", 0, last, ()),
        index_source_layer_ids=reader.integers("index_source_layer_ids", 0, last, ()),
        index_num_heads=reader.integer("index_n_heads"),
        index_head_dim=reader.integer("index_head_dim"),
        index_top_k=reader.integer("index_topk"),
        candidate_source_layer_id=candidate,
        candidate_top_k_blocks=0 if candidate is None else reader.integer("candidate_topk_blocks"),
        candidate_block_size=1 if candidate is None else reader.integer("candidate_block_size"),
        rope_theta=_rope_theta(reader),
        compress_rope_theta=reader.real("compress_rope_theta", 1.0, 1e12),
        rope_scaling=_rope_scaling(reader, max_positions),
        max_positions=max_positions,
        rms_norm_eps=reader.real("rms_norm_eps", 0.0, 1.0),
        hc_mult=reader.integer("hc_mult", 1, 64),
        hc_sinkhorn_iters=reader.integer("hc_sinkhorn_iters", 1, 1000),
        hc_eps=reader.real("hc_eps", 0.0, 1.0),
        num_experts=reader.experts("n_routed_experts", layers),
        experts_per_token=reader.integer("num_experts_per_tok"),
        num_shared_experts=reader.integer("n_shared_experts", 0, 64),
        moe_intermediate_size=reader.integer("moe_intermediate_size"),
        routed_scaling_factor=reader.real("routed_scaling_factor", 0.0, 1e6, 1.0),
        swiglu_limit=reader.real("swiglu_limit", 0.0, 1e6),
        engram=_engram_spec(reader, engram_layers) if engram_layers else None,
        dspark=_dspark_spec(reader, last) if reader.integer("num_nextn_predict_layers", 0, 64, 0) else None,
        bos_token_id=top.integer("bos_token_id", 0),
        eos_token_ids=_eos(top),
        pad_token_id=top.integer("pad_token_id", 0),
        image_token_id=top.optional_integer("image_token_id", 0),
    )


def _engram_spec(reader: _Reader, layer_ids: tuple[int, ...]) -> EngramSpec:
    rows = reader.integers("engram_num_embeddings", 1, MAX_ROWS)
    if len(rows) != len(layer_ids):
        raise ConfigError(f"{reader.where}: engram_num_embeddings has {len(rows)} entries for {len(layer_ids)} engram_layer_ids")
    return EngramSpec(
        layer_ids=layer_ids,
        num_rows=rows,
        max_ngram=reader.integer("engram_max_ngram_size", 2, 16),
        heads_per_order=reader.integer("engram_n_heads", 1, 256),
        head_dim=reader.integer("engram_head_dim"),
        prime_search_start=reader.integer("engram_vocab_size", 2, MAX_ROWS),
        pad_token_id=reader.integer("engram_pad_token_id", 0),
        num_classes=reader.integer("engram_compressed_vocab_size"),
    )


def _dspark_spec(reader: _Reader, last: int) -> DSparkSpec:
    return DSparkSpec(
        num_layers=reader.integer("num_nextn_predict_layers", 1, 64),
        block_size=reader.integer("dspark_block_size", 1, 64),
        target_layer_ids=reader.integers("dspark_target_layer_ids", 0, last),
        markov_rank=reader.integer("dspark_markov_rank"),
        noise_token_id=reader.integer("dspark_noise_token_id", 0),
        num_experts=reader.experts("dspark_n_routed_experts", reader.integer("num_nextn_predict_layers", 1, 64)),
        experts_per_token=reader.integer("dspark_num_experts_per_tok"),
    )
