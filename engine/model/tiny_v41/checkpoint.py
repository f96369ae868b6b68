"""Between the official tensor names of a checkpoint and the stacked parameters of ``forward``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.model_config import model_spec
from engine.core.specs import V41Spec
from engine.model.tiny_v41.engram import EngramTables, tables_of

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123])\.weight$")
FLOAT32 = re.compile(r"hc_(attn|ffn)_|attn_sink$|gate\.bias(_vl)?$")


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official names -> fp32 parameters with the experts of a layer in one tensor."""
    params: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = EXPERT.match(name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor.float()
        else:
            params[name] = tensor.float()
    for name, parts in experts.items():
        params[name] = torch.stack([parts[index] for index in range(len(parts))])
    return params


def official(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse, in the checkpoint's dtypes: bf16 but for mHC, sinks and routing biases."""
    tensors: dict[str, Tensor] = {}
    for name, value in params.items():
        tensor = value.detach()
        if ".experts.w" in name:
            prefix, kind = name.rsplit(".", 1)
            for index, part in enumerate(tensor):
                tensors[f"{prefix}.{index}.{kind}.weight"] = part.to(torch.bfloat16).contiguous()
        else:
            tensors[name] = tensor.float().clone() if FLOAT32.search(name) else tensor.to(torch.bfloat16).contiguous()
    return dict(sorted(tensors.items()))


def save(params: Mapping[str, Tensor], path: Path) -> None:
    save_file(official(params), path, metadata={"format": "pt"})


def read_spec(folder: Path) -> V41Spec:
    spec = model_spec(json.loads((folder / "config.json").read_text()), folder.name)
    if not isinstance(spec, V41Spec):
        raise TypeError(f"{folder} does not hold a V4.1 model")
    return spec


def load(folder: Path) -> tuple[V41Spec, dict[str, Tensor], EngramTables | None]:
    """Spec, fp32 parameters and Engram tables of a model folder."""
    spec = read_spec(folder)
    tables = None
    if spec.engram:
        tables = tables_of(spec.engram, load_file(folder / "engram.safetensors")["token_map"])
    return spec, stacked(load_file(folder / "model.safetensors")), tables
