"""The lightning indexer of V4.1: scores of compressed positions, candidate blocks, and the top-k selection.

Legend: T tokens, G groups of Q consecutive tokens of one sequence, B sequences, J compressed positions of the longest sequence,
H index heads, I index dimension, N rows of the flat key cache, K selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component

_TILE_ELEMENTS_CPU = 1 << 21
_TILE_ELEMENTS_DEVICE = 1 << 27
_GROUP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """Tokens of a ragged batch cut into groups that share one sequence's keys, so that keys are gathered once per group.

    tokens_GQ names each group's tokens (unused places repeat token 0), sequences_G its sequence, places_T the place of every token
    in the flattened [G * Q]. ``tokens_GQ`` is None where groups are single tokens in order.
    """

    sequences_G: Tensor
    size: int
    tokens_GQ: Tensor | None = None
    places_T: Tensor | None = None


@component("indexer")
def token_groups(query_starts_B1: Tensor, seq_of_token_T: Tensor, num_sequences: int, max_query_len: int) -> TokenGroups:
    """Cut a packed batch into groups without reading the device: the number of groups is a bound, some may be unused."""
    num_tokens = seq_of_token_T.shape[0]
    if max_query_len == 1:
        return TokenGroups(seq_of_token_T, 1)
    device = seq_of_token_T.device
    if num_sequences * max_query_len <= 2 * num_tokens and max_query_len <= 2 * _GROUP_TOKENS:
        size, bound = max_query_len, num_sequences  # near-uniform short queries (speculation): one group a sequence
    else:
        size, bound = _GROUP_TOKENS, num_tokens // _GROUP_TOKENS + num_sequences
    counts_B = (query_starts_B1[1:] - query_starts_B1[:-1] + size - 1) // size
    first_group_B = counts_B.cumsum(0) - counts_B
    tokens_T = torch.arange(num_tokens, device=device)
    places_T = first_group_B[seq_of_token_T] * size + tokens_T - query_starts_B1[seq_of_token_T]
    tokens_P = torch.zeros(bound * size, dtype=torch.int64, device=device).index_copy_(0, places_T, tokens_T)
    tokens_GQ = tokens_P.view(bound, size)
    return TokenGroups(seq_of_token_T[tokens_GQ[:, 0]], size, tokens_GQ, places_T)


@component("indexer")
def index_scores(q_THI: Tensor, weights_TH: Tensor, keys_NI: Tensor, rows_BJ: Tensor, groups: TokenGroups) -> Tensor:
    """``score[t, j] = sum_h w[t, h] * relu(q[t, h] . key[j])`` float32 [T, J] over the keys of each token's own sequence.

    rows_BJ int64: flat key row of every compressed position of a sequence. Positions a token must not see are not masked here.
    """
    _, num_heads, dim = q_THI.shape
    on_cpu = q_THI.device.type == "cpu"
    if on_cpu:  # small bfloat16 products are slow there, and bfloat16 scores tie, which leaves the top-k to the order of the batch
        q_THI, weights_TH = q_THI.float(), weights_TH.float()
    num_groups, size = groups.sequences_G.shape[0], groups.size
    num_positions = rows_BJ.shape[1]
    budget = _TILE_ELEMENTS_CPU if on_cpu else _TILE_ELEMENTS_DEVICE
    step = max(1, budget // max(1, num_positions * (dim + size * num_heads)))
    out = []
    for start in range(0, max(num_groups, 1), step):
        stop = min(start + step, num_groups)
        keys_GJI = functional.embedding(rows_BJ[groups.sequences_G[start:stop]], keys_NI).to(q_THI.dtype)
        if groups.tokens_GQ is None:
            q, weights = q_THI[start:stop], weights_TH[start:stop]
        else:
            tokens = groups.tokens_GQ[start:stop]
            q, weights = q_THI[tokens], weights_TH[tokens]
        count = stop - start
        dots = torch.bmm(q.reshape(count, size * num_heads, dim), keys_GJI.mT).relu_()
        dots = dots.view(count * size, num_heads, num_positions)
        out.append(torch.bmm(weights.reshape(count * size, 1, num_heads), dots).squeeze(1).float())
    scores_PJ = out[0] if len(out) == 1 else torch.cat(out)
    return scores_PJ if groups.places_T is None else scores_PJ[groups.places_T]


@component("indexer")
def mask_invisible(scores_TJ: Tensor, visible_T: Tensor) -> Tensor:
    """Scores with -inf at positions j >= visible[t]."""
    steps_J = torch.arange(scores_TJ.shape[1], device=scores_TJ.device)
    return scores_TJ.masked_fill(steps_J >= visible_T.unsqueeze(-1), float("-inf"))


@component("indexer")
def candidate_blocks(scores_TJ: Tensor, visible_T: Tensor, block_size: int, top_blocks: int) -> Tensor:
    """Positions [T, J] (bool) inside the ``top_blocks`` best blocks of ``block_size`` consecutive positions.

    scores_TJ is masked (-inf where invisible); a block scores its maximum; the block of the newest visible position is pinned in.
    Only visible positions are kept; a token that sees nothing keeps nothing.
    """
    num_tokens, num_positions = scores_TJ.shape
    num_blocks = -(-num_positions // block_size)
    padded = functional.pad(scores_TJ, (0, num_blocks * block_size - num_positions), value=float("-inf"))
    block_TN = padded.view(num_tokens, num_blocks, block_size).amax(-1)
    newest_T1 = ((visible_T - 1).clamp_min(0) // block_size).unsqueeze(-1)
    pinned_T1 = torch.where(visible_T > 0, float("inf"), float("-inf")).unsqueeze(-1)
    best = block_TN.scatter(1, newest_T1, pinned_T1.to(block_TN.dtype)).topk(min(top_blocks, num_blocks), dim=-1, sorted=False)
    keep_TN = torch.zeros_like(block_TN, dtype=torch.bool).scatter_(1, best.indices, best.values > float("-inf"))
    keep_TJ = keep_TN.unsqueeze(-1).expand(-1, -1, block_size).reshape(num_tokens, -1)[:, :num_positions]
    return keep_TJ & (scores_TJ > float("-inf"))


@component("indexer")
def top_k_positions(scores_TJ: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Positions [T, K] of the best scores (any order) and whether each is a real one (score > -inf), K = min(top_k, J)."""
    best = scores_TJ.topk(min(top_k, scores_TJ.shape[1]), dim=-1, sorted=False)
    return best.indices, best.values > float("-inf")
