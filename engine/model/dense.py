"""The dense family (Llama, Qwen2, Qwen3, Qwen3-MoE) on a paged KV cache.

Legend in engine.model.batch, attention's in kernels.attention_full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, InvariantError
from engine.core.expert_map import ExpertMap
from engine.core.plan import StepPeers
from engine.core.rank_counters import RankCounters
from engine.core.sharding import RankPlace, held_kv_heads, held_part, holds
from engine.core.specs import DenseSpec
from engine.core.tensors import expected_tensors
from engine.kernels import decode_cpu
from engine.kernels.attention_full import AttentionPlan, attend, plan_attention
from engine.kernels.rope import rope_frequencies, rope_rotation
from engine.model.base import DraftOutput, DraftRequest, ForwardOutput, KVCache, WeightSource
from engine.model.batch import ForwardBatch
from engine.model.dense_cache import DenseCache
from engine.model.dense_linear import Linear
from engine.model.dense_moe import MoeFeedForward, load_moe
from engine.parallel.experts import RoutedExperts, rebalance
from engine.parallel.groups import ParallelGroups
from engine.parallel.tensor import all_gather_vocabulary, all_reduce, embedding

_FEW_ROWS = 64  # up to here the compiled row kernels, which use one core, beat torch's, which wake all of them
_FEW_ATTENDED = 32768  # positions seen by all tokens of a step, up to which attending token by token beats torch's blocks


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm_D: Tensor
    qkv: Linear  # q, k, v stacked; q and k rows of a head in pair order, see _pair_order
    qk_gain_Hd: Tensor | None  # Qwen3: per-head gains of q (H times) and k (J times)
    output: Linear
    mlp_norm_D: Tensor
    feed_forward: _Mlp | MoeFeedForward

    def struct(self) -> list[int]:
        """Layer of decode_cpu.c, its pool left open; it has no experts."""
        assert isinstance(self.feed_forward, _Mlp)
        gain = 0 if self.qk_gain_Hd is None else self.qk_gain_Hd.data_ptr()
        linears = (self.qkv, self.output, self.feed_forward.gate_up, self.feed_forward.down)
        pointers = [self.attention_norm_D.data_ptr(), gain, self.mlp_norm_D.data_ptr()]
        return [*pointers, *(value for linear in linears for value in linear.struct()), 0]


class DenseModel:
    """Implements base.Model. Weights are taken one by one; q, k, v and gate, up are stored stacked, one product each."""

    def __init__(
        self,
        spec: DenseSpec,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        groups: ParallelGroups | None = None,
    ) -> None:
        """Raises ConfigError for a spec this implementation cannot run, or cannot cut so. ``groups`` where a replica has several ranks."""
        if spec.head_dim % 2:
            raise ConfigError(f"{spec.name}: head_dim {spec.head_dim} is odd, rotary embedding needs pairs")
        self.place = groups.place if groups else RankPlace()
        self.place.validate_for(spec)
        self.groups = groups
        self.tensor = groups.tensor if groups else None
        self.num_heads = spec.num_heads // self.place.layout.tp  # here; so is the next
        self.num_kv_heads = held_kv_heads(spec, self.place)
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self._native = _native(spec, self.place, dtype, self.device)
        load = _Loader(weights, spec, dtype, self.device, self._native, groups)
        self._embed_VD = load.get("model.embed_tokens.weight").contiguous()
        self._layers = [_load_layer(load, spec, layer) for layer in range(spec.num_layers)]
        self._norm_D = load.get("model.norm.weight")
        tied = spec.tie_word_embeddings
        self._head = Linear(self._embed_VD if tied else load.get("lm_head.weight"), native=self._native, shared=tied)
        self._fused: _Fused | None = None
        if self._native is not None and spec.moe is None and self.tensor is None:  # a sum over ranks interrupts it
            self._fused = _Fused(self._native, self._layers, self._norm_D, self._head, spec.rms_norm_eps)
        self.frequency_Q = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling).to(self.device)
        self._num_bytes = load.num_bytes
        self.rope_factor = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0

    def new_cache(self, config: CacheConfig) -> DenseCache:
        return DenseCache(self.spec, config, dtype=self.dtype, device=self.device, num_kv_heads=self.num_kv_heads)

    def num_bytes(self) -> int:
        """Device bytes of the weights as held, each once."""
        return self._num_bytes

    def draft(self, request: DraftRequest, cache: KVCache) -> DraftOutput:  # noqa: ARG002 (the protocol's signature)
        raise ConfigError(f"{self.spec.name}: a {self.spec.architecture} has no draft head")

    @torch.inference_mode()
    def join(self, peers: StepPeers) -> None:
        """Only experts are exchanged with ranks that have other tokens."""
        for layer in self._layers:
            if isinstance(layer.feed_forward, MoeFeedForward):
                layer.feed_forward.join(peers.num_logit_rows if layer is self._layers[-1] else peers.num_tokens)

    def join_draft(self, peers: StepPeers) -> None:
        """Nothing: there is no draft."""

    def rebalance(self, maps: Sequence[ExpertMap]) -> int:
        """See ``base.Model``."""
        return rebalance(self._spread_layers(), maps)

    def take_expert_counts(self) -> list[list[int]]:
        """See ``base.Model``."""
        return [layer.take_counts() for layer in self._spread_layers()]

    def take_counters(self) -> RankCounters:
        """See ``base.Model``."""
        return RankCounters(traffic=self.groups.traffic.take() if self.groups else ())

    def _spread_layers(self) -> list[RoutedExperts]:
        feed_forwards = [layer.feed_forward for layer in self._layers]
        return [each.spread for each in feed_forwards if isinstance(each, MoeFeedForward) and each.spread is not None]

    def forward(self, batch: ForwardBatch, cache: KVCache, capture: frozenset[str] = frozenset()) -> ForwardOutput:
        """Logits of the wanted rows. ``capture`` may name "hidden": the normed hidden states of these rows [R, D]."""
        if not isinstance(cache, DenseCache):
            raise InvariantError(f"a DenseModel was given a {type(cache).__name__}")
        num_tokens, num_rows = batch.token_ids_T.shape[0], batch.logit_rows_R.shape[0]
        some_rows = num_rows < num_tokens
        few = num_tokens <= _FEW_ROWS
        if self._fused is not None and self._fused.takes(batch, cache):
            turn_TQ2 = rope_rotation(batch.positions_T, self.frequency_Q, self.rope_factor)
            logits_RV, hidden_RD = self._fused(functional.embedding(batch.token_ids_T, self._embed_VD), turn_TQ2, batch, cache)
            return ForwardOutput(logits_RV, captures={"hidden": hidden_RD} if "hidden" in capture else None)
        attention = _Attention(self, batch, cache, self._native if batch.decode_only else None)
        x_TD = self._embed(batch.token_ids_T)
        peers = batch.peers
        for index, layer in enumerate(self._layers):
            attended_TD = attention(index, layer, layer.qkv(self._normed(x_TD, layer.attention_norm_D, few)))
            if some_rows and index == len(self._layers) - 1:  # what follows acts on rows alone, and nobody reads the others
                attended_TD, x_TD = attended_TD[batch.logit_rows_R], x_TD[batch.logit_rows_R]
            x_TD = self._plus(layer.output, attended_TD, x_TD)
            counts = () if peers is None else peers.num_logit_rows if index == len(self._layers) - 1 else peers.num_tokens
            x_TD = self._feed_forward(layer, x_TD, few, counts)
        hidden_RD = self._normed(x_TD if some_rows else x_TD[batch.logit_rows_R], self._norm_D, few)
        captures = {"hidden": hidden_RD} if "hidden" in capture else None
        logits_RV = self._head.wide(hidden_RD)
        if self.tensor is not None:
            logits_RV = all_gather_vocabulary(self.tensor, logits_RV, self.spec.vocab_size)
        return ForwardOutput(logits_RV, captures=captures)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        if self.tensor is None:
            return functional.embedding(token_ids_T, self._embed_VD)
        return embedding(self.tensor, token_ids_T, self._embed_VD, self.spec.vocab_size)

    def _plus(self, linear: Linear, x_TX: Tensor, residual_TD: Tensor) -> Tensor:
        """The product plus the residual; its inputs are split over the tensor ranks, which add up what they get."""
        if self.tensor is None:
            return linear.plus(x_TX, residual_TD)
        return all_reduce(self.tensor, linear(x_TX)) + residual_TD

    def _feed_forward(self, layer: _Layer, x_TD: Tensor, few: bool, num_tokens: Sequence[int]) -> Tensor:
        normed_TD, feed_forward = self._normed(x_TD, layer.mlp_norm_D, few), layer.feed_forward
        if isinstance(feed_forward, MoeFeedForward):
            return x_TD + feed_forward(normed_TD, num_tokens)
        return self._plus(feed_forward.down, self._gated(feed_forward.gate_up(normed_TD), few), x_TD)

    def _normed(self, x_TD: Tensor, gain_D: Tensor, few: bool) -> Tensor:
        if few and self._native is not None:
            return self._native.rms_norm(x_TD, gain_D, self.spec.rms_norm_eps)
        return functional.rms_norm(x_TD, gain_D.shape, gain_D, self.spec.rms_norm_eps)

    def _gated(self, gate_up_TF: Tensor, few: bool) -> Tensor:
        if few and self._native is not None:
            return self._native.silu_mul(gate_up_TF)
        gate_TF, up_TF = gate_up_TF.chunk(2, 1)
        return functional.silu(gate_TF).mul_(up_TF)


def _native(spec: DenseSpec, place: RankPlace, dtype: torch.dtype, device: torch.device) -> decode_cpu.DecodeKernels | None:
    tp = place.layout.tp
    if device.type != "cpu" or dtype != torch.bfloat16 or spec.hidden_size % 16 or spec.intermediate_size % (16 * tp):
        return None
    return decode_cpu.load(spec.head_dim, spec.num_heads // tp // held_kv_heads(spec, place))


class _Fused:
    """A step of few tokens, decodes and short prompts, as one compiled call."""

    def __init__(self, native: decode_cpu.DecodeKernels, layers: list[_Layer], norm_D: Tensor, head: Linear, eps: float) -> None:
        self._native, self._norm_D, self._eps = native, norm_D, eps
        self._head = torch.tensor(head.struct())
        self._layers = torch.tensor([layer.struct() for layer in layers])
        mlp = layers[0].feed_forward
        assert isinstance(mlp, _Mlp)
        self._scratch_values = layers[0].qkv.out_features + max(layers[0].output.in_features, mlp.down.in_features)

    def takes(self, batch: ForwardBatch, cache: DenseCache) -> bool:
        num_tokens = batch.token_ids_T.shape[0]
        if not 0 < num_tokens <= self._native.max_rows or batch.logit_rows_R.shape[0] > num_tokens:
            return False
        if not decode_cpu.fits_block(cache.config.block_size):
            return False
        return batch.decode_only or int(batch.positions_T.sum()) <= _FEW_ATTENDED

    def __call__(self, x_TD: Tensor, turn_TQ2: Tensor, batch: ForwardBatch, cache: DenseCache) -> tuple[Tensor, Tensor]:
        pools_L2NJPd = cache.layers()
        layers = self._layers
        layers[:, -1] = pools_L2NJPd.data_ptr() + torch.arange(len(layers)) * (pools_L2NJPd.stride(0) * pools_L2NJPd.element_size())
        owner_T, context_T = None, batch.context_lens_B.contiguous()
        if not batch.decode_only:
            context_T = batch.positions_T + 1
            owner_T = batch.seq_of_token_T.contiguous()
        return self._native.forward(
            x_TD, layers, self._head, self._norm_D, pools_L2NJPd, owner_T, batch.block_table_BM.contiguous(), context_T,
            turn_TQ2.contiguous(), batch.logit_rows_R.contiguous(), self._scratch_values, self._eps,
        )  # fmt: skip


class _Attention:
    """A step's attention with all that its layers share, from the stacked projections [T, (H + 2J) * d] to outputs [T, H * d]."""

    def __init__(self, model: DenseModel, batch: ForwardBatch, cache: DenseCache, native: decode_cpu.DecodeKernels | None) -> None:
        self._spec, self._cache, self._batch = model.spec, cache, batch
        self._num_heads, self._num_kv_heads = model.num_heads, model.num_kv_heads
        self._native = native if native is not None and decode_cpu.fits_block(cache.config.block_size) else None
        self._rotation_TQ2 = rope_rotation(batch.positions_T, model.frequency_Q, model.rope_factor)
        self._plan: AttentionPlan | None = None
        if self._native is not None:
            self._table_BM = batch.block_table_BM.contiguous()
            return
        self._plan = plan_attention(
            batch.query_starts_B1,
            batch.context_lens_B,
            batch.block_table_BM,
            block_size=cache.config.block_size,
            num_heads=model.num_heads,
            decode_only=batch.decode_only,
            dtype=model.dtype,
        )
        self._write_rows = cache.write_rows(batch.kv_rows_T)
        self._turn_T1Q = torch.view_as_complex(self._rotation_TQ2).unsqueeze(1)

    def __call__(self, index: int, layer: _Layer, qkv_TC: Tensor) -> Tensor:
        spec = self._spec
        if self._plan is None:
            assert self._native is not None
            pool_2NJPd, context_B = self._cache.layer(index), self._batch.context_lens_B
            return self._native.decode(
                qkv_TC, pool_2NJPd, self._table_BM, context_B, self._rotation_TQ2, layer.qk_gain_Hd, spec.rms_norm_eps
            )
        qkv_THd = qkv_TC.view(qkv_TC.shape[0], -1, spec.head_dim)
        qk_THd = qkv_THd.narrow(1, 0, self._num_heads + self._num_kv_heads)
        _normalise_and_rotate_(qk_THd, layer.qk_gain_Hd, spec.rms_norm_eps, self._turn_T1Q)
        self._cache.write(index, self._write_rows, qkv_THd.narrow(1, self._num_heads, 2 * self._num_kv_heads))
        return attend(qkv_THd, self._cache.layer(index), self._plan, self._num_heads)


class _Loader:
    """Checkpoint tensors, the part of them that this rank holds, on the device."""

    def __init__(
        self,
        weights: WeightSource,
        spec: DenseSpec,
        dtype: torch.dtype,
        device: torch.device,
        native: decode_cpu.DecodeKernels | None,
        groups: ParallelGroups | None,
    ) -> None:
        self._weights, self._dtype, self._device, self._native = weights, dtype, device, native
        self.spec = spec
        self.groups = groups
        self.place = groups.place if groups else RankPlace()
        self._expected = expected_tensors(spec)
        self.num_bytes = 0

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        # A copy, also where nothing changes: a view would keep the whole mapped file resident, and at its own alignment.
        part = held_part(self.spec, self.place, name, self._expected[name])
        stored = self._weights.get(name) if part is None else self._weights.part(name, part.dim, part.start, part.stop)
        tensor = stored.to(self._device, dtype or self._dtype, copy=True)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def stacked(self, prefix: str, names: tuple[str, ...], biased: bool, orders: dict[str, Tensor]) -> Linear:
        """One Linear of several that share their input; ``orders`` permutes the rows of some."""
        weights, biases = [], []
        for name in names:
            order = orders.get(name)
            weight = self.get(f"{prefix}.{name}.weight")
            weights.append(weight if order is None else weight[order])
            if biased and holds(self.spec, self.place, f"{prefix}.{name}.bias"):
                bias = self.get(f"{prefix}.{name}.bias")
                biases.append(bias if order is None else bias[order])
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None, self._native)


def _load_layer(load: _Loader, spec: DenseSpec, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    num_heads, num_kv_heads = spec.num_heads // load.place.layout.tp, held_kv_heads(spec, load.place)
    qk_gain_Hd = None
    pairs = _pair_order(spec.head_dim, 1)
    if spec.qk_norm:
        q_gain, k_gain = (load.get(f"{prefix}.self_attn.{name}_norm.weight")[pairs] for name in ("q", "k"))
        qk_gain_Hd = torch.cat((q_gain.expand(num_heads, -1), k_gain.expand(num_kv_heads, -1)))
    orders = {"q_proj": _pair_order(spec.head_dim, num_heads), "k_proj": _pair_order(spec.head_dim, num_kv_heads)}
    return _Layer(
        attention_norm_D=load.get(f"{prefix}.input_layernorm.weight"),
        qkv=load.stacked(f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), spec.attention_bias, orders),
        qk_gain_Hd=qk_gain_Hd,
        output=load.stacked(f"{prefix}.self_attn", ("o_proj",), spec.output_bias, {}),
        mlp_norm_D=load.get(f"{prefix}.post_attention_layernorm.weight"),
        feed_forward=load_moe(load, spec, f"{prefix}.mlp") if spec.is_moe(index) else _load_mlp(load, spec, f"{prefix}.mlp"),
    )


def _load_mlp(load: _Loader, spec: DenseSpec, prefix: str) -> _Mlp:
    return _Mlp(
        gate_up=load.stacked(prefix, ("gate_proj", "up_proj"), spec.mlp_bias, {}),
        down=load.stacked(prefix, ("down_proj",), spec.mlp_bias, {}),
    )


def _pair_order(head_dim: int, num_heads: int) -> Tensor:
    """Row order that puts the checkpoint's rotary pairs (i, i + d/2) side by side, where a complex product rotates them.

    Queries and keys are permuted alike, so their products do not change; values keep their order.
    """
    within = torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)
    return (torch.arange(num_heads).unsqueeze(1) * head_dim + within).reshape(-1)


def _normalise_and_rotate_(qk_THd: Tensor, gain_Hd: Tensor | None, eps: float, turn_T1Q: Tensor) -> None:
    """Qwen3's per-head norm, then the rotation, in float32 and in place."""
    wide_THd = qk_THd.to(torch.float32, copy=True)
    if gain_Hd is not None:
        # Rounded to the model's dtype between the two, as the checkpoints' own implementation does.
        wide_THd = (functional.rms_norm(wide_THd, (wide_THd.shape[-1],), None, eps) * gain_Hd).to(qk_THd.dtype).float()
    torch.view_as_complex(wide_THd.view(*wide_THd.shape[:2], -1, 2)).mul_(turn_T1Q)
    qk_THd.copy_(wide_THd)
