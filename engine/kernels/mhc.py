"""Manifold-constrained hyper-connections (mHC): S residual streams mixed by a near doubly stochastic matrix.

Legend: T tokens, S streams, D hidden, M = S * (2 + S) coefficients (S for pre, S for post, S*S for the mixing matrix).
All coefficients are float32. In V4.1 the mix is *shifted*: a sublayer's pre is used by the next sublayer (the model's business).
Source: DeepSeek's published V4.1 model code and TileKernels' torch references, restated in docs of the model family.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.norm import floored_length
from engine.kernels.timing import component


def mhc_fold(fn_MZ: Tensor, scale_3: Tensor, num_streams: int) -> Tensor:
    """Fold the three scales and sqrt(Z) into ``fn`` at load, float32 [M, Z]: the mix then is one GEMM and one division by a norm."""
    counts = torch.tensor((num_streams, num_streams, num_streams * num_streams), device=scale_3.device)
    scale_M1 = scale_3.float().repeat_interleave(counts).unsqueeze(-1)
    return fn_MZ.float() * scale_M1 * math.sqrt(fn_MZ.shape[1])


@component("mhc")
def mhc_mix(
    streams_TSD: Tensor, fn_MZ: Tensor, base_M: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sublayer from the stream state: pre [T, S], post [T, S], comb [T, S (from), S (to)].

    ``fn_MZ`` is folded (``mhc_fold``), Z = S*D. One RMS statistic over all streams. pre = sigmoid + eps, post = 2 sigmoid,
    comb = Sinkhorn(softmax over rows + eps): columns first, then ``iterations - 1`` times rows and columns.
    """
    num_tokens, num_streams, _ = streams_TSD.shape
    flat_TZ = streams_TSD.flatten(1).float()
    # fn z / sqrt(mean z^2 + eps), with sqrt(Z) folded into fn.
    mixed_TM = torch.addcdiv(base_M, functional.linear(flat_TZ, fn_MZ), floored_length(flat_TZ, norm_eps))
    pre_TS, post_TS, comb_TC = mixed_TM.split_with_sizes((num_streams, num_streams, num_streams * num_streams), dim=-1)
    start_TSS = torch.softmax(comb_TC.view(num_tokens, num_streams, num_streams), dim=-1) + eps
    return torch.sigmoid(pre_TS) + eps, torch.sigmoid(post_TS) * 2.0, sinkhorn(start_TSS, iterations, eps)


def sinkhorn(start_TSS: Tensor, iterations: int, eps: float) -> Tensor:
    """``M / (column sums + eps)``, then ``iterations - 1`` times ``M / (row sums + eps)`` and ``M / (column sums + eps)``.

    It ends on columns (sums over the first index of a token's matrix). Between the first and the last column step the work is done on
    log M, where dividing by a sum is one log_softmax: a third of the launches, and tokens innermost make each one vector work. That
    leaves eps out of the steps between, which moves no entry by more than 3e-7 (eps matters where a column starts near zero, and
    scales the last result; both steps keep it).
    """
    matrix_SST = start_TSS.permute(1, 2, 0).contiguous()
    matrix_SST = matrix_SST / (matrix_SST.sum(0, keepdim=True) + eps)
    if iterations > 1:
        log_SST = matrix_SST.log()
        for _ in range(iterations - 2):
            log_SST = torch.log_softmax(torch.log_softmax(log_SST, 1), 0)
        matrix_SST = torch.softmax(log_SST, 1)
        matrix_SST = matrix_SST / (matrix_SST.sum(0, keepdim=True) + eps)
    return matrix_SST.permute(2, 0, 1)


@component("mhc")
def mhc_collapse(pre_TS: Tensor, streams_TSD: Tensor) -> Tensor:
    """A sublayer's input: ``sum_s pre[s] * X[s]`` [T, D] in the streams' dtype, accumulated in float32."""
    return torch.bmm(pre_TS.unsqueeze(1), streams_TSD.float()).squeeze(1).to(streams_TSD.dtype)


@component("mhc")
def mhc_expand(streams_TSD: Tensor, out_TD: Tensor, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    """The streams after a sublayer: ``X'[j] = post[j] * y + sum_i comb[i, j] * X[i]`` (comb's *first* index is contracted)."""
    injected_TSD = post_TS.unsqueeze(-1) * out_TD.unsqueeze(1)
    return torch.baddbmm(injected_TSD, comb_TSS.mT, streams_TSD.float()).to(streams_TSD.dtype)
