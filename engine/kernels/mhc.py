"""Manifold-constrained hyper-connections (mHC): S residual streams mixed by a near doubly stochastic matrix.

Legend: T tokens, S streams, D hidden, M = S * (2 + S) coefficients (S for pre, S for post, S*S for the mixing matrix).
All coefficients are float32. In V4.1 the mix is *shifted*: a sublayer's pre is used by the next sublayer (the model's business).
Source: DeepSeek's published V4.1 model code and TileKernels' torch references, restated in docs of the model family.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SMALL_BATCH_TOKENS = 64  # CPU, S = 4: below it fewer launches win (97 against 220 us), above it the long inner dimension does


def mhc_fold(fn_MZ: Tensor, scale_3: Tensor, num_streams: int) -> Tensor:
    """Fold the three scales into ``fn`` at load, float32 [M, S*D]: the mix then is one GEMM with the base as its bias."""
    counts = torch.tensor((num_streams, num_streams, num_streams * num_streams), device=scale_3.device)
    return fn_MZ.float() * scale_3.float().repeat_interleave(counts).unsqueeze(-1)


def mhc_mix(
    streams_TSD: Tensor, fn_MZ: Tensor, base_M: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sublayer from the stream state: pre [T, S], post [T, S], comb [T, S (from), S (to)].

    ``fn_MZ`` is folded (``mhc_fold``), Z = S*D. One RMS statistic over all streams. pre = sigmoid + eps, post = 2 sigmoid,
    comb = Sinkhorn(softmax over rows + eps): columns first, then ``iterations - 1`` times rows and columns.
    """
    num_tokens, num_streams, _ = streams_TSD.shape
    flat_TZ = streams_TSD.reshape(num_tokens, -1).float()
    mixed_TM = functional.linear(functional.rms_norm(flat_TZ, flat_TZ.shape[-1:], None, norm_eps), fn_MZ, base_M)
    pre_TS, post_TS, comb_TC = mixed_TM.split_with_sizes((num_streams, num_streams, num_streams * num_streams), dim=-1)
    start_TSS = torch.softmax(comb_TC.reshape(num_tokens, num_streams, num_streams), dim=-1) + eps
    return torch.sigmoid(pre_TS) + eps, torch.sigmoid(post_TS) * 2.0, sinkhorn(start_TSS, iterations, eps)


def sinkhorn(start_TSS: Tensor, iterations: int, eps: float) -> Tensor:
    """``M / (column sums + eps)``, then ``iterations - 1`` times ``M / (row sums + eps)`` and ``M / (column sums + eps)``.

    Columns are the last dimension's index; the result ends on columns. Two forms of the same numbers (they agree to 1e-6):
    small batches keep M implicit as start * 1/u * 1/v, where one row step is ``u <- start @ (1/v) + eps * u``: two launches a
    half-iteration, in place; larger batches and autograd divide M itself with the tokens innermost.
    """
    if start_TSS.shape[0] <= _SMALL_BATCH_TOKENS and not (torch.is_grad_enabled() and start_TSS.requires_grad):
        return _sinkhorn_scaled(start_TSS, iterations, eps)
    matrix_SST = start_TSS.permute(1, 2, 0).contiguous()
    matrix_SST = matrix_SST / (matrix_SST.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix_SST = matrix_SST / (matrix_SST.sum(1, keepdim=True) + eps)
        matrix_SST = matrix_SST / (matrix_SST.sum(0, keepdim=True) + eps)
    return matrix_SST.permute(2, 0, 1)


def _sinkhorn_scaled(start_TSS: Tensor, iterations: int, eps: float) -> Tensor:
    transposed_TSS = start_TSS.mT
    state = start_TSS.new_ones((4, start_TSS.shape[0], start_TSS.shape[1], 1))
    rows, columns, inverse_rows, inverse_columns = state.unbind(0)
    columns.baddbmm_(transposed_TSS, inverse_rows, beta=eps)
    torch.reciprocal(columns, out=inverse_columns)
    for _ in range(iterations - 1):
        rows.baddbmm_(start_TSS, inverse_columns, beta=eps)
        torch.reciprocal(rows, out=inverse_rows)
        columns.baddbmm_(transposed_TSS, inverse_rows, beta=eps)
        torch.reciprocal(columns, out=inverse_columns)
    return start_TSS * inverse_rows * inverse_columns.mT


def mhc_collapse(pre_TS: Tensor, streams_TSD: Tensor) -> Tensor:
    """A sublayer's input: ``sum_s pre[s] * X[s]`` [T, D] in the streams' dtype, accumulated in float32."""
    return torch.bmm(pre_TS.unsqueeze(1), streams_TSD.float()).squeeze(1).to(streams_TSD.dtype)


def mhc_expand(streams_TSD: Tensor, out_TD: Tensor, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    """The streams after a sublayer: ``X'[j] = post[j] * y + sum_i comb[i, j] * X[i]`` (comb's *first* index is contracted)."""
    injected_TSD = post_TS.unsqueeze(-1) * out_TD.unsqueeze(1)
    return torch.baddbmm(injected_TSD, comb_TSS.mT, streams_TSD.float()).to(streams_TSD.dtype)
