"""On a GPU, where there is one: the fixtures in float32 through the same paged path. Deselected elsewhere (conftest.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import twinfer

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.gpu
@pytest.mark.parametrize("way", [[], ["--chunk", "7"], ["--decode-from", "9"]])
@pytest.mark.parametrize("name", ["v41_csa2_plain", "v41_engram", "v41_ragged_greedy", "qwen3_moe", "qwen3_moe_mixed"])
def test_fixture_logits(name: str, way: list[str], tmp_path: Path) -> None:
    folder, out = FIXTURES / name, tmp_path / "out.safetensors"
    arguments = ["--inputs", str(folder / "inputs.safetensors"), "--out", str(out), "--cache-rounding", "off", "--device", "cuda"]
    assert twinfer.main(["logits", str(folder), *arguments, *way]) == 0
    ours, expected = load_file(out), load_file(folder / "expected.safetensors")
    tolerance = json.loads((folder / "meta.json").read_text())["tolerance"]["logits_max_abs"]
    assert (ours["logits"] - expected["logits"]).abs().max() <= tolerance
    assert torch.equal(ours["logits"].argmax(-1), expected["logits"].argmax(-1))
