"""DSpark: a block draft head. A few window-only layers over the main model's rows propose ``block_size`` tokens in one pass.

A round for the newest token a at position p (its KV not computed yet): inputs [a, noise, noise, ...] at positions p, p + 1, ...; every
row of the block attends the last W main rows (positions below p) and the *whole* block. Then token by token a Markov bias of the token
before is added to the logits of row i, and d_i is taken. The block always has ``block_size`` rows, however many tokens are asked for:
rows see each other in both directions, so a shorter block would give other tokens. Asking for fewer saves the head and Markov work only.

Main rows: m_t = rms(main_proj [features of the target layers]) of every main token; each draft layer keeps its window row of m_t
in the cache's window tensor, after the backbone's layers. Legend: A sequences, Q block rows, K tokens asked for, otherwise as in batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.errors import ConfigError
from engine.core.plan import StepPeers
from engine.core.specs import V41Spec
from engine.kernels.attention_sparse import window_attention
from engine.kernels.mhc import mhc_collapse
from engine.kernels.norm import rms_norm
from engine.kernels.rope import rope_, rope_rotation
from engine.kernels.rounding import round_fp8
from engine.kernels.sampling import filtered_probs, inverse_cdf
from engine.kernels.timing import component
from engine.model.base import DraftOutput, DraftRequest
from engine.model.v41.attention import project_out, stage_window_rows
from engine.model.v41.block import block
from engine.model.v41.cache import V41Cache
from engine.model.v41.step import StepIndex
from engine.model.v41.weights import LayerWeights, Loader, load_draft_layer

if TYPE_CHECKING:
    from engine.model.v41.model import V41Model


class DraftHead:
    """The draft layers of one model, and what they share with it (embedding, head, rotation)."""

    def __init__(self, spec: V41Spec, load: Loader, model: V41Model) -> None:
        assert spec.dspark is not None
        self.spec = spec
        self.dspark = spec.dspark
        self.model = model
        self.target_layers = frozenset(spec.dspark.target_layer_ids)
        self.layers: list[LayerWeights] = [load_draft_layer(load, spec, index) for index in range(spec.dspark.num_layers)]
        last = f"mtp.{spec.dspark.num_layers - 1}"
        self.main_proj = load.weight("mtp.0.main_proj.weight")
        self.main_norm_D = load.weight("mtp.0.main_norm.weight")
        self.norm_D = load.weight(f"{last}.norm.weight")
        self.markov_embed_VM = load.wide(f"{last}.markov_head.embed.weight")
        self.markov_head_VM = load.wide(f"{last}.markov_head.head.weight")
        self.confidence_1X = load.wide(f"{last}.confidence_head.proj.weight")
        low = spec.q_lora_rank
        self._main_wkv = torch.cat([layer.in_proj[low:] for layer in self.layers])
        self._main_kv_norm_LC = torch.stack([layer.kv_norm for layer in self.layers])
        self._block_sinks = [layer.sink.repeat(spec.dspark.block_size) for layer in self.layers]

    def parameters(self) -> list[object]:
        """Every tensor, or dataclass of tensors, the draft adds to the model."""
        return [
            *self.layers, self.main_proj, self.main_norm_D, self.norm_D, self.markov_embed_VM, self.markov_head_VM, self.confidence_1X,
            self._main_wkv, self._main_kv_norm_LC, *self._block_sinks,
        ]  # fmt: skip

    @component("draft", whole=True)
    def stage_main_rows(self, features_TF: Tensor, step: StepIndex, cache: V41Cache) -> None:
        """The draft layers' window rows of every main token of the step, all layers in one product."""
        spec, num_layers = self.spec, len(self.layers)
        main_TD = rms_norm(functional.linear(features_TF, self.main_proj), self.main_norm_D, spec.rms_norm_eps)
        kv_TLC = functional.linear(main_TD, self._main_wkv).view(-1, num_layers, spec.head_dim)
        rows_TLC = rope_(rms_norm(kv_TLC, None, spec.rms_norm_eps) * self._main_kv_norm_LC, step.rotation_plain)
        if self.model.cache_rounding:
            rows_TLC = round_fp8(rows_TLC)
        cache.window_LNC[spec.num_layers :, step.stage_start : step.stage_start + step.num_tokens] = rows_TLC.transpose(0, 1)

    @component("draft", whole=True)
    @torch.inference_mode()
    def draft(self, request: DraftRequest, cache: V41Cache) -> DraftOutput:
        """``num_tokens`` drafts per sequence. Raises ConfigError where more are asked for than the block has rows."""
        if not 1 <= request.num_tokens <= self.dspark.block_size:
            raise ConfigError(
                f"{self.spec.name}: {request.num_tokens} draft tokens asked for; the draft block has {self.dspark.block_size}"
            )
        hidden_AKD = self._hidden(request, cache)
        wide_RD = rms_norm(hidden_AKD, self.norm_D, self.spec.rms_norm_eps).float()
        logits_AKV = self.model.head(wide_RD.flatten(0, 1)).view(*wide_RD.shape[:2], -1)
        return self._sample(request, hidden_AKD, logits_AKV)

    def _hidden(self, request: DraftRequest, cache: V41Cache) -> Tensor:
        """h_i [A, K, D] of the first K block rows."""
        spec, size = self.spec, self.dspark.block_size
        num_sequences = request.slots_A.shape[0]
        device = request.slots_A.device
        tokens_AQ = torch.full((num_sequences, size), self.dspark.noise_token_id, dtype=torch.int64, device=device)
        tokens_AQ[:, 0] = request.tokens_A
        steps_Q = torch.arange(size, device=device)
        rotation = rope_rotation((request.positions_A.unsqueeze(-1) + steps_Q).flatten(), self.model.builder.plain_Q)
        rows_AW, bias_AW = self._rows(request, cache)
        streams = self.model.embed(tokens_AQ.flatten())
        num_tokens = self._num_tokens(request.peers)
        pre = self.model.first_pre_S.expand(num_sequences * size, -1)
        for layer, sink in zip(self.layers, self._block_sinks, strict=True):

            def attend(x_TD: Tensor, layer: LayerWeights = layer, sink: Tensor = sink) -> Tensor:
                num_heads = layer.sink.shape[0]
                low_TQ, kv_TC = functional.linear(x_TD, layer.in_proj).split_with_sizes(layer.in_sizes, dim=-1)
                stage_window_rows(kv_TC, layer, spec, rotation, cache.stage_start, cache, self.model.cache_rounding)
                low_TQ = rms_norm(low_TQ, layer.q_norm, spec.rms_norm_eps)
                q_THC = rope_(functional.linear(low_TQ, layer.wq_b).view(-1, num_heads, spec.head_dim), rotation)
                # All rows of a block attend the same keys, so a block is one "token" with size * heads query heads.
                q_AXC = q_THC.view(num_sequences, size * num_heads, spec.head_dim)
                out_AXC = window_attention(q_AXC, cache.window_LNC[layer.layer], rows_AW, bias_AW, sink, spec.head_dim**-0.5)
                return project_out(out_AXC.view(-1, num_heads, spec.head_dim), layer, rotation, self.model.tensor)

            streams, pre = block(streams, pre, layer, spec, attend, None, num_tokens=num_tokens)
        return mhc_collapse(pre, streams).view(num_sequences, size, -1)[:, : request.num_tokens]

    @component("draft", whole=True)
    def join(self, peers: StepPeers) -> None:
        """Take part in a round of other ranks."""
        for layer in self.layers:
            if layer.moe.spread is not None:
                layer.moe.spread.join(self._num_tokens(peers))

    def _num_tokens(self, peers: StepPeers | None) -> list[int]:
        return [] if peers is None else [self.dspark.block_size * count for count in peers.num_emitting]

    def _rows(self, request: DraftRequest, cache: V41Cache) -> tuple[Tensor, Tensor]:
        """Row table and bias of the block: sink column, W ring columns, the staged rows of the block itself."""
        size = self.dspark.block_size
        num_sequences = request.slots_A.shape[0]
        positions_AW = request.positions_A.unsqueeze(-1) - self.model.builder.window_steps(cache.window) - 1
        ring_AW = (request.slots_A * cache.ring_rows).unsqueeze(-1) + positions_AW % cache.ring_rows
        ring_AW = ring_AW.masked_fill_(positions_AW < 0, cache.zero_row)
        stage_AQ = torch.arange(cache.stage_start, cache.stage_start + num_sequences * size, device=ring_AW.device).view(
            num_sequences, size
        )
        bias_AW = self.model.builder.bias(positions_AW >= 0)
        return torch.cat((ring_AW, stage_AQ), dim=1), functional.pad(bias_AW, (0, size))

    def _sample(self, request: DraftRequest, hidden_AKD: Tensor, logits_AKV: Tensor) -> DraftOutput:
        """Token after token: each draws from its row's logits plus the Markov bias of the token before it."""
        previous_A = request.tokens_A
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        before: list[Tensor] = []
        for index in range(request.num_tokens):
            embed_AM = functional.embedding(previous_A, self.markov_embed_VM)
            before.append(embed_AM)
            row_AV = torch.addmm(logits_AKV[:, index], embed_AM, self.markov_head_VM.mT)
            greedy_A = row_AV.argmax(-1)
            if request.all_greedy:
                previous_A = greedy_A
            else:
                probs_AV = filtered_probs(row_AV, request.temperatures_A, request.top_k_A, request.top_p_A, request.min_p_A)
                certain_AV = functional.one_hot(greedy_A, row_AV.shape[-1]).to(probs_AV.dtype)
                probs_AV = torch.where((request.temperatures_A > 0).unsqueeze(-1), probs_AV, certain_AV)
                probs.append(probs_AV)
                previous_A = inverse_cdf(probs_AV, request.uniforms_AK[:, index])
            tokens.append(previous_A)
        confidence_in = torch.cat((hidden_AKD.float(), torch.stack(before, dim=1)), dim=-1)
        confidences_AK = torch.sigmoid(functional.linear(confidence_in, self.confidence_1X)).squeeze(-1)
        return DraftOutput(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None, confidences_AK)
