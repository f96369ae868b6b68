"""Compression of consecutive tokens into one latent row (ratio 1 or 2), from which the main row and the index key are made.

Legend: T tokens, C head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.norm import rms_norm
from engine.kernels.timing import component


@component("compressor")
def compress_pair(previous_TU: Tensor, current_TU: Tensor, norm_C: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Ratio 2: latent [T, C] of the pair (token before, token) in ``dtype``.

    Inputs [T, 2C] float32 hold the kv half and the gate half of a token's projection. Per channel a softmax of the two gates weighs the
    two kv values: kv0 + sigmoid(g1 - g0) * (kv1 - kv0); then RMSNorm. No overlap of groups, no positional bias.
    """
    kv_before, gate_before = previous_TU.chunk(2, dim=-1)
    kv_TC, gate_TC = current_TU.chunk(2, dim=-1)
    mixed_TC = torch.lerp(kv_before, kv_TC, torch.sigmoid(gate_TC - gate_before))
    return rms_norm(mixed_TC, norm_C.float(), eps).to(dtype)


@component("compressor")
def compress_single(kv_TC: Tensor, norm_C: Tensor, eps: float) -> Tensor:
    """Ratio 1: latent [T, C] of each token alone, the norm of its projection."""
    return rms_norm(kv_TC, norm_C, eps)
