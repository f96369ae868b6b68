"""DSpark's block draft over whole sequences: training form (many anchors at once) and one greedy round.

An anchor p is a main position whose rows are known; the block's inputs are [token p+1, noise x (k-1)] at positions p+1..p+k,
and its outputs d_1..d_k stand for tokens p+2..p+1+k. A further letter: A anchors in all, Q block positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.specs import DSparkSpec, V41Spec
from engine.model.tiny_v41 import maths
from engine.model.tiny_v41.forward import Forward, Output
from engine.model.tiny_v41.optimiser import initial_layer


@dataclass(frozen=True)
class Blocks:
    """``hidden`` [A, Q, D] before the last norm and ``logits`` [A, Q, V] without the Markov bias."""

    hidden: Tensor
    logits: Tensor


def initial(spec: V41Spec, generator: torch.Generator) -> dict[str, Tensor]:
    """Draft parameters. The Markov head starts at zero effect, the confidence head at one half."""
    draft = _draft(spec)
    d = spec.hidden_size
    inputs = d * len(draft.target_layer_ids)
    params: dict[str, Tensor] = {}
    for index in range(draft.num_layers):
        params |= initial_layer(spec, f"mtp.{index}", index, draft.num_experts, generator)
    last = f"mtp.{draft.num_layers - 1}"
    return params | {
        "mtp.0.main_proj.weight": torch.randn(d, inputs, generator=generator) * inputs**-0.5,
        "mtp.0.main_norm.weight": torch.ones(d),
        f"{last}.norm.weight": torch.ones(d),
        f"{last}.markov_head.embed.weight": torch.randn(spec.vocab_size, draft.markov_rank, generator=generator) * 0.3,
        f"{last}.markov_head.head.weight": torch.zeros(spec.vocab_size, draft.markov_rank),
        f"{last}.confidence_head.proj.weight": torch.zeros(1, d + draft.markov_rank),
    }


class Draft:
    """The draft bound to the parameters and the maths of its main model."""

    def __init__(self, main: Forward, rounding: bool = True) -> None:
        self.main, self.spec, self.draft, self.rounding = main, main.spec, _draft(main.spec), rounding
        self.seen = Output(hidden=torch.empty(0), features=None, index_loss=torch.zeros(()))  # keeps the experts' token counts
        self.last = f"mtp.{self.draft.num_layers - 1}"

    def blocks(self, features: Tensor, batch: Tensor, anchors: Tensor, tokens: Tensor) -> Blocks:
        """``features`` [B, L, targets*D]; ``batch``, ``anchors``, ``tokens`` [A]: sequence, main position p, token p+1."""
        main, spec, p = self.main, self.spec, self.main.p
        size, w = self.draft.block_size, spec.sliding_window
        count = anchors.shape[0]
        memory = maths.rms_norm(features @ p["mtp.0.main_proj.weight"].T, p["mtp.0.main_norm.weight"], spec.rms_norm_eps)
        known = anchors[:, None] - torch.arange(w - 1, -1, -1)  # main rows p-W+1..p
        at = anchors[:, None] + torch.arange(1, size + 1)
        cos, sin = (maths.split_dim(t, 0, (count, size)) for t in maths.rope_table(main.frequencies, at.flatten()))
        known_cos, known_sin = maths.rope_table(main.frequencies, known.clamp(min=0))
        near = memory[batch[:, None], known.clamp(min=0)]  # [A, W, D]
        mask = torch.cat((known >= 0, torch.ones(count, size, dtype=torch.bool)), 1)
        inputs = torch.full((count, size), self.draft.noise_token_id)
        inputs[:, 0] = tokens
        x = functional.embedding(inputs, p["embed.weight"]).view(count * size, 1, -1).expand(-1, spec.hc_mult, -1)
        pm = torch.zeros(spec.hc_mult, count * size)
        pm[0] = 1
        for index in range(self.draft.num_layers):
            name = f"mtp.{index}"

            def attend(u: Tensor, name: str = f"{name}.attn") -> Tensor:
                rows = self._rows(near, name, known_cos, known_sin)
                return self._attend(u.view(count, size, -1), rows, mask, name, cos, sin).flatten(0, 1)

            x, pm = main.block(x, pm, name, attend, self.draft.experts_per_token, self.seen)
        hidden = (x * pm.T[:, :, None]).sum(1).view(count, size, -1)
        return Blocks(hidden, main.logits(maths.rms_norm(hidden, p[f"{self.last}.norm.weight"], spec.rms_norm_eps)))

    def _rows(self, x: Tensor, name: str, cos: Tensor, sin: Tensor) -> Tensor:
        rows = maths.rms_norm(x @ self.main.p[f"{name}.wkv.weight"].T, self.main.p[f"{name}.kv_norm.weight"], self.spec.rms_norm_eps)
        rows = maths.rotate(rows, cos, sin)
        return maths.straight_through(rows, maths.round_fp8(rows.detach())) if self.rounding else rows

    def _attend(self, x: Tensor, rows: Tensor, mask: Tensor, name: str, cos: Tensor, sin: Tensor) -> Tensor:
        """Each of the block's positions sees the main rows [A, W, C] and the whole block, both ways."""
        p, spec = self.main.p, self.spec
        qr = maths.rms_norm(x @ p[f"{name}.wq_a.weight"].T, p[f"{name}.q_norm.weight"], spec.rms_norm_eps)
        q = maths.split_dim(qr @ p[f"{name}.wq_b.weight"].T, -1, (spec.num_heads, -1))
        q = maths.rotate(q, cos[:, :, None], sin[:, :, None])
        keys = torch.cat((rows, self._rows(x, name, cos, sin)), 1)
        scores = torch.einsum("aqhc,akc->aqhk", q, keys) / math.sqrt(spec.head_dim)
        scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        sink = p[f"{name}.attn_sink"].view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        o = torch.einsum("aqhk,akc->aqhc", weights, keys)
        o = maths.rotate(o, cos[:, :, None], -sin[:, :, None])
        wo_a = maths.split_dim(p[f"{name}.wo_a.weight"], 0, (spec.o_groups, -1))
        z = torch.einsum("aqgk,grk->aqgr", maths.split_dim(o.flatten(2), 2, (spec.o_groups, -1)), wo_a)
        return z.flatten(2) @ p[f"{name}.wo_b.weight"].T

    def markov(self, previous: Tensor) -> Tensor:
        """Embedding [..., rank] of the token before, for the bias and for the confidence."""
        return functional.embedding(previous, self.main.p[f"{self.last}.markov_head.embed.weight"])

    def bias(self, markov: Tensor) -> Tensor:
        return markov @ self.main.p[f"{self.last}.markov_head.head.weight"].T

    def confidence_logits(self, hidden: Tensor, markov: Tensor) -> Tensor:
        return (torch.cat((hidden, markov), -1) @ self.main.p[f"{self.last}.confidence_head.proj.weight"].T).squeeze(-1)

    def greedy(self, features: Tensor, batch: Tensor, anchors: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Drafted tokens [A, Q] and confidences [A, Q]."""
        blocks = self.blocks(features, batch, anchors, tokens)
        drafted, confidences, previous = [], [], tokens
        for index in range(self.draft.block_size):
            markov = self.markov(previous)
            confidences.append(torch.sigmoid(self.confidence_logits(blocks.hidden[:, index], markov)))
            previous = (blocks.logits[:, index] + self.bias(markov)).argmax(-1)
            drafted.append(previous)
        return torch.stack(drafted, 1), torch.stack(confidences, 1)


def block_loss(draft: Draft, features: Tensor, main_logits: Tensor, ids: Tensor, per_sequence: int) -> tuple[Tensor, Tensor]:
    """Loss on random anchors, and the share of draft positions that agree with the main model, [Q].

    The main model's own distribution is the target (acceptance is judged by it, not by the text); the token before is the text's.
    """
    size = draft.draft.block_size
    b, length = ids.shape
    anchors = torch.randint(0, length - size - 1, (b * per_sequence,))
    batch = torch.arange(b).repeat_interleave(per_sequence)
    blocks = draft.blocks(features, batch, anchors, ids[batch, anchors + 1])
    at = anchors[:, None] + torch.arange(1, size + 1)
    markov = draft.markov(ids[batch[:, None], at])
    logits = blocks.logits + draft.bias(markov)
    target_logits = main_logits[batch[:, None], at]
    log_target = target_logits.log_softmax(-1)
    log_draft = logits.log_softmax(-1)
    divergence = (log_target.exp() * (log_target - log_draft)).sum(-1).mean(0)
    same = (logits.argmax(-1) == target_logits.argmax(-1)).float()
    hard = functional.cross_entropy(logits.flatten(0, 1), target_logits.argmax(-1).flatten(), reduction="none").view(-1, size).mean(0)
    weights = 0.8 ** torch.arange(size)  # a late position counts only where all before it were accepted
    confidence = functional.binary_cross_entropy_with_logits(draft.confidence_logits(blocks.hidden.detach(), markov.detach()), same)
    return ((0.5 * divergence + 0.5 * hard) * weights).sum() / weights.sum() + 0.2 * confidence, same.detach().mean(0)


def _draft(spec: V41Spec) -> DSparkSpec:
    if spec.dspark is None:
        raise ValueError(f"{spec.name} has no draft")
    return spec.dspark
