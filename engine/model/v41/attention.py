"""One V4.1 attention sublayer on the paged cache: window row, compressed row, index selection, attention, output projection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import AttentionRole, V41Spec
from engine.kernels.attention_sparse import sparse_attention, window_attention
from engine.kernels.compressor import compress_pair, compress_single
from engine.kernels.indexer import candidate_blocks, index_scores, mask_invisible, top_k_positions
from engine.kernels.kv_write import kv_write
from engine.kernels.norm import rms_norm
from engine.kernels.rope import rope_
from engine.kernels.rounding import round_fp4_index, round_fp4_kv, round_fp8
from engine.model.v41.cache import V41Cache
from engine.model.v41.step import RatioStep, Selection, StepBuilder, StepIndex
from engine.model.v41.weights import LayerWeights


def attention(
    x_TD: Tensor,
    layer: LayerWeights,
    spec: V41Spec,
    step: StepIndex,
    cache: V41Cache,
    builder: StepBuilder,
    rounding: bool,
    capture: frozenset[str],
) -> Tensor:
    """The sublayer's output [T, D]; writes the step's rows into ``cache``. ``step`` carries the selection from layer to layer."""
    parts = functional.linear(x_TD, layer.in_proj).split_with_sizes(layer.in_sizes, dim=-1)
    low_TQ = rms_norm(parts[0], layer.q_norm, spec.rms_norm_eps)
    rotation = step.rotation_compressed if layer.ratio else step.rotation_plain
    stage_window_rows(parts[1], layer, spec, rotation, step.stage_start, cache, rounding)
    if layer.role is AttentionRole.FULL:
        _write_compressed(x_TD, parts, layer, spec, step, cache, rounding)
    if layer.role in (AttentionRole.FULL, AttentionRole.REINDEX):
        _select(low_TQ, parts[2], layer, spec, step, cache, builder, rounding, capture)
    q_THC = functional.linear(low_TQ, layer.wq_b).view(x_TD.shape[0], spec.num_heads, spec.head_dim)
    rope_(q_THC, rotation)
    window_NC = cache.window_LNC[layer.layer]
    scale = spec.head_dim**-0.5
    if layer.ratio == 0 or step.selection is None:
        out_THC = window_attention(q_THC, window_NC, step.window_rows_TW, step.window_bias_TW, layer.sink, scale)
    else:
        main_NC = cache.main[spec.kv_source(layer.layer)]
        selection = step.selection
        out_THC = sparse_attention(q_THC, window_NC, step.window_rows_TW, main_NC, selection.rows_TK, selection.bias_TX, layer.sink, scale)
    return project_out(out_THC, layer, spec, rotation)


def stage_window_rows(
    kv_TC: Tensor, layer: LayerWeights, spec: V41Spec, rotation: Tensor, stage_start: int, cache: V41Cache, rounding: bool
) -> None:
    """Norm, rotate, round and stage a layer's window rows; rounding comes last and covers the rotary channels too."""
    rows_TC = rope_(rms_norm(kv_TC, layer.kv_norm, spec.rms_norm_eps), rotation)
    if rounding:
        rows_TC = round_fp8(rows_TC)
    cache.window_LNC[layer.layer, stage_start : stage_start + rows_TC.shape[0]] = rows_TC


def project_out(out_THC: Tensor, layer: LayerWeights, spec: V41Spec, rotation: Tensor) -> Tensor:
    """Rotate the heads back, project each group of heads to its low rank, then all of it to the hidden size: [T, D]."""
    rope_(out_THC, rotation, inverse=True)
    groups_GTX = out_THC.reshape(out_THC.shape[0], spec.o_groups, -1).transpose(0, 1)
    low_TX = torch.bmm(groups_GTX, layer.wo_a).transpose(0, 1).flatten(1)
    return functional.linear(low_TX, layer.wo_b)


def _write_compressed(
    x_TD: Tensor, parts: tuple[Tensor, ...], layer: LayerWeights, spec: V41Spec, step: StepIndex, cache: V41Cache, rounding: bool
) -> None:
    """Main row and index key of every group the step completes. The key is made from the latent before it is rotated."""
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
    if rounding:
        key_TI, main_TC = round_fp4_index(key_TI), round_fp4_kv(main_TC)
    rows_T = step.ratios[layer.ratio].write_rows_T
    kv_write(cache.main[layer.layer], rows_T, main_TC)
    kv_write(cache.keys[layer.layer], rows_T, key_TI)


def _select(
    low_TQ: Tensor,
    weights_TH: Tensor,
    layer: LayerWeights,
    spec: V41Spec,
    step: StepIndex,
    cache: V41Cache,
    builder: StepBuilder,
    rounding: bool,
    capture: frozenset[str],
) -> None:
    """Choose the compressed rows this layer and the Reuse layers after it attend.

    While no sequence sees more positions than the top-k takes, every visible one is chosen and nothing is scored (a pinned or missing
    candidate set cannot change that as long as all blocks are candidates).
    """
    ratio = step.ratios[layer.ratio]
    is_candidate_source = layer.layer == spec.candidate_source_layer_id
    if ratio.max_visible == 0:
        step.selection = None
        step.candidates_TJ = None if is_candidate_source else step.candidates_TJ
    else:
        num_blocks = -(-ratio.max_visible // spec.candidate_block_size)
        needs_candidates = is_candidate_source and num_blocks > spec.candidate_top_k_blocks
        if is_candidate_source:
            step.candidates_TJ = None
        restricted = layer.role is AttentionRole.REINDEX and step.candidates_TJ is not None
        if ratio.max_visible <= spec.index_top_k and not needs_candidates and not restricted:
            _select_all(step, ratio, builder)
        else:
            scores_TJ = _scores(low_TQ, weights_TH, layer, spec, step, cache, rounding)
            if needs_candidates:
                step.candidates_TJ = candidate_blocks(scores_TJ, ratio.visible_T, spec.candidate_block_size, spec.candidate_top_k_blocks)
            if restricted:
                assert step.candidates_TJ is not None
                scores_TJ = scores_TJ.masked_fill(~step.candidates_TJ, float("-inf"))
            positions_TK, valid_TK = top_k_positions(scores_TJ, spec.index_top_k)
            rows_TK = ratio.rows_BJ[step.seq_of_token_T.unsqueeze(-1), positions_TK].masked_fill_(~valid_TK, ratio.zero_row)
            _keep(step, rows_TK, valid_TK, builder)
            if f"topk.layer{layer.layer}" in capture:
                step.captures[f"topk.layer{layer.layer}"] = _sorted_positions(positions_TK, valid_TK, spec.index_top_k)
            return
    if f"topk.layer{layer.layer}" in capture:
        positions_J = torch.arange(ratio.max_visible, device=low_TQ.device)
        valid_TJ = positions_J < ratio.visible_T.unsqueeze(-1)
        step.captures[f"topk.layer{layer.layer}"] = _sorted_positions(positions_J.expand(valid_TJ.shape), valid_TJ, spec.index_top_k)


def _scores(
    low_TQ: Tensor, weights_TH: Tensor, layer: LayerWeights, spec: V41Spec, step: StepIndex, cache: V41Cache, rounding: bool
) -> Tensor:
    """Masked index scores [T, J]. The constant factor on the weights is left out: it is positive and only ranks matter."""
    assert layer.index_wq_b is not None
    q_THI = functional.linear(low_TQ, layer.index_wq_b).view(-1, spec.index_num_heads, spec.index_head_dim)
    rope_(q_THI, step.rotation_compressed)
    if rounding:
        q_THI = round_fp4_index(q_THI)
    ratio = step.ratios[layer.ratio]
    scores_TJ = index_scores(q_THI, weights_TH, cache.keys[spec.kv_source(layer.layer)], ratio.rows_BJ, step.groups)
    return mask_invisible(scores_TJ, ratio.visible_T)


def _select_all(step: StepIndex, ratio: RatioStep, builder: StepBuilder) -> None:
    positions_J = torch.arange(ratio.max_visible, device=ratio.visible_T.device)
    valid_TJ = positions_J < ratio.visible_T.unsqueeze(-1)
    rows_TJ = ratio.rows_BJ[step.seq_of_token_T].masked_fill(~valid_TJ, ratio.zero_row)
    _keep(step, rows_TJ, valid_TJ, builder)


def _keep(step: StepIndex, rows_TK: Tensor, valid_TK: Tensor, builder: StepBuilder) -> None:
    step.selection = Selection(rows_TK, torch.cat((step.window_bias_TW, builder.bias(valid_TK)), dim=-1))


def _sorted_positions(positions_TK: Tensor, valid_TK: Tensor, top_k: int) -> Tensor:
    """Chosen positions ascending, filled with -1 to ``top_k`` columns, int32: the form that tests compare."""
    big = torch.iinfo(torch.int64).max
    ordered = positions_TK.masked_fill(~valid_TK, big).sort(dim=-1).values
    ordered = ordered.masked_fill(ordered == big, -1)[:, :top_k]
    return functional.pad(ordered, (0, top_k - ordered.shape[1]), value=-1).to(torch.int32)
