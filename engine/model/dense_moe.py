"""The mixture of experts that stands for the MLP in a Qwen3-MoE layer. Legend in engine.kernels.experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.core.specs import DenseSpec
from engine.kernels.experts import expert_form, expert_gemm, expert_gemm_dense, expert_gemm_single
from engine.kernels.router_softmax import router_softmax


class TensorLoader(Protocol):
    """Gives checkpoint tensors by name, on the device, in the model's dtype or in ``dtype``."""

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MoeFeedForward:
    """Router (float32, as its maths is) and stacked experts of one layer."""

    gate_ED: Tensor
    w13_EJD: Tensor
    w2_EID: Tensor
    always_1E: Tensor  # zeros: no expert works unchosen
    experts_per_token: int
    normalise_weights: bool

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The chosen experts' weighted sum [T, D]. The three ways of computing it give the same numbers up to rounding."""
        if x_TD.shape[0] == 0:  # a chunk without wanted rows reaches the last layer empty
            return x_TD
        weights_TK, ids_TK = router_softmax(x_TD, self.gate_ED, self.experts_per_token, self.normalise_weights)
        form = expert_form(x_TD.shape[0], self.experts_per_token, self.w2_EID)
        if form == "single":
            return expert_gemm_single(x_TD, weights_TK[0], ids_TK[0], self.w13_EJD, self.w2_EID, None)
        if form == "dense":
            return expert_gemm_dense(x_TD, weights_TK, ids_TK, self.w13_EJD, self.w2_EID, self.always_1E, None)
        return expert_gemm(x_TD, weights_TK, ids_TK, self.w13_EJD, self.w2_EID, None)


def load_moe(load: TensorLoader, spec: DenseSpec, prefix: str) -> MoeFeedForward:
    """Experts ``{prefix}.experts.E`` stacked as the grouped products want them, one at a time: no second copy of a layer is made."""
    assert spec.moe is not None
    num_experts, inner, hidden = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size
    gate_ED = load.get(f"{prefix}.gate.weight", torch.float32)
    w13_EJD = w2_EID = torch.empty(0)
    for expert in range(num_experts):
        gate, up, down = (load.get(f"{prefix}.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
        if expert == 0:
            w13_EJD, w2_EID = gate.new_empty((num_experts, 2 * inner, hidden)), gate.new_empty((num_experts, inner, hidden))
        w13_EJD[expert, :inner], w13_EJD[expert, inner:], w2_EID[expert] = gate, up, down.T
    return MoeFeedForward(
        gate_ED=gate_ED,
        w13_EJD=w13_EJD,
        w2_EID=w2_EID,
        always_1E=gate_ED.new_zeros((1, num_experts)),
        experts_per_token=spec.moe.experts_per_token,
        normalise_weights=spec.moe.normalise_weights,
    )
