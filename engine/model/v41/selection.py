"""Which compressed rows an index source's tokens attend, until the next index source chooses anew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import AttentionRole
from engine.kernels.indexer import candidate_blocks, index_scores, mask_invisible, top_k_positions
from engine.kernels.rope import rope_
from engine.kernels.rounding import round_fp4_index
from engine.kernels.timing import component
from engine.model.v41.step import Pass, RatioStep, Selection
from engine.model.v41.weights import LayerWeights


@component("indexer")
def select(low_TQ: Tensor, weights_TH: Tensor, layer: LayerWeights, run: Pass) -> None:
    """Set ``run.step.selection``, and at the candidate source ``run.step.candidates_TJ``.

    While no sequence sees more positions than the top-k takes, every visible one is chosen and nothing is scored. A candidate set is
    built only once there are more blocks than it keeps.
    """
    spec, step = run.spec, run.step
    ratio = step.ratios[layer.ratio]
    needs_candidates = False
    if layer.layer == spec.candidate_source_layer_id:
        step.candidates_TJ = None
        needs_candidates = -(-ratio.max_visible // spec.candidate_block_size) > spec.candidate_top_k_blocks
    restricted = layer.role is AttentionRole.REINDEX and step.candidates_TJ is not None
    if ratio.max_visible <= spec.index_top_k and not needs_candidates and not restricted:
        positions_TK, valid_TK = _all_visible(ratio)
        rows_TK = ratio.rows_BJ[step.seq_of_token_T]
    else:
        scores_TJ = _scores(low_TQ, weights_TH, layer, run)
        if needs_candidates:
            step.candidates_TJ = candidate_blocks(scores_TJ, ratio.visible_T, spec.candidate_block_size, spec.candidate_top_k_blocks)
        if restricted:
            assert step.candidates_TJ is not None
            scores_TJ = scores_TJ.masked_fill(~step.candidates_TJ, float("-inf"))
        positions_TK, valid_TK = top_k_positions(scores_TJ, spec.index_top_k)
        rows_TK = ratio.rows_BJ[step.seq_of_token_T.unsqueeze(-1), positions_TK]
    name = f"topk.layer{layer.layer}"
    if name in run.capture:
        step.captures[name] = _sorted_positions(positions_TK, valid_TK, spec.index_top_k)
    if ratio.max_visible == 0:
        step.selection = None
        return
    source = spec.kv_source(layer.layer)
    compressed_TK = rows_TK.masked_fill_(~valid_TK, ratio.zero_row).add_(run.cache.main_start[source])
    window_TW = step.window_rows_TW + layer.layer * run.cache.layer_rows
    bias_TX = torch.cat((step.window_bias_TW, run.builder.bias(valid_TK)), dim=-1)
    step.selection = Selection(torch.cat((window_TW, compressed_TK), dim=-1), bias_TX, layer.layer)


def _all_visible(ratio: RatioStep) -> tuple[Tensor, Tensor]:
    positions_J = torch.arange(ratio.max_visible, device=ratio.visible_T.device)
    valid_TJ = positions_J < ratio.visible_T.unsqueeze(-1)
    return positions_J.expand(valid_TJ.shape), valid_TJ


def _scores(low_TQ: Tensor, weights_TH: Tensor, layer: LayerWeights, run: Pass) -> Tensor:
    """Masked index scores [T, J]. The constant factor on the weights is left out: it is positive and only ranks matter."""
    assert layer.index_wq_b is not None
    spec, step = run.spec, run.step
    q_THI = functional.linear(low_TQ, layer.index_wq_b).view(low_TQ.shape[0], spec.index_num_heads, spec.index_head_dim)
    rope_(q_THI, step.rotation_compressed)
    if run.rounding:
        q_THI = round_fp4_index(q_THI)
    ratio = step.ratios[layer.ratio]
    scores_TJ = index_scores(q_THI, weights_TH, run.cache.keys[spec.kv_source(layer.layer)], ratio.rows_BJ, step.groups)
    return mask_invisible(scores_TJ, ratio.visible_T)


def _sorted_positions(positions_TK: Tensor, valid_TK: Tensor, top_k: int) -> Tensor:
    """Chosen positions ascending, filled with -1 to ``top_k`` columns, int32: the form that tests compare."""
    big = torch.iinfo(torch.int64).max
    ordered = positions_TK.masked_fill(~valid_TK, big).sort(dim=-1).values
    ordered = ordered.masked_fill(ordered == big, -1)[:, :top_k]
    return functional.pad(ordered, (0, top_k - ordered.shape[1]), value=-1).to(torch.int32)
