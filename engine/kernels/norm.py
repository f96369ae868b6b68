"""RMSNorm."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component


@component("norm")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in float32, returned in ``x.dtype``.

    x [..., D], weight [D] or None for an unweighted norm. Zhang and Sennrich, arXiv 1910.07467. The float32 detour matters:
    V4.1's eps is 1e-20, far below what a bfloat16 square of a small row resolves.
    """
    wide = x.float()
    width = x.shape[-1]
    if wide.is_cuda:  # one fused kernel there; on a CPU it is ten launches
        return functional.rms_norm(wide, (width,), None if weight is None else weight.float(), eps).to(x.dtype)
    normed = wide / (floored_length(wide, eps) * (1.0 / math.sqrt(width)))
    return (normed if weight is None else normed * weight).to(x.dtype)


def floored_length(x: Tensor, eps: float) -> Tensor:
    """``sqrt(|x|^2 + D * eps)`` [..., 1] of float32 rows of width D: sqrt(D) times the divisor of an RMSNorm, without overflow."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.hypot(length, _scalar(math.sqrt(x.shape[-1] * eps), x.device))


@functools.lru_cache(maxsize=256)
def _scalar(value: float, device: torch.device) -> Tensor:
    """Made once: building a tensor costs as much as three operations on it. Not an inference tensor, so autograd may keep it."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)
