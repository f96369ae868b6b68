"""The single operations of the model: RoPE, Sinkhorn mixing, gates, rounding of cached rows. Differentiable, fp32.

Shape letters: B sequences, L positions, T = B*L tokens, S residual streams, D hidden, H heads, C head dim, R rotary dims,
N compressed rows, E experts, K experts per token, I expert width, V vocabulary, G output groups, W window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import RopeScaling

E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of the grid 0, .5, 1, 1.5, 2, 3, 4, 6
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def split_dim(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """One dimension becomes several; a size of -1 is what remains."""
    return torch.unflatten(x, dim, sizes)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x`` [..., D] scaled to unit mean square, times ``weight`` [D]."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rope_frequencies(theta: float, dim: int, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each adjacent pair, [R/2]; YaRN interpolates the slow pairs."""
    freqs = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return freqs.float()

    def correction(rotations: float) -> float:
        return dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high: float = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return (freqs / scaling.factor * ramp + freqs * (1 - ramp)).float()


def rope_table(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [..., R/2] for integer ``positions`` [...]."""
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the last R dims of ``x`` [..., C], adjacent pairs; cos and sin broadcast against [..., R/2]."""
    rotary = 2 * cos.shape[-1]
    plain, pairs = x[..., :-rotary], split_dim(x[..., -rotary:], -1, (-1, 2))
    a, b = pairs.unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((plain, turned), -1)


def mix(
    z_TZ: Tensor, fn: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC coefficients of the flattened streams [T, S*D]: pre [S, T], post [S, T], M [S from, S to, T].

    Tokens lie last so that the sums over streams run over whole vectors.
    """
    s = streams
    m = (fn @ z_TZ.T) * torch.rsqrt(z_TZ.square().mean(-1) + rms_eps)
    pre = torch.sigmoid(m[:s] * scale[0] + base[:s, None]) + eps
    post = 2 * torch.sigmoid(m[s : 2 * s] * scale[1] + base[s : 2 * s, None])
    comb = split_dim(m[2 * s :] * scale[2] + base[2 * s :, None], 0, (s, s)).softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return pre, post, comb


def collapse(x_TSD: Tensor, pre_ST: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The sublayer's normed input [T, D]: streams weighted by the *previous* sublayer's ``pre``, summed, RMS-normed."""
    return rms_norm((x_TSD * pre_ST.T[:, :, None]).sum(1), norm, eps)


def expand(x_TSD: Tensor, y_TD: Tensor, post_ST: Tensor, comb_SST: Tensor) -> Tensor:
    """New streams: post[j]*y + sum_i M[i, j] X[i]."""
    mixed = post_ST.T[:, :, None] * y_TD[:, None]
    for source in range(x_TSD.shape[1]):
        mixed = mixed + comb_SST[source].T[:, :, None] * x_TSD[:, source, None]
    return mixed


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit)."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def pool(x: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, ratio: int, eps: float) -> Tensor:
    """Compressed latents [B, L//ratio, C] of ``x`` [B, L, D]; an incomplete last group makes no row."""
    rows = x.shape[1] // ratio
    latent = x[:, : rows * ratio] @ wkv.T
    if wgate is not None:
        weight = split_dim(x[:, : rows * ratio] @ wgate.T, 1, (rows, ratio)).softmax(2)
        latent = (weight * split_dim(latent, 1, (rows, ratio))).sum(2)
    return rms_norm(latent, norm, eps)


def candidate_mask(scores: Tensor, visible: Tensor, block_size: int, top_k_blocks: int) -> Tensor:
    """Positions inside the kept blocks, bool [B, L, N]: best blocks by their maximum, the newest visible one always kept."""
    n = scores.shape[-1]
    blocks = -(-n // block_size)
    padded = split_dim(functional.pad(scores, (0, blocks * block_size - n), value=-math.inf), -1, (blocks, block_size))
    best = padded.amax(-1)
    count = visible.sum(-1, keepdim=True)
    newest = torch.arange(blocks) == (count - 1).div(block_size, rounding_mode="floor")
    best = best.masked_fill(newest & (count > 0), math.inf)
    kept = best.topk(min(top_k_blocks, blocks), -1)
    mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept.indices, kept.values > -math.inf)
    return mask.repeat_interleave(block_size, -1)[..., :n] & visible


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """2^ceil(log2(amax / largest)), exactly."""
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))


def _e2m1(x: Tensor) -> Tensor:
    """Nearest point of the E2M1 grid, ties to the even code, saturating."""
    magnitude = x.abs()
    edges = torch.tensor(E2M1_EDGES)
    # An edge between codes c and c+1 goes to the even one: down where c is even (code 0, 2, 4, 6), up where it is odd.
    down, up = torch.bucketize(magnitude, edges), torch.bucketize(magnitude, edges, right=True)
    code = torch.where(down % 2 == 0, down, up)
    return torch.tensor(E2M1_GRID)[code] * x.sign()


def round_fp8(x: Tensor, group: int = 32) -> Tensor:
    """Window rows: E4M3 with one power-of-two scale per 32 values, read back. ``x`` [..., C]."""
    g = split_dim(x, -1, (-1, group))
    scale = power_of_two_scale(g.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    return ((g / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def round_fp4_index(x: Tensor, group: int = 32) -> Tensor:
    """Index queries and keys: E2M1 with one power-of-two scale per 32 values."""
    g = split_dim(x, -1, (-1, group))
    scale = power_of_two_scale(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126), 6.0)
    return (_e2m1(g / scale) * scale).flatten(-2)


def round_fp4_main(x: Tensor, group: int = 16) -> Tensor:
    """Compressed rows: E2M1 with one E4M3 scale per 16 values."""
    g = split_dim(x, -1, (-1, group))
    scale = (g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6).to(torch.float8_e4m3fn).float()
    return (_e2m1(g / scale) * scale).flatten(-2)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value, with the gradient of ``x``."""
    return x + (rounded - x).detach()


def next_primes(start: int, count: int, taken: set[int]) -> list[int]:
    """The next ``count`` primes above ``start`` that are not in ``taken``; they are added to it."""
    found: list[int] = []
    candidate = start
    while len(found) < count:
        candidate += 1
        if candidate in taken or candidate < 2 or any(candidate % d == 0 for d in range(2, math.isqrt(candidate) + 1)):
            continue
        found.append(candidate)
        taken.add(candidate)
    return found
