"""The presets of random weights: what they are made of, that they run, and that nobody takes them for trained models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import twinfer
from engine.core.counts import count_parameters
from engine.core.errors import ConfigError
from engine.core.layout import parse_layout
from engine.core.specs import AttentionRole, DenseSpec, V41Spec
from engine.launch import open_model
from engine.model import registry
from engine.model.files import read_model_files
from engine.model.load import load_model
from tests.model.engine_harness import Engine

PRESETS = ("v41-100m", "qwen3-moe-100m")
LAYOUTS = ("tp1dp1ep1", "tp1dp2ep2", "tp2dp1ep1", "tp2dp1ep2", "tp1dp8ep8", "tp4dp2ep4")


@pytest.mark.parametrize("name", PRESETS)
def test_size_tokenizer_and_layouts(name: str) -> None:
    model = open_model(name)
    assert model.spec.name == name
    assert count_parameters(model.spec).total == pytest.approx(100e6, rel=0.03)
    assert model.tokenizer is not None
    assert model.tokenizer.vocab_size == model.spec.vocab_size
    assert model.tokenizer.decode(model.tokenizer.encode("In the beginning", add_special_tokens=False)) == "In the beginning"
    assert model.tokenizer.eos_token_ids == model.spec.eos_token_ids
    for layout in LAYOUTS:
        parse_layout(layout).validate_for(model.spec)


def test_v41_has_every_part() -> None:
    spec = read_model_files("v41-100m").spec
    assert isinstance(spec, V41Spec)
    roles = [spec.role(layer) for layer in range(spec.num_layers)]
    assert {role: roles.count(role) for role in AttentionRole} == {
        AttentionRole.WINDOW: 2, AttentionRole.FULL: 2, AttentionRole.REINDEX: 2, AttentionRole.REUSE: 4,
    }  # fmt: skip
    assert {spec.compress_ratios[layer] for layer in spec.kv_source_layer_ids} == {1, 2}
    assert spec.candidate_source_layer_id == 4
    # Window, selection and candidate set all cut into a context of 256 tokens.
    assert spec.sliding_window == spec.index_top_k == 64
    assert spec.candidate_top_k_blocks * spec.candidate_block_size == 192
    assert spec.engram is not None
    assert count_parameters(spec).by_group["engram_tables"] > 0.15 * count_parameters(spec).total
    assert spec.dspark is not None
    assert spec.max_draft_tokens == 5


def test_qwen3_moe_has_experts_everywhere() -> None:
    spec = read_model_files("qwen3-moe-100m").spec
    assert isinstance(spec, DenseSpec)
    assert spec.num_moe_layers == spec.num_layers


@pytest.mark.parametrize("name", PRESETS)
def test_without_random_weights_it_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["check"], ["generate", "--prompt", "x"], ["bench", "steps"]):
        words = command[:2] if command[0] == "bench" else command[:1]
        assert twinfer.main([*words, name, *command[len(words) :]]) == 2
        error = capsys.readouterr().err
        assert f"model {name} is a preset, dimensions without weights: add --load-format random" in error
    for asked in (name, registry.resolve(name), read_model_files(name)):
        with pytest.raises(ConfigError, match="add --load-format random"):
            load_model(asked)


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_are_shown_without_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert twinfer.main(["model", "show", name, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["model"] == name
    assert shown["active_parameters"] < 0.3 * shown["parameters"]
    assert twinfer.main(["model", "get", name]) == 0
    assert twinfer.main(["check", name, "--load-format", "random"]) == 0


def test_logits_of_random_weights_depend_on_the_seed(tmp_path: Path) -> None:
    inputs, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"input_ids": torch.arange(6).view(2, 3) + 10, "lengths": torch.tensor([3, 2])}, inputs)
    logits = []
    for seed in ("1", "1", "2"):
        arguments = ["logits", "qwen3-moe-100m", "--inputs", str(inputs), "--out", str(out), "--load-format", "random"]
        assert twinfer.main([*arguments, "--random-seed", seed]) == 0
        logits.append(load_file(out)["logits"])
    assert torch.equal(logits[0], logits[1])
    assert float((logits[0] - logits[2]).abs().mean()) > 0.1
    assert logits[0].shape == (5, 3072)
    assert 0.3 < float(logits[0].std()) < 3


def test_v41_runs_with_and_without_drafts() -> None:
    torch.set_num_threads(1)
    model = load_model("v41-100m", dtype=torch.float32, load_format="random").model
    prompt = torch.randint(4, 3072, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = [Engine(model, max_batched_tokens=256, draft_tokens=drafts).generate(prompt, max_tokens=8) for drafts in (0, 3)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 2
