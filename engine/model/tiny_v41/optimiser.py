"""First weights, and the optimiser: Muon (orthogonalised momentum) for matrices, AdamW for the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.core.specs import AttentionRole, V41Spec

BALANCE_STEP = 0.002
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic of Jordan et al., "Muon" (2024)


def initial(spec: V41Spec, generator: torch.Generator) -> dict[str, Tensor]:
    """Backbone parameters. Sublayers start near zero output; stream mixing near identity, the streams told apart by ``pre``."""
    d, s = spec.hidden_size, spec.hc_mult

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    params = {
        "embed.weight": normal(spec.vocab_size, d, std=0.7),
        "head.weight": normal(spec.vocab_size, d, std=0.02),
        "norm.weight": torch.ones(d),
    }
    for layer in range(spec.num_layers):
        name = f"layers.{layer}"
        params |= initial_layer(spec, name, layer, spec.num_experts, generator)
        params[f"{name}.ffn.gate.bias_vl"] = torch.zeros(spec.num_experts)
        if spec.compress_ratios[layer] and spec.role(layer) is AttentionRole.FULL:
            params[f"{name}.attn.compressor.wkv.weight"] = normal(spec.head_dim, d, std=d**-0.5)
            if spec.compress_ratios[layer] > 1:
                params[f"{name}.attn.compressor.wgate.weight"] = normal(spec.head_dim, d, std=0.2 * d**-0.5)
            params[f"{name}.attn.compressor.norm.weight"] = torch.ones(spec.head_dim)
            params[f"{name}.attn.indexer.wk.weight"] = normal(spec.index_head_dim, spec.head_dim, std=spec.head_dim**-0.5)
            params[f"{name}.attn.indexer.k_norm.weight"] = torch.ones(spec.index_head_dim)
        if layer in spec.index_source_layer_ids:
            heads = spec.index_num_heads
            params[f"{name}.attn.indexer.wq_b.weight"] = normal(heads * spec.index_head_dim, spec.q_lora_rank, std=spec.q_lora_rank**-0.5)
            params[f"{name}.attn.indexer.weights_proj.weight"] = normal(heads, d, std=d**-0.5)
        if spec.engram and layer in spec.engram.layer_ids:
            rows, columns, dim = spec.engram.num_rows[spec.engram.layer_ids.index(layer)], spec.engram.num_columns, spec.engram.head_dim
            params[f"{name}.engram.embed.weight"] = normal(rows, dim, std=0.1)
            params[f"{name}.engram.wkv.weight"] = normal((s + 1) * d, columns * dim, std=(columns * dim) ** -0.5)
            params[f"{name}.engram.q_weight"] = torch.ones(s, d)
            params[f"{name}.engram.k_weight"] = torch.ones(s, d)
    return params


def initial_layer(spec: V41Spec, name: str, layer: int, experts: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What every layer has, of the backbone and of the draft alike."""
    d, s, i, c = spec.hidden_size, spec.hc_mult, spec.moe_intermediate_size, spec.head_dim

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * (gain / math.sqrt(shape[-1]))

    group = spec.num_heads * c // spec.o_groups
    params = {
        "attn_norm.weight": torch.ones(d),
        "ffn_norm.weight": torch.ones(d),
        "attn.wq_a.weight": normal(spec.q_lora_rank, d),
        "attn.q_norm.weight": torch.ones(spec.q_lora_rank),
        "attn.wq_b.weight": normal(spec.num_heads * c, spec.q_lora_rank),
        "attn.wkv.weight": normal(c, d),
        "attn.kv_norm.weight": torch.ones(c),
        "attn.attn_sink": torch.zeros(spec.num_heads),
        "attn.wo_a.weight": normal(spec.o_groups * spec.o_lora_rank, group),
        "attn.wo_b.weight": normal(d, spec.o_groups * spec.o_lora_rank, gain=0.2),
        "ffn.gate.weight": normal(experts, d),
        "ffn.gate.bias": torch.zeros(experts),
        "ffn.experts.w1": normal(experts, i, d),
        "ffn.experts.w3": normal(experts, i, d),
        "ffn.experts.w2": normal(experts, d, i, gain=0.2),
        "ffn.shared_experts.w1.weight": normal(i, d),
        "ffn.shared_experts.w3.weight": normal(i, d),
        "ffn.shared_experts.w2.weight": normal(d, i, gain=0.2),
    }
    for index, part in enumerate(("attn", "ffn")):
        pre = torch.full((s,), -2.0)
        pre[(2 * layer + index) % s] = 1.0
        comb = 2.0 * torch.eye(s).flatten()
        params[f"hc_{part}_fn"] = torch.randn(2 * s + s * s, s * d, generator=generator) * 0.1 * (s * d) ** -0.5
        params[f"hc_{part}_base"] = torch.cat((pre, torch.zeros(s), comb))
        params[f"hc_{part}_scale"] = torch.ones(3)
    return {f"{name}.{key}": value for key, value in params.items()}


def orthogonalise(update: Tensor) -> Tensor:
    """Push the singular values of ``update`` [..., rows, cols] towards 1 by five Newton-Schulz steps."""
    a, b, c = NS_COEFFICIENTS
    x: Tensor = update.transpose(-1, -2) if update.shape[-2] > update.shape[-1] else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.float()
    return x.transpose(-1, -2) if update.shape[-2] > update.shape[-1] else x


def is_matrix(name: str) -> bool:
    """Parameters for Muon: hidden-to-hidden matrices, not tables, heads, gates or mixing coefficients."""
    small = ("embed", "head", "gate.weight", "hc_", "weights_proj", "q_weight", "k_weight")
    return not any(part in name for part in small) and (name.endswith((".w1", ".w2", ".w3")) or ".w" in name or "main_proj" in name)


class Optimiser:
    """``rate`` scales all learning rates; weight decay is decoupled and scaled by the rate too."""

    def __init__(self, params: dict[str, Tensor], muon_lr: float, adam_lr: float, table_lr: float, decay: float) -> None:
        self.matrices = {k: v for k, v in params.items() if is_matrix(k) and v.dim() >= 2}
        self.biases = [v for k, v in params.items() if k.endswith("gate.bias")]
        others = {k: v for k, v in params.items() if k not in self.matrices and not k.endswith("gate.bias")}
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, value in others.items():
            table = "embed" in name
            head = name == "head.weight" or "markov_head" in name
            groups.setdefault((table_lr if table else adam_lr, decay if table or head else 0.0), []).append(value)
        self.adam = torch.optim.AdamW(
            [{"params": group, "lr": lr, "base_lr": lr, "weight_decay": wd} for (lr, wd), group in groups.items()],
            lr=adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
        )
        self.momentum = {k: torch.zeros_like(v) for k, v in self.matrices.items()}
        self.muon_lr, self.decay = muon_lr, decay

    def step(self, rate: float, momentum: float = 0.95) -> None:
        """One update from the parameters' gradients."""
        for group in self.adam.param_groups:
            group["lr"] = group["base_lr"] * rate
        self.adam.step()
        with torch.no_grad():
            for bias in self.biases:  # noaux_tc: a fixed step against the sign of the excess load
                if bias.grad is not None:
                    bias.sub_(bias.grad.sign(), alpha=BALANCE_STEP * rate)
            for name, value in self.matrices.items():
                if value.grad is None:
                    continue
                buffer = self.momentum[name].lerp_(value.grad, 1 - momentum)
                update = orthogonalise(value.grad.lerp(buffer, momentum))
                scale = math.sqrt(max(1.0, value.shape[-2] / value.shape[-1]))
                value.mul_(1 - self.muon_lr * rate * self.decay).add_(update, alpha=-self.muon_lr * rate * scale)
