"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in float32, returned in ``x.dtype``.

    x [..., D], weight [D] or None for an unweighted norm. Zhang and Sennrich, arXiv 1910.07467. The float32 detour matters:
    V4.1's eps is 1e-20, far below what a bfloat16 square of a small row resolves.
    """
    if x.dtype == torch.float32:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = functional.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), eps)
    return wide.to(x.dtype)
