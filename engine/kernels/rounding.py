"""The three cache formats of V4.1 as fake quantisation: values are rounded to the format and returned in the tensor's own dtype.

Every representable value of the three formats is exact in bfloat16 and float32, so a cache in the model's dtype holds exactly what
a packed cache would give back. Sources: FlashMLA's and SGLang's V4.1 cache layouts (E4M3 with UE8M0 scales, E2M1 with UE8M0
scales, E2M1 with E4M3 scales); OCP Microscaling Formats 1.0 for E4M3, E2M1 and UE8M0. Rounding is to nearest, ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def round_fp8(x: Tensor, group: int = 32) -> Tensor:
    """Window rows: E4M3 with one power-of-two scale per ``group`` channels, ``2^ceil(log2(max(amax, 1e-4) / 448))``.

    x [..., D], D a multiple of ``group``. All channels are rounded, the rotary ones too. A new tensor of ``x.dtype``.
    """
    groups = _groups(x, group)
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX)
    return (_round_e4m3(groups / scale) * scale).reshape(x.shape).to(x.dtype)


def round_fp4_index(x: Tensor, group: int = 32) -> Tensor:
    """Index queries and keys: E2M1 with one power-of-two scale per ``group`` channels, amax floored at ``6 * 2^-126``."""
    groups = _groups(x, group)
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126) / E2M1_MAX)
    return (_round_e2m1(groups / scale) * scale).reshape(x.shape).to(x.dtype)


def round_fp4_kv(x: Tensor, group: int = 16) -> Tensor:
    """Compressed main rows: E2M1 with one E4M3 scale per ``group`` channels, ``E4M3(max(amax, 6 * 2^-9) / 6)``."""
    groups = _groups(x, group)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = _round_e4m3(amax / E2M1_MAX)
    return (_round_e2m1(groups / scale) * scale).reshape(x.shape).to(x.dtype)


def _groups(x: Tensor, group: int) -> Tensor:
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for positive normal float32: exact where log2 near a power of two is not."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value, saturating at 448; float32 in and out."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest of {0, 0.5, 1, 1.5, 2, 3, 4, 6} with sign, saturating: the step is 0.5 below 2, 1 below 4, then 2."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    step = 0.5 + 0.5 * (magnitude >= 2.0).float() + (magnitude >= 4.0).float()
    return torch.round(x / step) * step
