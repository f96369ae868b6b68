"""One V4.1 attention sublayer on the paged cache: window row, compressed row, attention, output projection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import AttentionRole, V41Spec
from engine.kernels.attention_sparse import sparse_attention, window_attention
from engine.kernels.compressor import compress_pair, compress_single
from engine.kernels.kv_write import kv_write
from engine.kernels.norm import rms_norm
from engine.kernels.rope import rope_
from engine.kernels.rounding import round_fp4_index, round_fp4_kv, round_fp8
from engine.kernels.timing import component
from engine.model.v41.cache import V41Cache
from engine.model.v41.selection import select
from engine.model.v41.step import Pass
from engine.model.v41.weights import LayerWeights
from engine.parallel.groups import Group
from engine.parallel.tensor import all_reduce


@component("projection")
def attention(x_TD: Tensor, layer: LayerWeights, run: Pass, only_T: Tensor | None = None) -> Tensor:
    """The sublayer's output [T, D]; writes the step's rows into the cache. ``run.step`` carries the selection from layer to layer.

    ``only_T`` (indices of tokens) limits the queries, not the rows written: the output and ``run.step`` are of those tokens from then on.
    """
    spec, step, cache = run.spec, run.step, run.cache
    parts = functional.linear(x_TD, layer.in_proj).split_with_sizes(layer.in_sizes, dim=-1)
    rotation = step.rotation_compressed if layer.ratio else step.rotation_plain
    stage_window_rows(parts[1], layer, spec, rotation, step.stage_start, cache, run.rounding)
    if layer.role is AttentionRole.FULL:
        _write_compressed(x_TD, parts, layer, run)
    low_TQ = parts[0]
    if only_T is not None:
        parts = tuple(part[only_T] for part in parts)
        low_TQ = parts[0]
        step = run.step = step.narrowed(only_T)
        rotation = step.rotation_compressed if layer.ratio else step.rotation_plain
    low_TQ = rms_norm(low_TQ, layer.q_norm, spec.rms_norm_eps)
    if layer.role in (AttentionRole.FULL, AttentionRole.REINDEX):
        select(low_TQ, parts[2], layer, run)
    q_THC = functional.linear(low_TQ, layer.wq_b).view(low_TQ.shape[0], layer.sink.shape[0], spec.head_dim)
    rope_(q_THC, rotation)
    scale = spec.head_dim**-0.5
    if layer.ratio == 0 or step.selection is None:
        window_NC = cache.window_LNC[layer.layer]
        out_THC = window_attention(q_THC, window_NC, step.window_rows_TW, step.window_bias_TW, layer.sink, scale)
    else:
        rows_TX = step.selection.for_layer(layer.layer, step.window_rows_TW.shape[1], cache.layer_rows)
        out_THC = sparse_attention(q_THC, cache.rows_NC, rows_TX, step.selection.bias_TX, layer.sink, scale)
    return project_out(out_THC, layer, rotation, run.tensor)


@component("kv_write")
def stage_window_rows(
    kv_TC: Tensor, layer: LayerWeights, spec: V41Spec, rotation: Tensor, stage_start: int, cache: V41Cache, rounding: bool
) -> None:
    """Norm, rotate, round and stage a layer's window rows; rounding comes last and covers the rotary channels too."""
    rows_TC = rope_(rms_norm(kv_TC, layer.kv_norm, spec.rms_norm_eps), rotation)
    if rounding:
        rows_TC = round_fp8(rows_TC)
    cache.window_LNC[layer.layer, stage_start : stage_start + rows_TC.shape[0]] = rows_TC


@component("projection")
def project_out(out_THC: Tensor, layer: LayerWeights, rotation: Tensor, tensor: Group | None) -> Tensor:
    """Rotate the heads back, project each group of heads to its low rank, then all of it to the hidden size: [T, D].

    Ranks of ``tensor`` hold some of the groups each, and add up what these give.
    """
    rope_(out_THC, rotation, inverse=True)
    groups_GTX = out_THC.reshape(out_THC.shape[0], *layer.wo_a.shape[:2]).transpose(0, 1)
    low_TX = torch.bmm(groups_GTX, layer.wo_a).transpose(0, 1).flatten(1)
    out_TD = functional.linear(low_TX, layer.wo_b)
    return out_TD if tensor is None else all_reduce(tensor, out_TD)


@component("compressor")
def _write_compressed(x_TD: Tensor, parts: tuple[Tensor, ...], layer: LayerWeights, run: Pass) -> None:
    """Main row and index key of every group the step completes. The key is made from the latent before it is rotated."""
    spec, step, cache = run.spec, run.step, run.cache
    assert layer.compress_norm is not None
    assert layer.index_wk is not None
    assert layer.index_k_norm is not None
    if layer.ratio == 2:
        assert layer.pair_proj is not None
        assert step.pair_previous_T is not None
        assert step.rotation_pair is not None
        pairs_NU = cache.pairs_LNU[cache.pair_layers.index(layer.layer)]
        current_TU = functional.linear(x_TD.float(), layer.pair_proj)
        pairs_NU[cache.pair_stage_start : cache.pair_stage_start + step.num_tokens] = current_TU
        previous_TU = pairs_NU.index_select(0, step.pair_previous_T)
        latent_TC = compress_pair(previous_TU, current_TU, layer.compress_norm, spec.rms_norm_eps, x_TD.dtype)
        rotation = step.rotation_pair
    else:
        latent_TC = compress_single(parts[3], layer.compress_norm, spec.rms_norm_eps)
        rotation = step.rotation_compressed
    key_TI = rms_norm(functional.linear(latent_TC, layer.index_wk), layer.index_k_norm, spec.rms_norm_eps)
    key_TI = rope_(key_TI, rotation)
    main_TC = rope_(latent_TC, rotation)
    if run.rounding:
        key_TI, main_TC = round_fp4_index(key_TI), round_fp4_kv(main_TC)
    rows_T = step.ratios[layer.ratio].write_rows_T
    kv_write(cache.main[layer.layer], rows_T, main_TC)
    kv_write(cache.keys[layer.layer], rows_T, key_TI)
