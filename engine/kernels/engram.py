"""Engram: hashed n-gram rows, their lookup, and the gate that adds them to the streams.

Legend: T tokens, G = largest n-gram order, E Engram layers, C columns (orders 2..G times heads), S streams, D hidden.
Source: TileKernels' torch Engram reference and the V4.1 release (compressed token classes, no convolution).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component


@component("engram.fetch")
def engram_hash(classes_TG: Tensor, multipliers_EG: Tensor, primes_EC: Tensor, offsets_EC: Tensor) -> Tensor:
    """Row ids [T, E, C] (int64, offsets included) from the classes of a token and of its G - 1 predecessors.

    classes_TG[t, s] is the class of token t - s, or the pad class where there is none. H_1 = c_0 m_0, H_n = H_{n-1} xor
    c_{n-1} m_{n-1} (int64); row of (order n, head) = H_n mod prime + offset, orders ascending, heads inside.
    """
    products_TEG = classes_TG.unsqueeze(1) * multipliers_EG
    mixed = products_TEG[..., 0]
    orders = []
    for step in range(1, products_TEG.shape[-1]):
        mixed = mixed ^ products_TEG[..., step]
        orders.append(mixed)
    hashes_TEN1 = torch.stack(orders, dim=-1).unsqueeze(-1)
    shape = (primes_EC.shape[0], len(orders), -1)
    return (hashes_TEN1 % primes_EC.view(shape) + offsets_EC.view(shape)).flatten(-2)


@component("engram.fetch")
def engram_classes(
    history: Tensor, rows_T: Tensor, positions_T: Tensor, token_map_V: Tensor, pad_class: int, max_ngram: int, image_token_id: int | None
) -> Tensor:
    """Classes [T, G] of each token and its predecessors, read from the token history.

    history [S, L] token ids by slot and position, rows_T the slot of each token. A predecessor before position 0 counts as pad, and so
    does everything at or behind an image token (sticky: an image between two tokens cuts the look-back).
    """
    steps_G = torch.arange(max_ngram, device=positions_T.device)
    positions_TG = positions_T.unsqueeze(-1) - steps_G
    tokens_TG = history.view(-1)[rows_T.unsqueeze(-1) * history.shape[1] + positions_TG.clamp_min(0)]
    blocked_TG = positions_TG < 0
    if image_token_id is not None:
        blocked_TG = blocked_TG | ((tokens_TG == image_token_id).cumsum(-1) > 0)
    return functional.embedding(tokens_TG, token_map_V.unsqueeze(-1)).squeeze(-1).masked_fill(blocked_TG, pad_class)


@component("engram.fetch")
def engram_gather(row_ids_TC: Tensor, table_NI: Tensor) -> Tensor:
    """The rows of a token side by side: [T, C * I]."""
    return functional.embedding(row_ids_TC, table_NI).flatten(1)


@component("engram.gate")
def engram_gate(streams_TSD: Tensor, kv_TD: Tensor, qk_weight_SD: Tensor, eps: float, open_T: Tensor | None = None) -> Tensor:
    """Streams plus the gated value: ``X_s + sigmoid(sign(d_s) sqrt(max(|d_s|, 1e-6))) * v`` in float32, in the streams' dtype.

    kv_TD [T, (S + 1) * D]: one key per stream, then the value v. d_s = <rms(X_s) * qk_weight_s, rms(k_s)> / sqrt(D), where
    qk_weight is the product of the query and key gains (float32). ``open_T`` (float) is 0 for tokens that pass unchanged.
    """
    num_tokens, num_streams, hidden = streams_TSD.shape
    wide_TSD = streams_TSD.float()
    kv_TUD = kv_TD.float().view(num_tokens, num_streams + 1, hidden)
    keys_TSD = functional.rms_norm(kv_TUD[:, :num_streams], (hidden,), None, eps)
    queries_TSD = functional.rms_norm(wide_TSD, (hidden,), None, eps)
    dots_TS1 = (queries_TSD * keys_TSD * qk_weight_SD).sum(-1, keepdim=True) * hidden**-0.5
    gates_TS1 = torch.sigmoid(dots_TS1.sign() * dots_TS1.abs().clamp_min(1e-6).sqrt())
    if open_T is not None:
        gates_TS1 = gates_TS1 * open_T.view(-1, 1, 1)
    return torch.addcmul(wide_TSD, gates_TS1, kv_TUD[:, num_streams:]).to(streams_TSD.dtype)
