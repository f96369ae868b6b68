"""The weights of a V4.1 checkpoint as the forward wants them: fused where they share an input, folded where that is exact.

Legend: D hidden, H heads, C head dimension, Q q_lora_rank, E experts, I expert intermediate size, S streams, Z = S * D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.sharding import RankPlace, held_part
from engine.core.specs import AttentionRole, EngramSpec, V41Spec
from engine.core.tensors import expected_tensors
from engine.kernels.mhc import mhc_fold
from engine.model.base import WeightSource
from engine.parallel.engram import EngramTables, HostTables, LocalTables, ShardedTables
from engine.parallel.experts import RoutedExperts, Routing
from engine.parallel.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """One Engram layer but for its table: wkv [(S + 1) * D, columns * dim], and the product of query and key gains [S, D]."""

    wkv: Tensor
    qk_weight: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """w13 [E + n, 2I, D] and w2 [E + n, I, D]: routed experts, then the shared one cut into n slices of width I.

    ``always`` [1, E + n] float32 is 0 for routed and 1 for shared slices. shared_w13 / shared_w2 are the shared slices as one MLP.

    Where a replica has several ranks, ``spread`` holds the routed experts of this one; the stacks are then its slots alone, without the
    shared experts, of which this rank has 1 / tp of the width. ``routing`` other than
    "model" overrides the router's choice, for measurements.
    """

    gate: Tensor
    bias: Tensor  # [E], or [2, E] (text, image) where a model knows image tokens
    w13: Tensor
    w2: Tensor
    always: Tensor
    shared_ids: Tensor  # [n] the shared slices' places in the stacks
    shared_ones: Tensor  # [n] their weights
    num_routed: int
    experts_per_token: int
    shared_w13: Tensor | None
    shared_w2: Tensor | None
    routing: Routing
    spread: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A backbone or draft layer. ``in_proj`` stacks wq_a, wkv and, where the layer has them, weights_proj and a ratio-1 compressor."""

    layer: int
    ratio: int
    role: AttentionRole
    in_proj: Tensor
    in_sizes: tuple[int, ...]
    q_norm: Tensor
    wq_b: Tensor
    kv_norm: Tensor
    sink: Tensor
    wo_a: Tensor  # [groups, heads a group * C, o_lora_rank]
    wo_b: Tensor
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn_fn: Tensor
    hc_attn_base: Tensor
    hc_ffn_fn: Tensor
    hc_ffn_base: Tensor
    moe: MoeWeights
    pair_proj: Tensor | None  # ratio-2 KV source: [2C, D] float32, kv rows then gate rows
    compress_norm: Tensor | None
    index_wq_b: Tensor | None
    index_wk: Tensor | None
    index_k_norm: Tensor | None
    engram: EngramWeights | None


class Loader:
    """Fetches named tensors, the part of them that this rank holds, moves them to the device and casts them once."""

    def __init__(
        self,
        source: WeightSource,
        spec: V41Spec,
        dtype: torch.dtype,
        device: torch.device,
        place: RankPlace,
        groups: ParallelGroups | None,
        routing: Routing = "model",
    ) -> None:
        self.source = source
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.groups = groups
        self.place = place
        self.routing = routing
        self._expected = expected_tensors(spec)

    def weight(self, name: str) -> Tensor:
        # A copy, also where nothing changes: a view would keep the whole mapped file resident.
        return self.stored(name).to(device=self.device, dtype=self.dtype, copy=True).contiguous()

    def wide(self, name: str) -> Tensor:
        """In float32, whatever the model's dtype."""
        return self.stored(name).to(device=self.device, dtype=torch.float32, copy=True).contiguous()

    def stored(self, name: str) -> Tensor:
        """As the source gives it: perhaps a view of a mapped file."""
        part = held_part(self.spec, self.place, name, self._expected[name])
        return self.source.get(name) if part is None else self.source.part(name, part.dim, part.start, part.stop)

    def stacked(self, *names: str) -> Tensor:
        return torch.cat([self.weight(name) for name in names])


def load_layer(load: Loader, spec: V41Spec, layer: int) -> LayerWeights:
    """Backbone layer ``layer``."""
    prefix = f"layers.{layer}"
    role = spec.role(layer)
    ratio = spec.compress_ratios[layer]
    has_index = role in (AttentionRole.FULL, AttentionRole.REINDEX)
    names = [f"{prefix}.attn.wq_a.weight", f"{prefix}.attn.wkv.weight"]
    if has_index:
        names.append(f"{prefix}.attn.indexer.weights_proj.weight")
    if role is AttentionRole.FULL and ratio == 1:
        names.append(f"{prefix}.attn.compressor.wkv.weight")
    owns_kv = role is AttentionRole.FULL
    compressor = f"{prefix}.attn.compressor"
    pair_proj = None
    if owns_kv and ratio == 2:
        pair_proj = torch.cat([load.wide(f"{compressor}.wkv.weight"), load.wide(f"{compressor}.wgate.weight")])
    has_engram = spec.engram is not None and layer in spec.engram.layer_ids
    return _layer(
        load,
        spec,
        prefix,
        layer,
        ratio,
        role,
        names,
        _moe(load, spec, prefix, spec.num_experts, spec.experts_per_token, image_bias=knows_images(spec)),
        pair_proj=pair_proj,
        compress_norm=load.weight(f"{compressor}.norm.weight") if owns_kv else None,
        index_wq_b=load.weight(f"{prefix}.attn.indexer.wq_b.weight") if has_index else None,
        index_wk=load.weight(f"{prefix}.attn.indexer.wk.weight") if owns_kv else None,
        index_k_norm=load.weight(f"{prefix}.attn.indexer.k_norm.weight") if owns_kv else None,
        engram=_engram(load, prefix) if has_engram else None,
    )


def load_draft_layer(load: Loader, spec: V41Spec, index: int) -> LayerWeights:
    """Draft layer ``index``: window only, its own expert count, the text bias."""
    assert spec.dspark is not None
    prefix = f"mtp.{index}"
    names = [f"{prefix}.attn.wq_a.weight", f"{prefix}.attn.wkv.weight"]
    moe = _moe(load, spec, prefix, spec.dspark.num_experts, spec.dspark.experts_per_token, image_bias=False)
    return _layer(load, spec, prefix, spec.num_layers + index, 0, AttentionRole.WINDOW, names, moe)


def knows_images(spec: V41Spec) -> bool:
    """Whether an image token can occur at all; where it cannot, no step looks for one."""
    return spec.image_token_id is not None and spec.image_token_id < spec.vocab_size


def _layer(
    load: Loader,
    spec: V41Spec,
    prefix: str,
    layer: int,
    ratio: int,
    role: AttentionRole,
    in_names: list[str],
    moe: MoeWeights,
    *,
    pair_proj: Tensor | None = None,
    compress_norm: Tensor | None = None,
    index_wq_b: Tensor | None = None,
    index_wk: Tensor | None = None,
    index_k_norm: Tensor | None = None,
    engram: EngramWeights | None = None,
) -> LayerWeights:
    parts = [load.weight(name) for name in in_names]
    wo_a = load.weight(f"{prefix}.attn.wo_a.weight")
    wo_a = wo_a.view(-1, spec.o_lora_rank, wo_a.shape[1])
    folded = {
        site: mhc_fold(load.wide(f"{prefix}.hc_{site}_fn"), load.wide(f"{prefix}.hc_{site}_scale"), spec.hc_mult)
        for site in ("attn", "ffn")
    }
    return LayerWeights(
        layer=layer,
        ratio=ratio,
        role=role,
        in_proj=torch.cat(parts),
        in_sizes=tuple(part.shape[0] for part in parts),
        q_norm=load.weight(f"{prefix}.attn.q_norm.weight"),
        wq_b=load.weight(f"{prefix}.attn.wq_b.weight"),
        kv_norm=load.weight(f"{prefix}.attn.kv_norm.weight"),
        sink=load.wide(f"{prefix}.attn.attn_sink"),
        wo_a=wo_a.mT.contiguous(),
        wo_b=load.weight(f"{prefix}.attn.wo_b.weight"),
        attn_norm=load.weight(f"{prefix}.attn_norm.weight"),
        ffn_norm=load.weight(f"{prefix}.ffn_norm.weight"),
        hc_attn_fn=folded["attn"],
        hc_attn_base=load.wide(f"{prefix}.hc_attn_base"),
        hc_ffn_fn=folded["ffn"],
        hc_ffn_base=load.wide(f"{prefix}.hc_ffn_base"),
        moe=moe,
        pair_proj=pair_proj,
        compress_norm=compress_norm,
        index_wq_b=index_wq_b,
        index_wk=index_wk,
        index_k_norm=index_k_norm,
        engram=engram,
    )


def _moe(load: Loader, spec: V41Spec, prefix: str, num_experts: int, experts_per_token: int, *, image_bias: bool) -> MoeWeights:
    if load.groups is not None:
        return _spread_moe(load, load.groups, spec, prefix, num_experts, experts_per_token, image_bias=image_bias)
    hidden, inner, num_shared = spec.hidden_size, spec.moe_intermediate_size, spec.num_shared_experts
    w13 = torch.empty((num_experts + num_shared, 2 * inner, hidden), dtype=load.dtype, device=load.device)
    w2 = torch.empty((num_experts + num_shared, inner, hidden), dtype=load.dtype, device=load.device)
    for expert in range(num_experts):
        name = f"{prefix}.ffn.experts.{expert}"
        w13[expert, :inner] = load.weight(f"{name}.w1.weight")
        w13[expert, inner:] = load.weight(f"{name}.w3.weight")
        w2[expert] = load.weight(f"{name}.w2.weight").T
    shared_w13 = shared_w2 = None
    if num_shared:
        name = f"{prefix}.ffn.shared_experts"
        w1, w3, w2_full = (load.weight(f"{name}.{part}.weight") for part in ("w1", "w3", "w2"))
        w13[num_experts:, :inner] = w1.view(num_shared, inner, hidden)
        w13[num_experts:, inner:] = w3.view(num_shared, inner, hidden)
        w2[num_experts:] = w2_full.T.view(num_shared, inner, hidden)
        if num_shared == 1:  # a slice of the stack; more than one slice interleaves gate and up rows, so it is copied
            shared_w13, shared_w2 = w13[num_experts], w2[num_experts]
        else:
            shared_w13, shared_w2 = torch.cat((w1, w3)), w2[num_experts:].reshape(-1, hidden)
    always = torch.zeros((1, num_experts + num_shared), device=load.device)
    always[:, num_experts:] = 1.0
    return MoeWeights(
        gate=load.wide(f"{prefix}.ffn.gate.weight"),
        bias=_router_bias(load, prefix, image_bias),
        w13=w13,
        w2=w2,
        always=always,
        shared_ids=torch.arange(num_experts, num_experts + num_shared, device=load.device),
        shared_ones=torch.ones(num_shared, device=load.device),
        num_routed=num_experts,
        experts_per_token=experts_per_token,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
        routing=load.routing,
    )


def _spread_moe(
    load: Loader, groups: ParallelGroups, spec: V41Spec, prefix: str, num_experts: int, experts_per_token: int, *, image_bias: bool
) -> MoeWeights:
    """The slots of one rank among several, and its width of the shared experts."""
    placement = groups.place.expert_map(num_experts, draft=prefix.startswith("mtp."))
    experts = placement.of_rank(groups.place.expert_rank)
    inner = spec.moe_intermediate_size // groups.place.layout.expert_tp
    w13 = torch.empty((len(experts), 2 * inner, spec.hidden_size), dtype=load.dtype, device=load.device)
    w2 = torch.empty((len(experts), inner, spec.hidden_size), dtype=load.dtype, device=load.device)
    for slot, expert in enumerate(experts):
        name = f"{prefix}.ffn.experts.{expert}"
        w13[slot, :inner] = load.weight(f"{name}.w1.weight")
        w13[slot, inner:] = load.weight(f"{name}.w3.weight")
        w2[slot] = load.weight(f"{name}.w2.weight").T
    shared_w13 = shared_w2 = None
    if spec.num_shared_experts:
        name = f"{prefix}.ffn.shared_experts"
        shared_w13 = load.stacked(f"{name}.w1.weight", f"{name}.w3.weight")
        shared_w2 = load.weight(f"{name}.w2.weight").T.contiguous()
    nothing = torch.empty(0, device=load.device)
    return MoeWeights(
        gate=load.wide(f"{prefix}.ffn.gate.weight"),
        bias=_router_bias(load, prefix, image_bias),
        w13=w13,
        w2=w2,
        always=nothing,
        shared_ids=nothing,
        shared_ones=nothing,
        num_routed=num_experts,
        experts_per_token=experts_per_token,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
        routing=load.routing,
        spread=RoutedExperts(groups, placement, experts_per_token, w13, w2, spec.swiglu_limit),
    )


def _router_bias(load: Loader, prefix: str, image_bias: bool) -> Tensor:
    bias = load.wide(f"{prefix}.ffn.gate.bias")
    return torch.stack((bias, load.wide(f"{prefix}.ffn.gate.bias_vl"))) if image_bias else bias


def _engram(load: Loader, prefix: str) -> EngramWeights:
    return EngramWeights(
        wkv=load.weight(f"{prefix}.engram.wkv.weight"),
        qk_weight=load.wide(f"{prefix}.engram.q_weight") * load.wide(f"{prefix}.engram.k_weight"),
    )


def load_engram_tables(load: Loader, spec: EngramSpec) -> EngramTables:
    """The tables where ``load.place`` wants them."""
    names = [f"layers.{layer}.engram.embed.weight" for layer in spec.layer_ids]
    if load.place.engram == "host":
        return HostTables([load.stored(name) for name in names], load.dtype, load.device)
    if load.groups is not None and load.place.shards_engram:
        return ShardedTables(load.groups, [load.stored(name) for name in names], spec.num_rows, load.dtype, load.device)
    return LocalTables([load.weight(name) for name in names])
