"""DeepSeek-V4.1's forward pass over whole sequences in fp32: no cache, differentiable, written apart from the serving path.

Parameters are a flat dict under the official tensor names, but for experts, which are stacked: ``...ffn.experts.w1`` [E, I, D].
Shape letters: see ``maths``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import AttentionRole, V41Spec
from engine.model.tiny_v41 import maths
from engine.model.tiny_v41.engram import EngramTables, row_ids


@dataclass(frozen=True)
class Options:
    """``rounding``: straight-through rounding of cached rows. ``sparse``: attend only the indexer's choice (off: every visible row).

    ``index_loss_rows`` > 0: so many random positions per sequence train the indexer. ``capture``: keep streams and selections.
    """

    rounding: bool = False
    sparse: bool = True
    index_loss_rows: int = 0
    capture: bool = False
    balance: bool = False  # keep the experts' token counts


@dataclass
class Output:
    """``hidden`` [B, L, D] after the last norm; ``features`` [B, L, targets*D] for the draft."""

    hidden: Tensor
    features: Tensor | None
    index_loss: Tensor
    expert_counts: dict[str, Tensor] = field(default_factory=dict)
    streams: list[Tensor] = field(default_factory=list)
    selections: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Rope:
    """cos and sin [L, R/2] of the positions, plain (ratio 0) and scaled (ratio 1 and 2)."""

    plain: tuple[Tensor, Tensor]
    scaled: tuple[Tensor, Tensor]


@dataclass
class Shared:
    """What later layers read of earlier ones: compressed rows, index keys, the selection, the candidates."""

    rows: Tensor | None = None
    keys: Tensor | None = None
    selected: Tensor | None = None
    candidates: Tensor | None = None


class Forward:
    """The model's maths bound to parameters. ``compiled`` fuses the small-tensor parts (worth it in training only)."""

    def __init__(self, spec: V41Spec, params: Mapping[str, Tensor], tables: EngramTables | None, compiled: bool = False) -> None:
        self.spec = spec
        self.p = params
        self.tables = tables
        wrap: Callable[[Any], Any] = torch.compile if compiled else (lambda f: f)
        self._mix = wrap(maths.mix)
        self.rms = wrap(maths.rms_norm)
        self.collapse = wrap(maths.collapse)
        self.expand = wrap(maths.expand)
        self.rotate = wrap(maths.rotate)
        self.swiglu = wrap(maths.swiglu)
        self.join = wrap(_joined_softmax)
        self.frequencies = maths.rope_frequencies(spec.rope_theta, spec.rope_dim, None)
        self.scaled_frequencies = maths.rope_frequencies(spec.compress_rope_theta, spec.rope_dim, spec.rope_scaling)

    def __call__(self, ids: Tensor, options: Options | None = None) -> Output:
        """``ids`` int64 [B, L]; every sequence starts at position 0."""
        spec, p, options = self.spec, self.p, options or Options()
        b, length = ids.shape
        positions = torch.arange(length)
        rope = Rope(maths.rope_table(self.frequencies, positions), maths.rope_table(self.scaled_frequencies, positions))
        out = Output(hidden=torch.empty(0), features=None, index_loss=torch.zeros(()))
        x = functional.embedding(ids, p["embed.weight"]).view(b * length, 1, -1).expand(-1, spec.hc_mult, -1)
        pm = torch.zeros(spec.hc_mult, b * length)
        pm[0] = 1
        rows = row_ids(self.tables, ids) if spec.engram and self.tables else None
        features: list[Tensor] = []
        shared = Shared()
        for layer in range(spec.num_layers):
            name = f"layers.{layer}"
            if spec.engram and layer in spec.engram.layer_ids and rows is not None:
                x = self.engram(x, rows[:, :, spec.engram.layer_ids.index(layer)].flatten(0, 1), f"{name}.engram")
            if spec.dspark and layer in spec.dspark.target_layer_ids:
                features.append(x.mean(1))

            def attend(u: Tensor, layer: int = layer) -> Tensor:
                return self.attention(u.view(b, length, -1), layer, rope, shared, options, out).flatten(0, 1)

            x, pm = self.block(x, pm, name, attend, spec.experts_per_token, out if options.balance else None)
            if options.capture:
                out.streams.append(x.view(b, length, spec.hc_mult, -1).detach())
        out.hidden = self.collapse(x, pm, p["norm.weight"], spec.rms_norm_eps).view(b, length, -1)
        out.features = torch.cat(features, -1).view(b, length, -1) if features else None
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.p["head.weight"].T

    def mix(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """pre [S, T], post [S, T], M [S, S, T] of the streams ``x`` [T, S, D]."""
        spec, (fn, base, scale) = self.spec, (self.p[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        coefficients: tuple[Tensor, Tensor, Tensor] = self._mix(
            x.flatten(1), fn, base, scale, spec.hc_mult, spec.hc_sinkhorn_iters, spec.hc_eps, spec.rms_norm_eps
        )
        return coefficients

    def block(
        self, x: Tensor, pm: Tensor, name: str, attend: Callable[[Tensor], Tensor], top_k: int, out: Output | None
    ) -> tuple[Tensor, Tensor]:
        """One layer on the streams ``x`` [T, S, D]; ``pm`` [S, T] is the pre of the sublayer before (shifted mHC)."""
        p, spec = self.p, self.spec
        pre, post, comb = self.mix(x, f"{name}.hc_attn")
        y = attend(self.collapse(x, pm, p[f"{name}.attn_norm.weight"], spec.rms_norm_eps))
        x = self.expand(x, y, post, comb)
        pre_f, post, comb = self.mix(x, f"{name}.hc_ffn")
        y = self.experts(self.collapse(x, pre, p[f"{name}.ffn_norm.weight"], spec.rms_norm_eps), f"{name}.ffn", top_k, out)
        streams: Tensor = self.expand(x, y, post, comb)
        return streams, pre_f

    # -- attention ---------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor, layer: int, rope: Rope, shared: Shared, options: Options, out: Output) -> Tensor:
        """``x`` [B, L, D] -> [B, L, D]: one softmax over the window, the selected compressed rows and the sink."""
        spec, p, name = self.spec, self.p, f"layers.{layer}.attn"
        ratio = spec.compress_ratios[layer]
        cos, sin = rope.scaled if ratio else rope.plain
        b, length, _ = x.shape
        qr = self.rms(x @ p[f"{name}.wq_a.weight"].T, p[f"{name}.q_norm.weight"], spec.rms_norm_eps)
        q = self.rotate(maths.split_dim(qr @ p[f"{name}.wq_b.weight"].T, -1, (spec.num_heads, -1)), cos[:, None], sin[:, None])
        window = self.window_rows(x, name, cos, sin, options.rounding)
        allowed: Tensor | None = None
        rows = window[:, :0]
        if ratio:
            if spec.role(layer) is AttentionRole.FULL:
                self.compress(x, name, ratio, cos, sin, shared, options.rounding)
            assert shared.rows is not None
            rows = shared.rows
            count = torch.arange(1, length + 1).div(ratio, rounding_mode="floor")
            visible = (torch.arange(rows.shape[1]) < count[:, None]).expand(b, -1, -1)
            if layer in spec.index_source_layer_ids:
                self.select(x, qr, layer, cos, sin, visible, shared, options, out, q)
            allowed = shared.selected if options.sparse else visible
        return self.output(self.attend(q, window, rows, allowed, p[f"{name}.attn_sink"]), name, cos, sin)

    def window_rows(self, x: Tensor, name: str, cos: Tensor, sin: Tensor, rounding: bool) -> Tensor:
        """K = V rows [B, L, C] of the sliding window."""
        rows = self.rms(x @ self.p[f"{name}.wkv.weight"].T, self.p[f"{name}.kv_norm.weight"], self.spec.rms_norm_eps)
        rows = self.rotate(rows, cos, sin)
        return maths.straight_through(rows, maths.round_fp8(rows.detach())) if rounding else rows

    def compress(self, x: Tensor, name: str, ratio: int, cos: Tensor, sin: Tensor, shared: Shared, rounding: bool) -> None:
        """Set the shared compressed rows [B, N, C] and index keys [B, N, C_index]."""
        p, spec = self.p, self.spec
        wgate = p[f"{name}.compressor.wgate.weight"] if ratio > 1 else None
        latent = maths.pool(x, p[f"{name}.compressor.wkv.weight"], wgate, p[f"{name}.compressor.norm.weight"], ratio, spec.rms_norm_eps)
        first = slice(0, latent.shape[1] * ratio, ratio)  # a row stands at its group's first token
        rows = self.rotate(latent, cos[first], sin[first])
        # The indexer learns from its own loss only, so nothing flows back into the latent.
        keys = self.rms(latent.detach() @ p[f"{name}.indexer.wk.weight"].T, p[f"{name}.indexer.k_norm.weight"], spec.rms_norm_eps)
        keys = self.rotate(keys, cos[first], sin[first])
        if rounding:
            rows = maths.straight_through(rows, maths.round_fp4_main(rows.detach()))
            keys = maths.straight_through(keys, maths.round_fp4_index(keys.detach()))
        shared.rows, shared.keys = rows, keys

    def select(
        self, x: Tensor, qr: Tensor, layer: int, cos: Tensor, sin: Tensor, visible: Tensor, shared: Shared, options: Options,
        out: Output, q: Tensor,
    ) -> None:  # fmt: skip
        """Set the shared selection, bool [B, L, N], from this layer's index scores; add its part of the indexer's loss."""
        spec = self.spec
        assert shared.keys is not None
        assert shared.rows is not None
        if options.sparse:
            with torch.no_grad():
                scores = self.index_scores(x, qr, layer, cos, sin, shared.keys, options.rounding)
                scores = scores.masked_fill(~visible, -math.inf)
                if layer == spec.candidate_source_layer_id:
                    shared.candidates = maths.candidate_mask(scores, visible, spec.candidate_block_size, spec.candidate_top_k_blocks)
                elif spec.role(layer) is AttentionRole.REINDEX and shared.candidates is not None:
                    scores = scores.masked_fill(~shared.candidates, -math.inf)
                best = scores.topk(min(spec.index_top_k, scores.shape[-1]), -1)
                shared.selected = torch.zeros_like(visible, dtype=torch.bool).scatter(-1, best.indices, best.values > -math.inf)
                if options.capture:
                    out.selections[layer] = shared.selected
        if options.index_loss_rows:
            # The first position that sees two rows is the first with anything to rank.
            low = 2 * spec.compress_ratios[layer]
            at = low + torch.randperm(x.shape[1] - low)[: options.index_loss_rows]
            scores = self.index_scores(x[:, at].detach(), qr[:, at].detach(), layer, cos[at], sin[at], shared.keys, options.rounding)
            seen = visible[:, at]
            with torch.no_grad():
                attention = torch.einsum("blhc,bnc->bhln", q[:, at], shared.rows) / math.sqrt(spec.head_dim)
                target = attention.masked_fill(~seen[:, None], -math.inf).softmax(-1).mean(1)
            guess = scores.masked_fill(~seen, -math.inf).log_softmax(-1)
            loss = (target * (target.clamp(min=1e-9).log() - guess.masked_fill(~seen, 0))).sum(-1).mean()
            out.index_loss = out.index_loss + loss

    def index_scores(self, x: Tensor, qr: Tensor, layer: int, cos: Tensor, sin: Tensor, keys: Tensor, rounding: bool) -> Tensor:
        """[B, L, N]: sum over index heads of weight * relu(query . key)."""
        p, spec, name = self.p, self.spec, f"layers.{layer}.attn.indexer"
        heads = spec.index_num_heads
        iq: Tensor = self.rotate(maths.split_dim(qr @ p[f"{name}.wq_b.weight"].T, -1, (heads, -1)), cos[:, None], sin[:, None])
        if rounding:
            iq = maths.straight_through(iq, maths.round_fp4_index(iq.detach()))
        weights: Tensor = x @ p[f"{name}.weights_proj.weight"].T * (spec.index_head_dim * heads) ** -0.5
        dots = maths.split_dim(torch.bmm(iq.flatten(1, 2), keys.transpose(1, 2)), 1, (-1, heads))
        return (functional.relu(dots) * weights[..., None]).sum(2)

    def attend(self, q: Tensor, window: Tensor, rows: Tensor, allowed: Tensor | None, sink: Tensor) -> Tensor:
        """[B, L, H, C]. The window is walked in chunks of its own length, so a query meets 2W keys rather than L."""
        b, length, heads, dim = q.shape
        w = self.spec.sliding_window
        chunks = -(-length // w)
        pad = chunks * w - length
        padded = maths.split_dim(functional.pad(window, (0, 0, w, pad)), 1, (chunks + 1, w))
        near = torch.cat((padded[:, :-1], padded[:, 1:]), 2).flatten(0, 1)  # [B*chunks, 2W, C]
        q_chunks = functional.pad(q, (0, 0, 0, 0, 0, pad)).view(b * chunks, w * heads, dim)
        near_scores = torch.bmm(q_chunks, near.transpose(1, 2)).view(b, chunks * w, heads, 2 * w)[:, :length]
        far_scores = torch.bmm(q.flatten(1, 2), rows.transpose(1, 2)).view(b, length, heads, -1)
        step = torch.arange(2 * w) - torch.arange(w)[:, None]  # key j of a chunk pair is visible to query i iff 0 < j-i <= W ...
        inside = (step > 0) & (step <= w)
        begun = torch.arange(chunks)[:, None, None] * w + torch.arange(2 * w) >= w  # ... and the sequence has begun there
        near_mask = (inside & begun).flatten(0, 1)[:length]
        near_p, far_p = self.join(near_scores, far_scores, near_mask, allowed, sink, dim**-0.5)
        near_p = functional.pad(near_p, (0, 0, 0, 0, 0, pad)).reshape(b * chunks, w * heads, 2 * w)
        o = torch.bmm(near_p, near).view(b, chunks * w, heads, dim)[:, :length]
        if rows.shape[1]:
            o = o + torch.bmm(far_p.reshape(b, length * heads, -1), rows).view(b, length, heads, dim)
        return o

    def output(self, o: Tensor, name: str, cos: Tensor, sin: Tensor) -> Tensor:
        """Inverse RoPE and the grouped low-rank projection: [B, L, H, C] -> [B, L, D]."""
        spec = self.spec
        o = self.rotate(o, cos[:, None], -sin[:, None])
        wo_a = maths.split_dim(self.p[f"{name}.wo_a.weight"], 0, (spec.o_groups, -1))
        z = torch.einsum("blgk,grk->blgr", maths.split_dim(o.flatten(2), 2, (spec.o_groups, -1)), wo_a)
        return z.flatten(2) @ self.p[f"{name}.wo_b.weight"].T

    # -- experts and Engram ------------------------------------------------------------------------------------------

    def experts(self, x: Tensor, name: str, top_k: int, out: Output | None) -> Tensor:
        """``x`` [T, D]: the chosen experts, weighted before w2, plus the shared expert."""
        p, spec = self.p, self.spec
        s = functional.softplus(x @ p[f"{name}.gate.weight"].T).sqrt()
        chosen = (s.detach() + p[f"{name}.gate.bias"]).topk(top_k, -1).indices
        weight = s.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * spec.routed_scaling_factor
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=s.shape[1])
        if out is not None:
            out.expert_counts[name] = counts
        sizes = counts.tolist()
        x_sorted = x[order.div(top_k, rounding_mode="floor")].split_with_sizes(sizes)
        w1, w3, w2 = (p[f"{name}.experts.{w}"].unbind(0) for w in ("w1", "w3", "w2"))
        gate = torch.cat([a @ w.T for a, w in zip(x_sorted, w1, strict=True)])
        up = torch.cat([a @ w.T for a, w in zip(x_sorted, w3, strict=True)])
        weighted: Tensor = self.swiglu(gate, up, spec.swiglu_limit) * weight.flatten()[order, None]
        y = torch.cat([a @ w.T for a, w in zip(weighted.split_with_sizes(sizes), w2, strict=True)])
        routed = maths.split_dim(y[order.argsort()], 0, (-1, top_k)).sum(1)
        shared = f"{name}.shared_experts"
        h: Tensor = self.swiglu(x @ p[f"{shared}.w1.weight"].T, x @ p[f"{shared}.w3.weight"].T, spec.swiglu_limit)
        return routed + h @ p[f"{shared}.w2.weight"].T

    def engram(self, x: Tensor, rows: Tensor, name: str) -> Tensor:
        """``x`` [T, S, D] plus a gated value made of the table rows [T, columns]."""
        p, spec = self.p, self.spec
        s, d = spec.hc_mult, spec.hidden_size
        kv = functional.embedding(rows, p[f"{name}.embed.weight"]).flatten(1) @ p[f"{name}.wkv.weight"].T
        keys, value = maths.split_dim(kv[:, : s * d], 1, (s, d)), kv[:, s * d :]
        dot = (x * (p[f"{name}.q_weight"] * p[f"{name}.k_weight"]) * keys).sum(-1)
        for side in (x, keys):
            dot = dot * torch.rsqrt(side.square().mean(-1) + spec.rms_norm_eps)
        dot = dot / math.sqrt(d)
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
        return x + gate[..., None] * value[:, None]


def _joined_softmax(
    near: Tensor, far: Tensor, near_mask: Tensor, far_mask: Tensor | None, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One softmax over window scores [B, L, H, 2W] and row scores [B, L, H, N], with the sink [H] in the denominator only."""
    near = (near * scale).masked_fill(~near_mask[:, None], -math.inf)
    top = torch.maximum(near.amax(-1), sink)
    if far_mask is None:
        near = (near - top[..., None]).exp()
        return near / (near.sum(-1, keepdim=True) + (sink - top).exp()[..., None]), far
    far = (far * scale).masked_fill(~far_mask[:, :, None], -math.inf)
    top = torch.maximum(top, far.amax(-1))
    near, far = (near - top[..., None]).exp(), (far - top[..., None]).exp()
    total = near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True) + (sink - top).exp()[..., None]
    return near / total, far / total
