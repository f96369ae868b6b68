"""Attention of V4.1: many query heads over one shared latent row per position (key = value), with a sink logit per head.

Legend: T tokens, H heads, C head dimension, N rows of a flat cache, W window columns, X all columns of a row table.
A row table points each token at the cache rows it attends. Its first column belongs to the sink: it must point at a row of
zeros, and its score is replaced by the head's sink logit, so that softmax counts it and the value adds nothing.
Masked columns must point at a finite row (the zero row) and carry bias -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component

# Gathered elements a tile may hold: on a CPU a tile should stay near the last-level cache, on a GPU launches should stay few.
_TILE_ELEMENTS_CPU = 1 << 20
_TILE_ELEMENTS_DEVICE = 1 << 27
# oneDNN's bfloat16 batched products cost about 20 us before they do anything; below this size float32 is faster (and more exact).
_UPCAST_ELEMENTS_CPU = 1 << 17


@component("attention.sparse")
def sparse_attention(q_THC: Tensor, cache_NC: Tensor, rows_TX: Tensor, bias_TX: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    """Attention of each token over the cache rows its row table names, in one softmax; returns [T, H, C] in the dtype of q.

    rows_TX int64 rows of ``cache_NC``: the sink column (a zero row), window rows, then selected compressed rows if there are any.
    bias_TX is 0 or -inf, in q's dtype; sink_H in natural-log units, unscaled. p is proportional to exp(q k scale), the denominator has
    exp(sink) more (gpt-oss's learned sinks).
    """
    return _attention(q_THC, cache_NC, rows_TX, bias_TX, sink_H, scale)


@component("attention.window")
def window_attention(q_THC: Tensor, window_NC: Tensor, rows_TW: Tensor, bias_TW: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    """The same without compressed rows: a layer whose tokens attend their window only."""
    return _attention(q_THC, window_NC, rows_TW, bias_TW, sink_H, scale)


def _attention(q_THC: Tensor, cache_NC: Tensor, rows_TX: Tensor, bias_TX: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    elements = rows_TX.shape[1] * cache_NC.shape[1]
    out = [
        _attend(q_THC[start:stop], functional.embedding(rows_TX[start:stop], cache_NC), bias_TX[start:stop], sink_H, scale)
        for start, stop in _tiles(q_THC, elements)
    ]
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
