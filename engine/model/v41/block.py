"""A V4.1 layer around its two sublayers: shifted hyper-connections, the attention callback, and the mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import V41Spec
from engine.kernels.experts import expert_form, expert_gemm, expert_gemm_dense, expert_gemm_single, gated_ffn
from engine.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix
from engine.kernels.norm import rms_norm
from engine.kernels.router import router
from engine.kernels.timing import component
from engine.model.v41.weights import LayerWeights, MoeWeights
from engine.parallel.experts import RoutedExperts, forced_ids
from engine.parallel.tensor import all_reduce


def block(
    streams_TSD: Tensor,
    pre_TS: Tensor,
    layer: LayerWeights,
    spec: V41Spec,
    attend: Callable[[Tensor], Tensor],
    token_kind_T: Tensor | None,
    only_T: Tensor | None = None,
    num_tokens: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Streams and pre after the layer. Each sublayer collapses the streams with the *previous* sublayer's pre (the shift).

    ``only_T``: tokens the caller wants the result of; ``attend`` sees all of them, and returns (and what follows is for) those alone.
    ``num_tokens``: how many of these each data rank has, where experts are spread over ranks.
    """
    iterations, eps, norm_eps = spec.hc_sinkhorn_iters, spec.hc_eps, spec.rms_norm_eps
    dtype = layer.in_proj.dtype  # the streams may be wider
    out_TD = attend(rms_norm(mhc_collapse(pre_TS, streams_TSD), layer.attn_norm, norm_eps).to(dtype))
    if only_T is not None:
        streams_TSD = streams_TSD[only_T]
        token_kind_T = None if token_kind_T is None else token_kind_T[only_T]
    next_pre_TS, post_TS, comb_TSS = mhc_mix(streams_TSD, layer.hc_attn_fn, layer.hc_attn_base, iterations, eps, norm_eps)
    streams_TSD = mhc_expand(streams_TSD, out_TD, post_TS, comb_TSS)
    pre_TS = next_pre_TS
    next_pre_TS, post_TS, comb_TSS = mhc_mix(streams_TSD, layer.hc_ffn_fn, layer.hc_ffn_base, iterations, eps, norm_eps)
    x_TD = rms_norm(mhc_collapse(pre_TS, streams_TSD), layer.ffn_norm, norm_eps).to(dtype)
    streams_TSD = mhc_expand(streams_TSD, moe(x_TD, layer.moe, spec, token_kind_T, num_tokens), post_TS, comb_TSS)
    return streams_TSD, next_pre_TS


_shared_expert = component("shared_expert")(gated_ffn)


@component("expert_gemm")
def moe(x_TD: Tensor, weights: MoeWeights, spec: V41Spec, token_kind_T: Tensor | None, num_tokens: Sequence[int] = ()) -> Tensor:
    """Routed experts plus the shared one [T, D]. The three ways of computing it give the same numbers up to rounding."""
    bias = weights.bias
    if bias.dim() == 2:
        assert token_kind_T is not None
        bias = functional.embedding(token_kind_T, bias)
    chosen_TK, ids_TK = router(x_TD, weights.gate, bias, weights.experts_per_token, spec.routed_scaling_factor)
    if weights.routing != "model":
        ids_TK = forced_ids(weights.routing, ids_TK, weights.num_routed, weights.spread, num_tokens)
    limit = spec.swiglu_limit
    if weights.spread is not None:
        return _spread(x_TD, chosen_TK, ids_TK, weights, weights.spread, limit, num_tokens)
    form = expert_form(x_TD.shape[0], weights.experts_per_token, weights.w2)
    if form == "single":
        ids_K = torch.cat((ids_TK[0], weights.shared_ids))
        weights_K = torch.cat((chosen_TK[0], weights.shared_ones))
        return expert_gemm_single(x_TD, weights_K, ids_K, weights.w13, weights.w2, limit)
    if form == "dense":
        return expert_gemm_dense(x_TD, chosen_TK, ids_TK, weights.w13, weights.w2, weights.always, limit)
    num_routed = weights.num_routed
    routed_TD = expert_gemm(x_TD, chosen_TK, ids_TK, weights.w13[:num_routed], weights.w2[:num_routed], limit)
    if weights.shared_w13 is None or weights.shared_w2 is None:
        return routed_TD
    return routed_TD + _shared_expert(x_TD, weights.shared_w13, weights.shared_w2, limit)


def _spread(
    x_TD: Tensor,
    chosen_TK: Tensor,
    ids_TK: Tensor,
    weights: MoeWeights,
    spread: RoutedExperts,
    limit: float,
    num_tokens: Sequence[int],
) -> Tensor:
    """The same over several ranks; one sum over the tensor group completes routed and shared experts together."""
    out_TD = spread(x_TD, chosen_TK, ids_TK, num_tokens)
    if weights.shared_w13 is not None and weights.shared_w2 is not None:
        out_TD = out_TD + _shared_expert(x_TD, weights.shared_w13, weights.shared_w2, limit)
    tensor = spread.groups.tensor
    return out_TD if tensor is None else all_reduce(tensor, out_TD)
