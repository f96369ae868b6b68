"""The arithmetic of sampling on packed rows: counter-based uniforms, penalties, filters, inverse CDF, draft verification.

Pure functions of tensors (legend in engine.model.batch; I emitting items, K drafts, r a subset of the R rows). Every result
of a row depends on that row alone, so a request's tokens do not depend on which others share its step.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_SORT_CANDIDATES = 256  # CPU: a partial top-k is 20 times cheaper than a full sort, and nearly always holds the nucleus
_MIN_TEMPERATURE = 1e-6  # below it fp32 quotients overflow; the distribution is a point mass long before


class Draw(IntEnum):
    """What a uniform decides; draws of one output position are independent across kinds."""

    SAMPLE = 1
    ACCEPT = 2
    DRAFT = 3


def _mix64(x: Tensor) -> Tensor:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014) on int64 with wrap-around; ``& mask`` makes the shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seeds: Tensor, positions: Tensor, draw: Draw) -> Tensor:
    """One float32 in [0, 1) per element, a pure function of (seed, output position, kind). Both inputs int64, broadcast."""
    golden = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, splitmix64's odd increment
    offset = (int(draw) * golden + 2**63) % 2**64 - 2**63  # wrapped here: torch takes no Python int beyond int64
    state = _mix64(_mix64(seeds + offset) + positions * golden)
    return ((state >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24  # 24 bits: exact in float32, and never 1


def penalised(
    logits_rV: Tensor, prompt_seen_rV: Tensor, output_counts_rV: Tensor, repetition_r: Tensor, presence_r: Tensor, frequency_r: Tensor
) -> Tensor:
    """Repetition (over prompt and output, multiplicative), then presence and frequency (over output, subtractive)."""
    in_output = output_counts_rV > 0
    penalty = torch.where(prompt_seen_rV | in_output, repetition_r.unsqueeze(1), 1.0)
    logits_rV = torch.where(logits_rV > 0, logits_rV / penalty, logits_rV * penalty)
    return logits_rV - frequency_r.unsqueeze(1) * output_counts_rV - presence_r.unsqueeze(1) * in_output


def masked(logits_rV: Tensor, allowed_rW: Tensor) -> Tensor:
    """-inf for every token v whose bit v % 32 of the int32 word v // 32 is 0."""
    vocab_size = logits_rV.shape[1]
    # A byte at a time from a table: ten times cheaper on a CPU than shifting out each bit.
    bytes_rB = allowed_rW.view(torch.uint8)[:, : -(-vocab_size // 8)]
    bias_rB8 = functional.embedding(bytes_rB.to(torch.int32), _byte_biases(logits_rV.device))
    return bias_rB8.flatten(1)[:, :vocab_size].add_(logits_rV)


@cache
def _byte_biases(device: torch.device) -> Tensor:
    """[256, 8]: 0 where bit k of the byte is set, else -inf."""
    bits_B8 = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return torch.zeros((256, 8)).masked_fill_(bits_B8 == 0, -torch.inf).to(device)


def _prefix_lengths(values_rC: Tensor, total_r: Tensor, top_k_r: Tensor, top_p_r: Tensor, vocab_size: int) -> Tensor:
    """How many of the descending ``values_rC`` (maximum 0) the top-k and then the top-p filter keep; at least 1.

    ``total_r`` is the row's whole sum of exponentials, the normaliser where top-k is off. A result of C with C < V means
    "at least C".
    """
    rank = torch.arange(values_rC.shape[1], device=values_rC.device)
    k_r = torch.where(top_k_r > 0, top_k_r, vocab_size)
    inside_rC = rank < k_r.unsqueeze(1)
    mass_rC = values_rC.exp() * inside_rC
    total_r = torch.where(k_r < vocab_size, mass_rC.sum(1), total_r)
    before_rC = mass_rC.cumsum(1) - mass_rC
    nucleus_rC = (before_rC < (top_p_r * total_r).unsqueeze(1)) | (top_p_r >= 1.0).unsqueeze(1)
    lengths_r = (inside_rC & nucleus_rC).sum(1).clamp_min(1)
    # Where top-k reaches past the candidates its mass, and so the nucleus, is unknown.
    num_candidates = values_rC.shape[1]
    return torch.where((k_r > num_candidates) & (k_r < vocab_size), num_candidates, lengths_r)


def _keep_prefix(scaled_rV: Tensor, values_rC: Tensor, lengths_r: Tensor) -> Tensor:
    """Mask all but each row's ``lengths_r`` largest entries; of entries equal to the last kept one, the lowest ids stay."""
    cut_r1 = values_rC.gather(1, (lengths_r - 1).unsqueeze(1))
    num_tied_r1 = lengths_r.unsqueeze(1) - (values_rC > cut_r1).sum(1, keepdim=True)
    tied_rV = scaled_rV == cut_r1
    keep_rV = (scaled_rV > cut_r1) | (tied_rV & (tied_rV.cumsum(1, dtype=torch.int32) <= num_tied_r1))
    return scaled_rV.masked_fill(~keep_rV, -torch.inf)


def _filter_top(scaled_rV: Tensor, total_r: Tensor, top_k_r: Tensor, top_p_r: Tensor, num_candidates: int) -> Tensor:
    """Top-k and top-p from the ``num_candidates`` largest; rows that need more are done again with 16 times as many."""
    vocab_size = scaled_rV.shape[1]
    if num_candidates * 4 > vocab_size:
        values_rV = scaled_rV.sort(dim=1, descending=True).values
        return _keep_prefix(scaled_rV, values_rV, _prefix_lengths(values_rV, total_r, top_k_r, top_p_r, vocab_size))
    values_rC = scaled_rV.topk(num_candidates, dim=1).values
    lengths_r = _prefix_lengths(values_rC, total_r, top_k_r, top_p_r, vocab_size)
    result_rV = _keep_prefix(scaled_rV, values_rC, lengths_r)
    short = (lengths_r == num_candidates).nonzero().squeeze(1)
    if len(short):
        result_rV[short] = _filter_top(scaled_rV[short], total_r[short], top_k_r[short], top_p_r[short], num_candidates * 16)
    return result_rV


def _filter(scaled_rV: Tensor, top_k_r: Tensor, top_p_r: Tensor) -> Tensor:
    # Elsewhere a full sort is cheap and the question whether a row is short would wait for the device.
    candidates = _SORT_CANDIDATES if scaled_rV.device.type == "cpu" else scaled_rV.shape[1]
    return _filter_top(scaled_rV, scaled_rV.exp().sum(1), top_k_r, top_p_r, candidates)


def filtered_probs(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor | None = None,
    top_p_R: Tensor | None = None,
    min_p_R: Tensor | None = None,
    top_rows: Tensor | None = None,
) -> Tensor:
    """The distribution [R, V] a request samples from: temperature, then top-k, then top-p of what is left, then min-p.

    A filter is None where no row uses it; ``top_rows`` are the rows that use top-k or top-p, None for all. Rows need a finite
    maximum (else they come out NaN). Temperatures are positive; values near 0 are treated as 1e-6.
    """
    scaled_RV = logits_RV.to(torch.float32)
    scaled_RV = (scaled_RV - scaled_RV.amax(1, keepdim=True)).div_(temperature_R.clamp_min(_MIN_TEMPERATURE).unsqueeze(1))
    if top_k_R is not None or top_p_R is not None:
        top_k_R = torch.zeros_like(temperature_R, dtype=torch.int64) if top_k_R is None else top_k_R
        top_p_R = torch.ones_like(temperature_R) if top_p_R is None else top_p_R
        if top_rows is None:
            scaled_RV = _filter(scaled_RV, top_k_R, top_p_R)
        else:
            scaled_RV[top_rows] = _filter(scaled_RV[top_rows], top_k_R[top_rows], top_p_R[top_rows])
    if min_p_R is not None:
        scaled_RV.masked_fill_(scaled_RV < min_p_R.log().unsqueeze(1), -torch.inf)  # the maximum is 0, so this is p < min_p * p_max
    return scaled_RV.softmax(1)


def inverse_cdf(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """The token [R] at quantile ``uniforms_R`` of each row of non-negative, not necessarily normalised weights."""
    cdf_RV = weights_RV.cumsum(1)
    total_R1 = cdf_RV[:, -1:]
    # Strictly below the total even after rounding: the answer is then the first entry above it, which has weight > 0.
    target_R1 = torch.minimum(uniforms_R.unsqueeze(1) * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1).clamp_max_(weights_RV.shape[1] - 1)


def accept_sampled(p_draft_IK: Tensor, q_draft_IK: Tensor | None, uniforms_IK: Tensor) -> Tensor:
    """Speculative acceptance u * q(d) < p(d) (arXiv 2211.17192); ``q`` None for drafts that are point masses."""
    return (uniforms_IK if q_draft_IK is None else uniforms_IK * q_draft_IK) < p_draft_IK


def residual(p_IV: Tensor, q_IV: Tensor) -> Tensor:
    """max(p - q, 0), unnormalised; p itself where rounding left nothing."""
    rest_IV = (p_IV - q_IV).clamp_min_(0.0)
    return torch.where(rest_IV.sum(1, keepdim=True) > 0, rest_IV, p_IV)
