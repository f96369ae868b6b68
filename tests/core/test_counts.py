"""Counts against the published numbers of DeepSeek-V4.1-Flash (vision left out) and a dense model by hand."""

from __future__ import annotations

import pytest

from engine.core.counts import (
    active_parameters,
    attention_flops,
    count_parameters,
    gemm_flops,
    kv_bytes_per_token,
    native_kv_format,
    plain_kv_format,
    sequence_bytes,
    weight_bytes,
)
from engine.core.specs import DSparkSpec, EngramSpec, V41Spec
from tests.core.test_tensors import dense_spec

VISION_PARAMETERS = 0.49e9  # not in this release


def flash() -> V41Spec:
    return V41Spec(
        name="v4.1-flash", vocab_size=129_280, hidden_size=5120, num_layers=40, num_heads=64, head_dim=512, rope_dim=64, q_lora_rank=1280,
        o_lora_rank=1024, o_groups=8, sliding_window=128, compress_ratios=(0, 0, *[2] * 18, *[1] * 20), kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36), index_num_heads=32, index_head_dim=128, index_top_k=512,
        candidate_source_layer_id=20, candidate_top_k_blocks=2048, candidate_block_size=8, rope_theta=1e4, compress_rope_theta=1.6e5,
        rope_scaling=None, max_positions=1 << 20, rms_norm_eps=1e-20, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, num_experts=384,
        experts_per_token=6, num_shared_experts=1, moe_intermediate_size=2304, routed_scaling_factor=1.5, swiglu_limit=10.0,
        engram=EngramSpec((1, 14), (384_006_168, 384_016_682), 4, 8, 256, 16_000_000, 2, 99_092),
        dspark=DSparkSpec(3, 5, (37, 38, 39), 256, 128_799, 128, 3), bos_token_id=0, eos_token_ids=(1,), pad_token_id=2,
        image_token_id=129_264,
    )  # fmt: skip


@pytest.fixture(scope="module")
def spec() -> V41Spec:
    spec = flash()
    spec.validate()
    return spec


def test_parameters(spec: V41Spec) -> None:
    counts = count_parameters(spec)
    assert counts.total == sum(counts.by_group.values())
    assert counts.total + VISION_PARAMETERS == pytest.approx(763.2e9, abs=0.05e9)
    published = {
        "routed_experts": 543.58e9, "engram_tables": 196.61e9, "draft": 14.23e9, "attention": 5.06e9, "shared_experts": 1.42e9,
        "engram_projection": 0.31e9, "router": 0.08e9, "mhc": 0.04e9, "indexer": 0.04e9, "compressor": 0.02e9,
    }  # fmt: skip
    for group, number in published.items():
        assert counts.by_group[group] == pytest.approx(number, abs=0.0051e9), group
    assert counts.by_group["embedding"] + counts.by_group["lm_head"] == pytest.approx(1.32e9, abs=0.005e9)


def test_gemm_flops(spec: V41Spec) -> None:
    flops = gemm_flops(spec)
    assert sum(flops.layers[:20]) / 1e9 == pytest.approx(15.79, abs=0.005)
    assert sum(flops.layers[20:]) / 1e9 == pytest.approx(15.15, abs=0.005)
    assert flops.lm_head / 1e9 == pytest.approx(1.3238, abs=0.0001)
    assert flops.total / 1e9 == pytest.approx(32.26, abs=0.005)
    assert active_parameters(spec) == pytest.approx(16.13e9, abs=0.005e9)


def test_attention_flops(spec: V41Spec) -> None:
    core = 0.67e9 + 2.55e9
    for context, index in ((4096, 0.21e9), (32768, 1.21e9), (131072, 3.22e9), (1 << 20, 22.0e9)):
        assert attention_flops(spec, context) == pytest.approx(core + index, abs=0.03e9), context


def test_kv_bytes(spec: V41Spec) -> None:
    native = native_kv_format(spec)
    assert (native.window_row_bytes, native.compressed_row_bytes, native.index_key_bytes) == (528, 288, 68)
    assert kv_bytes_per_token(spec, kv_format=native) == 890
    assert sequence_bytes(spec, kv_format=native, with_draft=False, state_rows=0) == 2_703_360
    assert sequence_bytes(spec, kv_format=native, state_rows=0) == 2_906_112
    assert sequence_bytes(spec, kv_format=native, slack_rows=6, state_rows=0) == 3_042_336
    assert sequence_bytes(spec, kv_format=native, state_rows=7) - sequence_bytes(spec, kv_format=native, state_rows=0) == 86_016
    assert plain_kv_format(spec, 2).index_key_bytes == 256


def test_dense() -> None:
    spec = dense_spec()
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 8 + 2 * 32
    counts = count_parameters(spec)
    assert counts.total == 2 * layer + 100 * 32 + 32
    assert counts.by_group["dense_ffn"] == 2 * 3 * 32 * 48
    assert weight_bytes(spec, 2) == 2 * counts.total
    assert kv_bytes_per_token(spec, 2) == 2 * 2 * 2 * 8 * 2
    assert sequence_bytes(spec) == 0
    assert gemm_flops(spec).lm_head == 2 * 32 * 100
    assert attention_flops(spec, 10) == 4 * 32 * 10 * 2
