"""Expert choice of V4.1: square root of softplus scores, selection by biased score, weights from the unbiased one."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component


@component("router")
def router(x_TD: Tensor, gate_ED: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights [T, k] float32 and expert ids [T, k] int64 of each token.

    gate_ED float32; ``bias`` [E], or [T, E] where tokens differ (image tokens have their own); it decides the selection only.
    weight = s / (sum of the selected s + 1e-20) * scale with s = sqrt(softplus(x gate^T)), all in float32.
    """
    scores_TE = functional.softplus(functional.linear(x_TD.float(), gate_ED)).sqrt()
    ids_TK = (scores_TE + bias).topk(top_k, dim=-1, sorted=False).indices
    chosen_TK = scores_TE.gather(1, ids_TK)
    return chosen_TK * (scale / (chosen_TK.sum(-1, keepdim=True) + 1e-20)), ids_TK
