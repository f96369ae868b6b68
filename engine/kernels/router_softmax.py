"""Expert choice of Qwen3-MoE: a softmax over all experts, the likeliest k of them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component


@component("router")
def router_softmax(x_TD: Tensor, gate_ED: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, k] float32 and expert ids [T, k] int64 of each token.

    weight = softmax(x gate^T) of the expert among all E, divided by the sum over the chosen ones where ``normalise``; all in float32,
    gate_ED included.
    """
    chosen_TK, ids_TK = functional.linear(x_TD.float(), gate_ED).softmax(-1).topk(top_k, dim=-1, sorted=False)
    return (chosen_TK / chosen_TK.sum(-1, keepdim=True) if normalise else chosen_TK), ids_TK
