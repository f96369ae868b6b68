"""The mixture of experts that stands for the MLP in a Qwen3-MoE layer. Legend in engine.kernels.experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.core.specs import DenseSpec
from engine.kernels.experts import expert_form, expert_gemm, expert_gemm_dense, expert_gemm_single
from engine.kernels.router_softmax import router_softmax
from engine.parallel.experts import RoutedExperts
from engine.parallel.groups import ParallelGroups
from engine.parallel.tensor import all_reduce


class TensorLoader(Protocol):
    """Gives checkpoint tensors by name (this rank's part of them), on the device, in the model's dtype or in ``dtype``."""

    groups: ParallelGroups | None

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MoeFeedForward:
    """Router (float32, as its maths is) and stacked experts of one layer: all, or in ``spread`` those of this rank."""

    gate_ED: Tensor
    w13_EJD: Tensor
    w2_EID: Tensor
    always_1E: Tensor  # zeros: no expert works unchosen
    experts_per_token: int
    normalise_weights: bool
    spread: RoutedExperts | None

    def __call__(self, x_TD: Tensor, num_tokens: Sequence[int] = ()) -> Tensor:
        """The chosen experts' weighted sum [T, D]. The ways of computing it give the same numbers up to rounding.

        ``num_tokens``: how many tokens each data rank has, where the experts are spread over several.
        """
        if self.spread is not None:
            return self._spread_sum(x_TD, self.spread, num_tokens)
        if x_TD.shape[0] == 0:  # a chunk without wanted rows reaches the last layer empty
            return x_TD
        weights_TK, ids_TK = router_softmax(x_TD, self.gate_ED, self.experts_per_token, self.normalise_weights)
        form = expert_form(x_TD.shape[0], self.experts_per_token, self.w2_EID)
        if form == "single":
            return expert_gemm_single(x_TD, weights_TK[0], ids_TK[0], self.w13_EJD, self.w2_EID, None)
        if form == "dense":
            return expert_gemm_dense(x_TD, weights_TK, ids_TK, self.w13_EJD, self.w2_EID, self.always_1E, None)
        return expert_gemm(x_TD, weights_TK, ids_TK, self.w13_EJD, self.w2_EID, None)

    def join(self, num_tokens: Sequence[int]) -> None:
        """Take part in a call of other data ranks."""
        if self.spread is not None:
            self.spread.join(num_tokens)

    def _spread_sum(self, x_TD: Tensor, spread: RoutedExperts, num_tokens: Sequence[int]) -> Tensor:
        weights_TK, ids_TK = router_softmax(x_TD, self.gate_ED, self.experts_per_token, self.normalise_weights)
        out_TD = spread(x_TD, weights_TK, ids_TK, num_tokens)
        tensor = spread.groups.tensor
        return out_TD if tensor is None else all_reduce(tensor, out_TD)


def load_moe(load: TensorLoader, spec: DenseSpec, prefix: str) -> MoeFeedForward:
    """Experts ``{prefix}.experts.E`` stacked as the grouped products want them, one at a time: no second copy of a layer is made."""
    assert spec.moe is not None
    hidden, groups = spec.hidden_size, load.groups
    experts = tuple(range(spec.moe.num_experts))
    placement = None
    if groups is not None:
        placement = groups.place.expert_map(spec.moe.num_experts)
        experts = placement.of_rank(groups.place.expert_rank)
    gate_ED = load.get(f"{prefix}.gate.weight", torch.float32)
    w13_EJD = w2_EID = torch.empty(0)
    for slot, expert in enumerate(experts):
        gate, up, down = (load.get(f"{prefix}.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
        inner = gate.shape[0]
        if slot == 0:
            w13_EJD, w2_EID = gate.new_empty((len(experts), 2 * inner, hidden)), gate.new_empty((len(experts), inner, hidden))
        w13_EJD[slot, :inner], w13_EJD[slot, inner:], w2_EID[slot] = gate, up, down.T
    spread = None
    if groups is not None and placement is not None:
        spread = RoutedExperts(groups, placement, spec.moe.experts_per_token, w13_EJD, w2_EID, None)
    return MoeFeedForward(
        gate_ED=gate_ED,
        w13_EJD=w13_EJD,
        w2_EID=w2_EID,
        always_1E=gate_ED.new_zeros((1, len(experts))),
        experts_per_token=spec.moe.experts_per_token,
        normalise_weights=spec.moe.normalise_weights,
        spread=spread,
    )
