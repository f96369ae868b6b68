"""The dense family (Llama, Qwen2, Qwen3) on a paged KV cache. Legend in engine.model.batch, attention's in kernels.attention_full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, InvariantError
from engine.core.specs import DenseSpec
from engine.kernels.attention_full import attend, plan_attention
from engine.kernels.rope import rope_frequencies, rope_rotation
from engine.model.base import DraftOutput, DraftRequest, ForwardOutput, KVCache, WeightSource
from engine.model.batch import ForwardBatch
from engine.model.dense_cache import DenseCache
from engine.model.dense_linear import Linear

_FEW_ROWS = 4  # up to here RMSNorm costs its number of operations, not their arithmetic


@dataclass(frozen=True, slots=True)
class _Norm:
    """RMSNorm over the last dimension. ``gains_2D`` (gain, gain) and ``signs_21`` (1, -1) are for the few-rows path."""

    gain_D: Tensor
    gains_2D: Tensor
    signs_21: Tensor
    eps: float

    def __call__(self, x_TD: Tensor) -> Tensor:
        size = self.gain_D.shape[0]
        if x_TD.dtype == torch.bfloat16 and x_TD.device.type == "cpu" and x_TD.shape[0] <= _FEW_ROWS:
            # (x, -x) has mean zero and the variance mean(x^2): the fused layer norm of it is the RMSNorm of x, in float32 inside
            # and rounded once. torch has no fused RMSNorm on CPUs; this takes half the time of its composite.
            return torch.layer_norm(x_TD.unsqueeze(1) * self.signs_21, (2, size), self.gains_2D, None, self.eps).select(1, 0)
        return functional.rms_norm(x_TD, (size,), self.gain_D, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm
    qkv: Linear  # q, k, v stacked; q and k rows of a head in pair order, see _pair_order
    qk_gain_Hd: Tensor | None  # Qwen3: per-head gains of q (H times) and k (J times)
    output: Linear
    mlp_norm: _Norm
    gate_up: Linear
    down: Linear


class DenseModel:
    """Implements base.Model. Weights are taken one by one; q, k, v and gate, up are stored stacked, one product each."""

    def __init__(self, spec: DenseSpec, weights: WeightSource, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises ConfigError for a spec this implementation cannot run."""
        if spec.head_dim % 2:
            raise ConfigError(f"{spec.name}: head_dim {spec.head_dim} is odd, rotary embedding needs pairs")
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        load = _Loader(weights, dtype, self.device)
        self._embed_VD = load.get("model.embed_tokens.weight")
        self._layers = [_load_layer(load, spec, layer) for layer in range(spec.num_layers)]
        self._norm = load.norm("model.norm.weight", spec.rms_norm_eps)
        self._head = Linear(self._embed_VD if spec.tie_word_embeddings else load.get("lm_head.weight"))
        self._frequency_Q = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling).to(self.device)
        self._num_bytes = load.num_bytes
        self._rope_factor = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0

    def new_cache(self, config: CacheConfig) -> DenseCache:
        return DenseCache(self.spec, config, dtype=self.dtype, device=self.device)

    def num_bytes(self) -> int:
        """Device bytes of the weights as held; a packed head tied to the embedding is a second copy of it."""
        copies = 2 if self._head.packed and self.spec.tie_word_embeddings else 1
        return self._num_bytes + (copies - 1) * self._embed_VD.numel() * self._embed_VD.element_size()

    def draft(self, request: DraftRequest, cache: KVCache) -> DraftOutput:  # noqa: ARG002 (the protocol's signature)
        raise ConfigError(f"{self.spec.name}: a {self.spec.architecture} has no draft head")

    def forward(self, batch: ForwardBatch, cache: KVCache, capture: frozenset[str] = frozenset()) -> ForwardOutput:
        """Logits of the wanted rows. ``capture`` may name "hidden": the normed hidden states of these rows [R, D]."""
        if not isinstance(cache, DenseCache):
            raise InvariantError(f"a DenseModel was given a {type(cache).__name__}")
        spec = self.spec
        plan = plan_attention(
            batch.query_starts_B1,
            batch.context_lens_B,
            batch.block_table_BM,
            block_size=cache.config.block_size,
            num_heads=spec.num_heads,
            decode_only=batch.decode_only,
            dtype=self.dtype,
        )
        write_rows = cache.write_rows(batch.kv_rows_T)
        turn_T1Q = torch.view_as_complex(rope_rotation(batch.positions_T, self._frequency_Q, self._rope_factor)).unsqueeze(1)
        num_tokens = batch.token_ids_T.shape[0]
        some_rows = batch.logit_rows_R.shape[0] < num_tokens
        x_TD = functional.embedding(batch.token_ids_T, self._embed_VD)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv_THd = layer.qkv(layer.attention_norm(x_TD)).view(num_tokens, -1, spec.head_dim)
            qk_THd = qkv_THd.narrow(1, 0, spec.num_heads + spec.num_kv_heads)
            _normalise_and_rotate_(qk_THd, layer.qk_gain_Hd, spec.rms_norm_eps, turn_T1Q)
            cache.write(index, write_rows, qkv_THd.narrow(1, spec.num_heads, 2 * spec.num_kv_heads))
            if index == last and batch.logit_rows_R.shape[0] == 0:
                break
            attended_TD = attend(qkv_THd, cache.layer(index), plan, spec.num_heads)
            if index == last and some_rows:  # what follows acts on rows alone, and nobody reads the others
                attended_TD, x_TD = attended_TD[batch.logit_rows_R], x_TD[batch.logit_rows_R]
            x_TD = layer.output.plus(attended_TD, x_TD)
            gate_TF, up_TF = layer.gate_up(layer.mlp_norm(x_TD)).chunk(2, 1)
            x_TD = layer.down.plus(functional.silu(gate_TF).mul_(up_TF), x_TD)
        if batch.logit_rows_R.shape[0] == 0:
            return ForwardOutput(torch.empty((0, spec.vocab_size), device=self.device))
        hidden_RD = self._norm(x_TD if some_rows else x_TD[batch.logit_rows_R] if num_tokens > 1 else x_TD)
        captures = {"hidden": hidden_RD} if "hidden" in capture else None
        return ForwardOutput(self._head(hidden_RD).float(), captures=captures)


class _Loader:
    def __init__(self, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self.num_bytes = 0

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name).to(self._device, self._dtype)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def norm(self, name: str, eps: float) -> _Norm:
        gain = self.get(name)
        return _Norm(gain, torch.stack((gain, gain)), torch.tensor([[1.0], [-1.0]], dtype=self._dtype, device=self._device), eps)

    def stacked(self, prefix: str, names: tuple[str, ...], biased: bool, orders: dict[str, Tensor]) -> Linear:
        """One Linear of several that share their input; ``orders`` permutes the rows of some."""
        weights, biases = [], []
        for name in names:
            order = orders.get(name)
            weight = self.get(f"{prefix}.{name}.weight")
            weights.append(weight if order is None else weight[order])
            if biased:
                bias = self.get(f"{prefix}.{name}.bias")
                biases.append(bias if order is None else bias[order])
        return Linear(torch.cat(weights), torch.cat(biases) if biased else None)


def _load_layer(load: _Loader, spec: DenseSpec, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    qk_gain_Hd = None
    pairs = _pair_order(spec.head_dim, 1)
    if spec.qk_norm:
        q_gain, k_gain = (load.get(f"{prefix}.self_attn.{name}_norm.weight")[pairs] for name in ("q", "k"))
        qk_gain_Hd = torch.cat((q_gain.expand(spec.num_heads, -1), k_gain.expand(spec.num_kv_heads, -1)))
    orders = {"q_proj": _pair_order(spec.head_dim, spec.num_heads), "k_proj": _pair_order(spec.head_dim, spec.num_kv_heads)}
    return _Layer(
        attention_norm=load.norm(f"{prefix}.input_layernorm.weight", spec.rms_norm_eps),
        qkv=load.stacked(f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), spec.attention_bias, orders),
        qk_gain_Hd=qk_gain_Hd,
        output=load.stacked(f"{prefix}.self_attn", ("o_proj",), spec.output_bias, {}),
        mlp_norm=load.norm(f"{prefix}.post_attention_layernorm.weight", spec.rms_norm_eps),
        gate_up=load.stacked(f"{prefix}.mlp", ("gate_proj", "up_proj"), spec.mlp_bias, {}),
        down=load.stacked(f"{prefix}.mlp", ("down_proj",), spec.mlp_bias, {}),
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
