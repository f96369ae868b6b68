"""The tensor table against the headers of the golden fixtures and a hand-written dense model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.core.model_config import model_spec
from engine.core.specs import DenseSpec, DSparkSpec, V41Spec
from engine.core.tensors import FP32, expected_tensors

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = ("v41_csa2_plain", "v41_csa2_cacheround", "v41_engram", "v41_ragged_greedy")


def safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def load_spec(case: str) -> V41Spec:
    spec = model_spec(json.loads((FIXTURES / case / "config.json").read_text()), case)
    assert isinstance(spec, V41Spec)
    return spec


@pytest.mark.parametrize("case", CASES)
def test_names_shapes_and_dtypes_are_those_of_the_checkpoint(case: str) -> None:
    header = safetensors_header(FIXTURES / case / "model.safetensors")
    expected = expected_tensors(load_spec(case))
    assert set(expected) == set(header)
    for name, tensor in expected.items():
        assert list(tensor.shape) == header[name]["shape"], name
        assert (header[name]["dtype"] == "F32") == (tensor.kind == FP32), name


def test_draft_head_tensors() -> None:
    spec = msgspec.structs.replace(load_spec("v41_engram"), dspark=DSparkSpec(3, 5, (6, 7, 8), 12, 250, 4, 2))
    draft = {name: tensor for name, tensor in expected_tensors(spec).items() if name.startswith("mtp.")}
    assert draft["mtp.0.main_proj.weight"].shape == (64, 3 * 64)
    assert draft["mtp.0.main_norm.weight"].shape == (64,)
    assert draft["mtp.2.norm.weight"].shape == (64,)
    assert draft["mtp.2.markov_head.embed.weight"].shape == (256, 12)
    assert draft["mtp.2.markov_head.head.weight"].shape == (256, 12)
    assert draft["mtp.2.confidence_head.proj.weight"].shape == (1, 64 + 12)
    assert draft["mtp.1.ffn.gate.weight"].shape == (4, 64)
    assert draft["mtp.1.hc_ffn_fn"].kind == FP32
    assert "mtp.1.main_proj.weight" not in draft
    assert "mtp.1.ffn.experts.4.w1.weight" not in draft
    assert not [name for name in draft if "compressor" in name or "indexer" in name or "engram" in name]


def dense_spec(**changes: Any) -> DenseSpec:
    # One field a word: a table reads better than twenty lines.
    base = DenseSpec(
        name="dense", architecture="Qwen3ForCausalLM", vocab_size=100, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, intermediate_size=48, rope_theta=1e4, rope_scaling=None, max_positions=512, rms_norm_eps=1e-6, tie_word_embeddings=True,
        attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=True, bos_token_id=0, eos_token_ids=(1,), pad_token_id=None,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_dense_names() -> None:
    names = expected_tensors(dense_spec())
    assert len(names) == 1 + 2 * (7 + 2 + 2) + 1
    assert names["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert names["model.layers.1.mlp.down_proj.weight"].shape == (32, 48)
    assert names["model.layers.0.self_attn.q_norm.weight"].shape == (8,)
    assert "lm_head.weight" not in names


def test_dense_biases_and_head() -> None:
    names = expected_tensors(dense_spec(tie_word_embeddings=False, attention_bias=True, qk_norm=False))
    assert names["lm_head.weight"].shape == (100, 32)
    assert names["model.layers.0.self_attn.v_proj.bias"].shape == (16,)
    assert "model.layers.0.self_attn.o_proj.bias" not in names
    assert "model.layers.0.self_attn.q_norm.weight" not in names
