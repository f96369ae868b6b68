"""Attention of V4.1: many query heads over one shared latent row per position (key = value), with a sink logit per head.

Legend: T tokens, H heads, C head dimension, N rows of a flat cache, W window columns, K selected compressed rows.
A row table points each token at the cache rows it attends. Its first window column belongs to the sink: it must point at a row of
zeros, and its score is replaced by the head's sink logit, so that softmax counts it and the value adds nothing.
Masked columns must point at a finite row (the zero row) and carry bias -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Gathered elements a tile may hold: on a CPU a tile should stay near the last-level cache, on a GPU launches should stay few.
_TILE_ELEMENTS_CPU = 1 << 20
_TILE_ELEMENTS_DEVICE = 1 << 27
# oneDNN's bfloat16 batched products cost about 20 us before they do anything; below this size float32 is faster (and more exact).
_UPCAST_ELEMENTS_CPU = 1 << 17


def window_attention(q_THC: Tensor, window_NC: Tensor, rows_TW: Tensor, bias_TW: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    """Sliding-window attention; returns [T, H, C] in the dtype of q.

    rows_TW int64 rows of ``window_NC`` (column 0: the zero row), bias_TW 0 or -inf in q's dtype, sink_H natural-log units, unscaled.
    p is proportional to exp(q k scale); the denominator has exp(sink) more. Xiao et al. 2309.17453 for sinks; gpt-oss's learned form.
    """
    width = rows_TW.shape[1] * window_NC.shape[1]
    out = []
    for start, stop in _tiles(q_THC, width):
        kv_TWC = functional.embedding(rows_TW[start:stop], window_NC)
        out.append(_attend(q_THC[start:stop], kv_TWC, bias_TW[start:stop], sink_H, scale))
    return out[0] if len(out) == 1 else torch.cat(out)


def sparse_attention(
    q_THC: Tensor,
    window_NC: Tensor,
    window_rows_TW: Tensor,
    compressed_NC: Tensor,
    compressed_rows_TK: Tensor,
    bias_TX: Tensor,
    sink_H: Tensor,
    scale: float,
) -> Tensor:
    """One softmax over a token's window rows and its selected compressed rows; X = W + K, otherwise as ``window_attention``."""
    width = bias_TX.shape[1] * window_NC.shape[1]
    out = []
    for start, stop in _tiles(q_THC, width):
        window_TWC = functional.embedding(window_rows_TW[start:stop], window_NC)
        compressed_TKC = functional.embedding(compressed_rows_TK[start:stop], compressed_NC)
        kv_TXC = torch.cat((window_TWC, compressed_TKC), dim=1)
        out.append(_attend(q_THC[start:stop], kv_TXC, bias_TX[start:stop], sink_H, scale))
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend(q_THC: Tensor, kv_TXC: Tensor, bias_TX: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    dtype = q_THC.dtype
    if dtype != torch.float32 and q_THC.device.type == "cpu" and kv_TXC.numel() <= _UPCAST_ELEMENTS_CPU:
        q_THC, kv_TXC, bias_TX = q_THC.float(), kv_TXC.float(), bias_TX.float()
    scores_THX = torch.baddbmm(bias_TX.unsqueeze(1), q_THC, kv_TXC.mT, alpha=scale)
    scores_THX[:, :, 0] = sink_H
    return torch.bmm(torch.softmax(scores_THX, dim=-1), kv_TXC).to(dtype)


def _tiles(q_THC: Tensor, elements_per_token: int) -> list[tuple[int, int]]:
    """Token ranges whose gathered rows fit the tile; one range for an empty or small batch."""
    budget = _TILE_ELEMENTS_CPU if q_THC.device.type == "cpu" else _TILE_ELEMENTS_DEVICE
    size = max(1, budget // max(1, elements_per_token))
    num_tokens = q_THC.shape[0]
    return [(start, min(start + size, num_tokens)) for start in range(0, max(num_tokens, 1), size)]
