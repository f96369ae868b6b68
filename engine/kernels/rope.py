"""Rotary position embedding: frequencies (plain, linear, llama3, YaRN), tables, and the two pairings.

Legend: T tokens, H heads, D head dimension, Q = rotary dimensions / 2 pairs. A *rotation* is a float32 tensor [T, Q, 2] holding
(cos, sin) of position * frequency; it is made once per step and shared by all layers with the same frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # kernels depend on torch alone when they run
    from engine.core.specs import RopeScaling


def rope_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None) -> Tensor:
    """Angular frequencies [Q] in radians per position, float32: ``theta ** (-2i / rope_dim)`` for pair i, then scaled.

    linear: divided by the factor. llama3: Llama 3.1's piecewise rule. yarn: arXiv 2309.00071 section 3.2; the ramp runs between the
    (floored, ceiled) pairs that turn beta_fast and beta_slow times within the original context. Raises ValueError for another kind.
    """
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=device) / rope_dim
    frequency_Q = 1.0 / (theta**exponent)
    if scaling is None:
        return frequency_Q
    if scaling.kind == "linear":
        return frequency_Q / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequency_Q / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequency_Q * (smooth + (1.0 - smooth) / scaling.factor)
    if scaling.kind == "yarn":

        def pair_of(turns: float) -> float:
            return rope_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(pair_of(scaling.beta_fast)), 0)
        last = min(math.ceil(pair_of(scaling.beta_slow)), rope_dim - 1)
        width = max(last - first, 1e-3)  # both ends on one pair: a step instead of a division by zero
        ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32, device=device) - first) / width).clamp(0.0, 1.0)
        return frequency_Q / scaling.factor * ramp + frequency_Q * (1.0 - ramp)
    raise ValueError(f"rope scaling kind is {scaling.kind!r}; allowed: linear, llama3, yarn")


def rope_rotation(positions_T: Tensor, frequency_Q: Tensor, factor: float = 1.0) -> Tensor:
    """The rotation [T, Q, 2] of (cos, sin) at ``positions_T``; ``factor`` multiplies both (YaRN's attention factor)."""
    angle_TQ = positions_T.to(torch.float32).unsqueeze(-1) * frequency_Q
    rotation = torch.stack((angle_TQ.cos(), angle_TQ.sin()), dim=-1)
    return rotation if factor == 1.0 else rotation * factor


def rope(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2Q dimensions of ``x`` as interleaved adjacent pairs (2i, 2i+1); the leading ones pass through.

    x [T, D] or [T, H, D], rotation [T, Q, 2]. ``inverse`` rotates back by the same angles. Computed in float32, a new tensor of
    ``x.dtype`` is returned. This is V4.1's pairing.
    """
    rope_dim = rotation.shape[-2] * 2
    turn = _turn(rotation, x.dim(), inverse)
    rotated = torch.view_as_real(_pairs(x[..., -rope_dim:]) * turn).flatten(-2).to(x.dtype)
    if rope_dim == x.shape[-1]:
        return rotated
    return torch.cat((x[..., :-rope_dim], rotated), dim=-1)


def rope_(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """``rope`` in place, for inference: fewer passes over ``x``, which is returned. ``x`` must not be needed by autograd."""
    rope_dim = rotation.shape[-2] * 2
    turn = _turn(rotation, x.dim(), inverse)
    part = x[..., -rope_dim:]
    if x.dtype == torch.float32 and _even(part):
        torch.view_as_complex(part.view(*part.shape[:-1], rope_dim // 2, 2)).mul_(turn)
    else:
        part.copy_(torch.view_as_real(_pairs(part) * turn).flatten(-2))
    return x


def _turn(rotation: Tensor, dims: int, inverse: bool) -> Tensor:
    """The rotation as complex numbers, with a head dimension where ``x`` has one."""
    turn = torch.view_as_complex(rotation)
    if inverse:
        turn = turn.conj()
    return turn.unsqueeze(1) if dims == 3 else turn


def _pairs(x: Tensor) -> Tensor:
    """Adjacent elements of the last dimension as complex64 numbers."""
    wide = x.float()
    if not _even(wide):
        wide = wide.contiguous()
    return torch.view_as_complex(wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2))


def _even(x: Tensor) -> bool:
    """Whether pairs of neighbours can be viewed as complex numbers in place."""
    *outer, inner = x.stride()
    return inner == 1 and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in outer)
