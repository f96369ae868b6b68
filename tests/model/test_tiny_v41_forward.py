"""The training forward pass against independent implementations' outputs: a second witness for the serving path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model.tiny_v41 import checkpoint, maths
from engine.model.tiny_v41.engram import row_ids
from engine.model.tiny_v41.forward import Forward, Options

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("case", ["v41_csa2_plain", "v41_csa2_cacheround", "v41_engram", "v41_ragged_greedy"])
def test_forward_equals_golden_logits(case: str) -> None:
    folder = FIXTURES / case
    spec, params, tables = checkpoint.load(folder)
    inputs, expected = load_file(folder / "inputs.safetensors"), load_file(folder / "expected.safetensors")
    rounding = bool(json.loads((folder / "meta.json").read_text())["cache_rounding"])
    model = Forward(spec, params, tables)
    for index, length in enumerate(inputs["lengths"].tolist()):
        ids = inputs["input_ids"][index : index + 1, :length]
        with torch.no_grad():
            out = model(ids, Options(rounding=rounding, capture=True))
            logits = model.logits(out.hidden)[0]
        rows = slice(*expected["cu_seqlens"][index : index + 2].tolist())
        difference = (logits - expected["logits"][rows]).abs()
        same = (logits.argmax(-1) == expected["logits"][rows].argmax(-1)).float().mean()
        if rounding:
            assert difference.mean() <= 1e-2
            assert same >= 0.98
            continue
        assert difference.max() <= 1e-3
        assert same == 1
        for layer, selected in out.selections.items():
            want = expected[f"topk.layer{layer}"][rows]
            for position in range(length):
                assert selected[0, position].nonzero()[:, 0].tolist() == [j for j in want[position].tolist() if j >= 0]
        if tables is not None:
            assert torch.equal(row_ids(tables, ids)[0], expected["engram.row_ids"][rows])


def test_cache_rounding_is_exact() -> None:
    tensors = load_file(FIXTURES / "modules" / "modules.safetensors")
    x = tensors["round.x"]
    for name, function in (
        ("fp8_e4m3_ue8m0_32", maths.round_fp8),
        ("fp4_ue8m0_32", maths.round_fp4_index),
        ("fp4_e4m3_16", maths.round_fp4_main),
    ):
        assert torch.equal(function(x), tensors[f"round.{name}"]), name
