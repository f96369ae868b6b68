"""Qwen3-MoE in the core: tensors, counts and layouts, against the published model's figures and counts by name."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from engine.core.counts import active_parameters, count_parameters, gemm_flops, step_weight_bytes, touched_experts, weight_bytes
from engine.core.errors import ConfigError
from engine.core.layout import parse_layout
from engine.core.model_config import model_spec
from engine.core.specs import DenseSpec, ModelSpec, MoeSpec
from engine.core.tensors import FP32, TensorSpec, expected_tensors
from tests.core.test_counts import flash
from tests.core.test_tensors import dense_spec, load_spec

# Qwen3-30B-A3B's config.json (Qwen/Qwen3-30B-A3B, Apache-2.0); its card says 30.5 B parameters, 29.9 B without embeddings, 3.3 B active.
A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MOE = MoeSpec(num_experts=6, experts_per_token=2, intermediate_size=20, normalise_weights=True, layer_ids=(1,))


def a3b() -> DenseSpec:
    spec = model_spec(A3B, "a3b")
    assert isinstance(spec, DenseSpec)
    return spec


def test_the_published_sizes() -> None:
    counts = count_parameters(a3b())
    assert counts.total == pytest.approx(30.5e9, abs=0.05e9)
    assert counts.total - counts.by_group["embedding"] - counts.by_group["lm_head"] == pytest.approx(29.9e9, abs=0.05e9)
    # The card counts the embedding row table as active.
    assert active_parameters(a3b()) + counts.by_group["embedding"] == pytest.approx(3.3e9, abs=0.06e9)


def test_tensors_of_a_mixed_model() -> None:
    names = expected_tensors(dense_spec(moe=MOE))
    assert names["model.layers.0.mlp.gate_proj.weight"].shape == (48, 32)
    assert names["model.layers.1.mlp.gate.weight"].shape == (6, 32)
    assert names["model.layers.1.mlp.experts.5.up_proj.weight"].shape == (20, 32)
    assert names["model.layers.1.mlp.experts.0.down_proj.weight"].shape == (32, 20)
    assert "model.layers.1.mlp.gate_proj.weight" not in names
    assert "model.layers.0.mlp.gate.weight" not in names
    assert "model.layers.1.mlp.experts.6.up_proj.weight" not in names


def test_counts_by_hand() -> None:
    spec = dense_spec(moe=MOE)
    groups = count_parameters(spec).by_group
    assert groups["routed_experts"] == 6 * 3 * 32 * 20
    assert groups["router"] == 6 * 32
    assert groups["dense_ffn"] == 3 * 32 * 48
    attention = 2 * 32 * 32 + 2 * 32 * 16
    assert gemm_flops(spec).layers == (2 * (attention + 3 * 32 * 48), 2 * (attention + 6 * 32 + 2 * 3 * 32 * 20))


def test_touched_experts_against_draws() -> None:
    draw = random.Random(0)
    for tokens in (1, 4, 30):
        trials = [len({e for _ in range(tokens) for e in draw.sample(range(32), 4)}) for _ in range(4000)]
        assert touched_experts(32, 4, tokens) == pytest.approx(sum(trials) / len(trials), abs=0.1)
    assert touched_experts(32, 4, 1) == pytest.approx(4)
    assert touched_experts(32, 4, 0) == 0


def _bytes_of_one_token(spec: ModelSpec, chosen: int, rows: dict[str, int]) -> int:
    """A count by name: expert 0 .. chosen - 1 stand for the chosen ones; of the tables in ``rows`` (first match) so many rows."""

    def read(name: str, tensor: TensorSpec) -> int:
        if name.startswith("mtp."):
            return 0
        if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= chosen:
            return 0
        count = next((count for text, count in rows.items() if name.endswith(text)), tensor.shape[0])
        elements = tensor.num_elements // tensor.shape[0] * count
        return elements * (4 if tensor.kind == FP32 else 2)

    return sum(read(name, tensor) for name, tensor in expected_tensors(spec).items())


@pytest.mark.parametrize(
    ("spec", "chosen", "rows"),
    [
        (a3b(), 8, {"embed_tokens.weight": 1}),
        (dense_spec(moe=MOE), 2, {}),  # tied: the table is the head
        (dense_spec(tie_word_embeddings=False), 0, {"embed_tokens.weight": 1}),
        (flash(), 6, {"engram.embed.weight": 24, "embed.weight": 1}),  # 3 orders of 8 heads
    ],
    ids=["a3b", "mixed-tied", "dense", "flash"],
)
def test_bytes_that_one_token_reads(spec: ModelSpec, chosen: int, rows: dict[str, int]) -> None:
    expected = _bytes_of_one_token(spec, chosen, rows)
    assert step_weight_bytes(spec, 1) == pytest.approx(expected, rel=1e-12)


def test_a_large_step_reads_everything_but_the_draft_once() -> None:
    spec = load_spec("v41_engram")
    assert step_weight_bytes(spec, 10_000, 4) == pytest.approx(weight_bytes(spec, 4))
    assert step_weight_bytes(a3b(), 1 << 20) == pytest.approx(weight_bytes(a3b(), 2))
    sizes = [step_weight_bytes(a3b(), tokens) for tokens in (1, 2, 8, 64)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.12 * weight_bytes(a3b(), 2)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tp1dp8ep8", None),
        ("tp4dp2ep2", None),
        ("tp1dp3ep3", "num_experts 128 of a3b is not a multiple of ep = 3"),
        ("tp1dp5ep1", "moe_intermediate_size 768 of a3b is not a multiple of tp*dp/ep = 5"),
        ("tp64dp1ep64", "num_attention_heads 32"),
    ],
)
def test_layouts(layout: str, reason: str | None) -> None:
    if reason is None:
        parse_layout(layout).validate_for(a3b())
        return
    with pytest.raises(ConfigError) as caught:
        parse_layout(layout).validate_for(a3b())
    assert reason in str(caught.value)


def test_layouts_of_a_mixed_model_divide_both_widths() -> None:
    spec = dense_spec(moe=MOE, num_heads=8, num_kv_heads=8, intermediate_size=50)
    with pytest.raises(ConfigError, match="intermediate_size 50 of dense is not a multiple of tp = 4"):
        parse_layout("tp4dp1ep1").validate_for(spec)
    parse_layout("tp4dp1ep1").validate_for(msgspec.structs.replace(spec, intermediate_size=52))
