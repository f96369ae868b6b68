"""Mixture-of-experts matrix products: the routed experts (grouped, or all at once where they are tiny) and a gated MLP.

Legend: T tokens, D hidden, E experts, I expert intermediate size, K experts a token. Weights: w13 [E, 2I, D] (gate rows, then up
rows), w2 [E, I, D] (already transposed: both products read it as it lies). ``limit`` is the bound of SwiGLU's two halves (V4.1); None is
no bound (Qwen).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component

# Where the three forms cross, measured on a 2-core x86 CPU (E 8..64, I 24..256, D 64..512, torch 2.13). Weights are counted in elements of
# w13 and w2 together. bfloat16's higher arithmetic rate, and the costs of its small products, move the crossings up.
_SINGLE_WEIGHTS = 4_000_000  # of the chosen experts: copying more costs more than the sort it saves
_DENSE_WEIGHTS = {torch.float32: 1_000_000, torch.bfloat16: 4_000_000}  # of all experts: they are all read
_DENSE_MACS = {torch.float32: 5_000_000, torch.bfloat16: 60_000_000}


def swiglu(gate: Tensor, up: Tensor, limit: float | None, weight: Tensor | None = None) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit) * weight`` in float32, returned in ``gate.dtype``."""
    if limit is None:
        hidden = functional.silu(gate.float()) * up.float()
    else:
        hidden = functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (hidden if weight is None else hidden * weight).to(gate.dtype)


def gated_ffn(x_TD: Tensor, w13_JD: Tensor, w2_ID: Tensor, limit: float | None) -> Tensor:
    """One gated MLP for all tokens (the shared expert, a dense layer): w13 [2I, D], w2 [I, D] (transposed). Returns [T, D]."""
    gate_TI, up_TI = functional.linear(x_TD, w13_JD).chunk(2, dim=-1)
    return swiglu(gate_TI, up_TI, limit) @ w2_ID


def expert_form(num_tokens: int, experts_per_token: int, w2_EID: Tensor) -> Literal["single", "dense", "grouped"]:
    """The fastest way to compute these experts: one token's own, every expert for every token, or grouped by expert."""
    per_expert = 3 * w2_EID.shape[1] * w2_EID.shape[2]
    if num_tokens == 1 and experts_per_token * per_expert <= _SINGLE_WEIGHTS:
        return "single"
    row_bytes = (w2_EID.shape[-1] * w2_EID.element_size(), w2_EID.shape[-2] * w2_EID.element_size())
    if any(size % 16 for size in row_bytes):  # grouped_mm needs 16-byte rows
        return "dense"
    total = w2_EID.shape[0] * per_expert
    small = total <= _DENSE_WEIGHTS.get(w2_EID.dtype, 0) and num_tokens * total <= _DENSE_MACS.get(w2_EID.dtype, 0)
    return "dense" if small else "grouped"


@component("expert_gemm")
def expert_gemm_single(x_1D: Tensor, weights_K: Tensor, ids_K: Tensor, w13_EJD: Tensor, w2_EID: Tensor, limit: float | None) -> Tensor:
    """The experts of one token as two matrix-vector products over their gathered weights. Returns [1, D]."""
    hidden = x_1D.shape[1]
    num_chosen = ids_K.shape[0]
    both_KJ = functional.linear(x_1D, w13_EJD.index_select(0, ids_K).view(-1, hidden)).view(num_chosen, -1)
    gate_KI, up_KI = both_KJ.chunk(2, dim=-1)
    inner_KI = swiglu(gate_KI, up_KI, limit, weights_K.unsqueeze(-1))
    return inner_KI.view(1, -1) @ w2_EID.index_select(0, ids_K).view(-1, hidden)


@component("expert_gemm")
def expert_gemm_dense(
    x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w13_EJD: Tensor, w2_EID: Tensor, always_1E: Tensor, limit: float | None
) -> Tensor:
    """Every expert for every token in two GEMMs, unchosen ones weighted 0; for few tokens and small experts.

    ``always_1E`` float32 holds the weight an expert has without being chosen: 0 for routed ones, 1 for shared experts appended to
    the routed ones (a shared expert of n * I is n experts of I). The weight is applied before w2. Returns [T, D].
    """
    num_tokens = x_TD.shape[0]
    num_experts, inner, hidden = w2_EID.shape
    both_TE2I = functional.linear(x_TD, w13_EJD.view(-1, hidden)).view(num_tokens, num_experts, 2, inner)
    weights_TE = always_1E.expand(num_tokens, num_experts).scatter(1, ids_TK, weights_TK)
    inner_TEI = swiglu(both_TE2I[:, :, 0], both_TE2I[:, :, 1], limit, weights_TE.unsqueeze(-1))
    return inner_TEI.flatten(1) @ w2_EID.view(-1, hidden)


@component("expert_gemm")
def expert_gemm(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w13_EJD: Tensor, w2_EID: Tensor, limit: float | None) -> Tensor:
    """Routed experts as grouped GEMMs over the (token, expert) pairs sorted by expert. Returns the weighted sum [T, D].

    The sum over a token's experts is taken in the order of ``ids_TK``, so it does not depend on the other tokens.
    """
    num_tokens, top_k = ids_TK.shape
    sorted_P, order_P = ids_TK.flatten().sort(stable=True)
    experts_E = torch.arange(w13_EJD.shape[0], device=ids_TK.device)
    ends_E = torch.searchsorted(sorted_P, experts_E, right=True, out_int32=True)  # bincount would wait for a GPU
    x_PD = x_TD.index_select(0, order_P // top_k)
    gate_PI, up_PI = functional.grouped_mm(x_PD, w13_EJD.mT, offs=ends_E).chunk(2, dim=-1)
    inner_PI = swiglu(gate_PI, up_PI, limit, weights_TK.flatten().index_select(0, order_P).unsqueeze(-1))
    out_PD = functional.grouped_mm(inner_PI, w2_EID, offs=ends_E)
    return out_PD.index_select(0, order_P.argsort()).view(num_tokens, top_k, x_TD.shape[1]).sum(1)


@component("expert_gemm")
def expert_gemm_partial(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w13_EJD: Tensor, w2_EID: Tensor, limit: float | None) -> Tensor:
    """The part [T, D] of each token's weighted sum that these E experts give; an id of E is an expert of somebody else, and adds nothing.

    Summed in the order of ``ids_TK``, as by ``expert_gemm``.
    """
    num_tokens, top_k = ids_TK.shape
    num_experts, inner, hidden = w2_EID.shape
    if num_tokens == 0:
        return x_TD
    if expert_form(max(num_tokens, 2), top_k, w2_EID) == "dense":
        both_TE2I = functional.linear(x_TD, w13_EJD.view(-1, hidden)).view(num_tokens, num_experts, 2, inner)
        # One column more takes what others compute.
        weights_TE = weights_TK.new_zeros((num_tokens, num_experts + 1)).scatter_add_(1, ids_TK, weights_TK)[:, :num_experts]
        inner_TEI = swiglu(both_TE2I[:, :, 0], both_TE2I[:, :, 1], limit, weights_TE.unsqueeze(-1))
        return inner_TEI.flatten(1) @ w2_EID.view(-1, hidden)
    sorted_P, order_P = ids_TK.flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, device=ids_TK.device)
    ends_E = torch.searchsorted(sorted_P, experts_E, right=True, out_int32=True)
    if x_TD.device.type == "cpu":  # the others' pairs lie last; a GPU would have to wait to learn their number
        order_P = order_P[: int(ends_E[-1])]
    gate_PI, up_PI = functional.grouped_mm(x_TD.index_select(0, order_P // top_k), w13_EJD.mT, offs=ends_E).chunk(2, dim=-1)
    inner_PI = swiglu(gate_PI, up_PI, limit, weights_TK.flatten().index_select(0, order_P).unsqueeze(-1))
    out_PD = functional.grouped_mm(inner_PI, w2_EID, offs=ends_E)
    if x_TD.device.type != "cpu":  # rows past the last group are not written
        out_PD = out_PD.masked_fill((sorted_P == num_experts).unsqueeze(-1), 0.0)
    pairs_PD = out_PD.new_zeros((num_tokens * top_k, hidden)).index_copy_(0, order_P, out_PD)
    return pairs_PD.view(num_tokens, top_k, hidden).sum(1)
