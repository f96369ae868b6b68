"""DSpark on a tiny random model against the formulas written out: whole sequences, one token at a time, no cache, no batching."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.specs import DSparkSpec, EngramSpec, RopeScaling, V41Spec
from engine.core.tensors import FP32, NORM, expected_tensors
from engine.kernels.rounding import round_fp8
from engine.model.base import DraftOutput, DraftRequest
from engine.model.v41 import V41Model
from tests.model.v41_paged import DictWeights, Sequence, Server

SPEC = V41Spec(
    name="draft-test",
    vocab_size=61,
    hidden_size=32,
    num_layers=6,
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=24,
    o_lora_rank=8,
    o_groups=2,
    sliding_window=10,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 5),
    index_num_heads=16,
    index_head_dim=32,
    index_top_k=6,
    candidate_source_layer_id=3,
    candidate_top_k_blocks=2,
    candidate_block_size=4,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    rope_scaling=RopeScaling("yarn", 16.0, 64),
    max_positions=512,
    rms_norm_eps=1e-20,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    num_experts=8,
    experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=16,
    routed_scaling_factor=1.5,
    swiglu_limit=1.0,
    # The primes from 10 on: 11 + 13 + 17 rows, then 19 + 23 + 29.
    engram=EngramSpec((2, 4), (41, 71), 4, 1, 8, 11, 2, 50),
    dspark=DSparkSpec(3, 5, (3, 4, 5), 12, 60, 6, 3),
    bos_token_id=0,
    eos_token_ids=(1,),
    pad_token_id=2,
    image_token_id=None,
)
TOKEN_MAP = torch.arange(SPEC.vocab_size) % 50


def random_weights(seed: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, entry in expected_tensors(SPEC).items():
        noise = torch.randn(entry.shape, generator=generator)
        if entry.kind == NORM:
            tensors[name] = 1.0 + 0.2 * noise
        elif entry.kind == FP32:
            tensors[name] = noise * 0.5
        else:
            tensors[name] = noise * (1.0 if "embed" in name else 1.5 * entry.shape[-1] ** -0.5)
    return tensors


WEIGHTS = random_weights()


def model(rounding: bool = False) -> V41Model:
    return V41Model(SPEC, DictWeights(WEIGHTS), cache_rounding=rounding, token_map=TOKEN_MAP)


# -- the formulas, written out


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt()


def rotate(x: Tensor, position: int, sign: float = 1.0) -> Tensor:
    """Rotate the last 8 of a row, pair by pair."""
    out = x.clone()
    for pair in range(SPEC.rope_dim // 2):
        angle = sign * position * SPEC.rope_theta ** (-2 * pair / SPEC.rope_dim)
        first, second = x[..., -SPEC.rope_dim + 2 * pair], x[..., -SPEC.rope_dim + 2 * pair + 1]
        out[..., -SPEC.rope_dim + 2 * pair] = first * math.cos(angle) - second * math.sin(angle)
        out[..., -SPEC.rope_dim + 2 * pair + 1] = first * math.sin(angle) + second * math.cos(angle)
    return out


def naive_mix(streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    z = streams.flatten()
    m = (WEIGHTS[f"{prefix}_fn"] @ z) / (z.square().mean() + 1e-20).sqrt()
    scale, base = WEIGHTS[f"{prefix}_scale"], WEIGHTS[f"{prefix}_base"]
    pre = torch.sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
    post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
    matrix = torch.softmax((m[8:] * scale[2] + base[8:]).view(4, 4), dim=1) + 1e-6
    matrix = matrix / (matrix.sum(0, keepdim=True) + 1e-6)
    for _ in range(19):
        matrix = matrix / (matrix.sum(1, keepdim=True) + 1e-6)
        matrix = matrix / (matrix.sum(0, keepdim=True) + 1e-6)
    return pre, post, matrix


def naive_post(streams: Tensor, y: Tensor, post: Tensor, matrix: Tensor) -> Tensor:
    return torch.stack([post[j] * y + sum(matrix[i, j] * streams[i] for i in range(4)) for j in range(4)])


def naive_moe(x: Tensor, prefix: str) -> Tensor:
    def expert(name: str, weight: Tensor | float) -> Tensor:
        gate = (WEIGHTS[f"{name}.w1.weight"] @ x).clamp(max=SPEC.swiglu_limit)
        up = (WEIGHTS[f"{name}.w3.weight"] @ x).clamp(-SPEC.swiglu_limit, SPEC.swiglu_limit)
        return WEIGHTS[f"{name}.w2.weight"] @ (gate * torch.sigmoid(gate) * up * weight)

    scores = torch.log1p((WEIGHTS[f"{prefix}.gate.weight"] @ x).exp()).sqrt()
    assert SPEC.dspark is not None
    chosen = (scores + WEIGHTS[f"{prefix}.gate.bias"]).topk(SPEC.dspark.experts_per_token).indices.tolist()
    total = scores[chosen].sum()
    out = expert(f"{prefix}.shared_experts", 1.0)
    for index in chosen:
        out = out + expert(f"{prefix}.experts.{index}", scores[index] / total * SPEC.routed_scaling_factor)
    return out


def naive_draft_hidden(features: Tensor, token: int, rounding: bool) -> Tensor:
    """h_i of the 5 block rows, from the draft features [p, 3 * hidden] of all main tokens before the newest token."""
    assert SPEC.dspark is not None
    position = features.shape[0]
    main = [rms(WEIGHTS["mtp.0.main_proj.weight"] @ row, WEIGHTS["mtp.0.main_norm.weight"]) for row in features]
    inputs = [token, *([SPEC.dspark.noise_token_id] * 4)]
    streams = [WEIGHTS["embed.weight"][t].expand(4, -1) for t in inputs]
    pre = [torch.tensor([1.0, 0, 0, 0]) for _ in inputs]
    for layer in range(SPEC.dspark.num_layers):
        name = f"mtp.{layer}"

        def key(x: Tensor, at: int, name: str = name) -> Tensor:
            row = rotate(rms(WEIGHTS[f"{name}.attn.wkv.weight"] @ x, WEIGHTS[f"{name}.attn.kv_norm.weight"]), at)
            return round_fp8(row) if rounding else row

        mixes = [naive_mix(x, f"{name}.hc_attn") for x in streams]
        xs = [rms(pre[i] @ streams[i], WEIGHTS[f"{name}.attn_norm.weight"]) for i in range(5)]
        keys = [key(main[at], at) for at in range(max(0, position - SPEC.sliding_window), position)]
        keys += [key(x, position + i) for i, x in enumerate(xs)]
        stacked = torch.stack(keys)
        for i, x in enumerate(xs):
            low = rms(WEIGHTS[f"{name}.attn.wq_a.weight"] @ x, WEIGHTS[f"{name}.attn.q_norm.weight"])
            heads = []
            for head, q in enumerate((WEIGHTS[f"{name}.attn.wq_b.weight"] @ low).view(SPEC.num_heads, -1)):
                weights = (stacked @ rotate(q, position + i) / math.sqrt(SPEC.head_dim)).exp()
                total = weights.sum() + WEIGHTS[f"{name}.attn.attn_sink"][head].exp()
                heads.append(rotate(weights @ stacked / total, position + i, -1.0))
            groups = torch.stack(heads).view(SPEC.o_groups, -1)
            wo_a = WEIGHTS[f"{name}.attn.wo_a.weight"].view(SPEC.o_groups, SPEC.o_lora_rank, -1)
            y = WEIGHTS[f"{name}.attn.wo_b.weight"] @ torch.cat([wo_a[g] @ groups[g] for g in range(SPEC.o_groups)])
            streams[i] = naive_post(streams[i], y, *mixes[i][1:])
        pre = [mix[0] for mix in mixes]
        mixes = [naive_mix(x, f"{name}.hc_ffn") for x in streams]
        for i in range(5):
            y = naive_moe(rms(pre[i] @ streams[i], WEIGHTS[f"{name}.ffn_norm.weight"]), f"{name}.ffn")
            streams[i] = naive_post(streams[i], y, *mixes[i][1:])
        pre = [mix[0] for mix in mixes]
    return torch.stack([pre[i] @ streams[i] for i in range(5)])


def naive_logits(hidden: Tensor, previous: int) -> tuple[Tensor, Tensor]:
    """Logits with the Markov bias of ``previous``, and the confidence, of one block row."""
    embed = WEIGHTS["mtp.2.markov_head.embed.weight"][previous]
    base = WEIGHTS["head.weight"] @ rms(hidden, WEIGHTS["mtp.2.norm.weight"])
    confidence = torch.sigmoid(WEIGHTS["mtp.2.confidence_head.proj.weight"][0] @ torch.cat((hidden, embed)))
    return base + WEIGHTS["mtp.2.markov_head.head.weight"] @ embed, confidence


def naive_features(streams_TLSD: Tensor, row_ids: Tensor) -> Tensor:
    """Mean over the streams at the attention input of layers 3, 4, 5; layer 4 has Engram, which comes before."""
    parts = []
    for layer in (3, 4, 5):
        rows = []
        for t, streams in enumerate(streams_TLSD[:, layer - 1]):
            if layer == 4:
                name = "layers.4.engram"
                kv = (WEIGHTS[f"{name}.wkv.weight"] @ WEIGHTS[f"{name}.embed.weight"][row_ids[t, 1]].flatten()).view(5, -1)
                added = []
                for s in range(4):
                    gains = WEIGHTS[f"{name}.q_weight"][s] * WEIGHTS[f"{name}.k_weight"][s]
                    dot = (rms(streams[s]) * rms(kv[s]) * gains).sum() / math.sqrt(SPEC.hidden_size)
                    added.append(streams[s] + torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt()) * kv[4])
                streams = torch.stack(added)
            rows.append(streams.mean(0))
        parts.append(torch.stack(rows))
    return torch.cat(parts, dim=1)


# -- the server's side

PROMPTS = ([3, 17, 25, 8], [int(x) for x in torch.randint(3, 60, (23,), generator=torch.Generator().manual_seed(4))])


def prefill(server: Server, chunk: int = 100) -> tuple[list[Sequence], list[Tensor]]:
    """Both prompts computed but for their newest token, and the naive features of each."""
    capture = frozenset({"streams.after_layer", "engram.row_ids"})
    sequences, features = [], []
    for prompt in PROMPTS:
        sequence = server.start(prompt)
        parts = []
        while sequence.computed < len(prompt) - 1:
            captures = server.step([(sequence, min(chunk, len(prompt) - 1 - sequence.computed))], capture=capture).captures
            assert captures is not None
            parts.append(naive_features(captures["streams.after_layer"], captures["engram.row_ids"]))
        sequences.append(sequence)
        features.append(torch.cat(parts))
    return sequences, features


def request(sequences: list[Sequence], count: int, temperatures: list[float] | None = None, uniform: float = 0.5) -> DraftRequest:
    size = len(sequences)
    return DraftRequest(
        slots_A=torch.tensor([sequence.slot for sequence in sequences]),
        tokens_A=torch.tensor([sequence.tokens[sequence.computed] for sequence in sequences]),
        positions_A=torch.tensor([sequence.computed for sequence in sequences]),
        temperatures_A=torch.tensor(temperatures or [0.0] * size),
        top_k_A=torch.tensor([0, 7][:size]),
        top_p_A=torch.tensor([0.8, 1.0][:size]),
        min_p_A=torch.zeros(size),
        uniforms_AK=(torch.arange(size * count).view(size, count) * 0.37 + uniform) % 1.0,
        num_tokens=count,
        all_greedy=temperatures is None,
    )


@pytest.mark.parametrize("rounding", [False, True])
def test_greedy_drafts_equal_the_formulas(rounding: bool) -> None:
    server = Server(model(rounding), num_tails=0)
    sequences, features = prefill(server)
    output = server.model.draft(request(sequences, 5), server.cache)
    assert output.probs_AKV is None
    for index, sequence in enumerate(sequences):
        hidden = naive_draft_hidden(features[index], sequence.tokens[-1], rounding)
        previous = sequence.tokens[-1]
        for step in range(5):
            logits, confidence = naive_logits(hidden[step], previous)
            top = logits.topk(2).values
            assert top[0] - top[1] > 1e-3, "a near tie: choose another seed"
            previous = int(logits.argmax())
            assert int(output.tokens_AK[index, step]) == previous
            assert abs(float(output.confidences_AK[index, step]) - float(confidence)) < 1e-4


@pytest.mark.parametrize("count", [1, 2, 4])
def test_fewer_tokens_are_a_prefix(count: int) -> None:
    server = Server(model(), num_tails=0)
    sequences, _ = prefill(server)
    whole = server.model.draft(request(sequences, 5), server.cache)
    part = server.model.draft(request(sequences, count), server.cache)
    assert torch.equal(part.tokens_AK, whole.tokens_AK[:, :count])
    torch.testing.assert_close(part.confidences_AK, whole.confidences_AK[:, :count])


def test_sampled_drafts_report_the_distribution_they_came_from() -> None:
    server = Server(model(), num_tails=0)
    sequences, features = prefill(server)
    temperatures = [0.7, 1.3]
    asked = request(sequences, 5, temperatures)
    output = server.model.draft(asked, server.cache)
    assert output.probs_AKV is not None
    for index, sequence in enumerate(sequences):
        hidden = naive_draft_hidden(features[index], sequence.tokens[-1], False)
        previous = sequence.tokens[-1]
        for step in range(5):
            logits, _ = naive_logits(hidden[step], previous)
            probs = torch.softmax(logits / temperatures[index], dim=0)
            order = probs.argsort(descending=True)
            if index == 0:  # top-p 0.8
                kept = int((probs[order].cumsum(0) < 0.8).sum()) + 1
            else:  # top-k 7
                kept = 7
            expected = torch.zeros_like(probs)
            expected[order[:kept]] = probs[order[:kept]] / probs[order[:kept]].sum()
            torch.testing.assert_close(output.probs_AKV[index, step], expected, rtol=0.0, atol=1e-4)
            previous = int(output.tokens_AK[index, step])
            below = float(expected[:previous].sum())
            assert below - 1e-3 <= float(asked.uniforms_AK[index, step]) <= below + float(expected[previous]) + 1e-3


def test_a_greedy_sequence_among_sampled_ones() -> None:
    server = Server(model(), num_tails=0)
    sequences, _ = prefill(server)
    greedy = server.model.draft(request(sequences, 5), server.cache)
    mixed = server.model.draft(request(sequences, 5, [0.0, 1.0]), server.cache)
    assert mixed.probs_AKV is not None
    assert torch.equal(mixed.tokens_AK[0], greedy.tokens_AK[0])
    assert torch.equal(mixed.probs_AKV[0].argmax(-1), greedy.tokens_AK[0])
    assert torch.equal(mixed.probs_AKV[0].amax(-1), torch.ones(5))


def same(actual: DraftOutput, expected: DraftOutput) -> None:
    assert torch.equal(actual.tokens_AK, expected.tokens_AK)
    torch.testing.assert_close(actual.confidences_AK, expected.confidences_AK, rtol=0.0, atol=1e-5)


def test_alone_chunked_after_rejections_and_from_a_tail() -> None:
    """However the main rows came to be there, the draft is the same."""
    reference = Server(model(), num_tails=0)
    expected = reference.model.draft(request(prefill(reference)[0], 5), reference.cache)
    long = DraftOutput(expected.tokens_AK[1:], None, expected.confidences_AK[1:])
    end = len(PROMPTS[1]) - 1

    chunked = Server(reference.model, num_tails=0)
    same(reference.model.draft(request(prefill(chunked, 3)[0], 5), chunked.cache), expected)

    alone = Server(reference.model)
    donor = alone.start(PROMPTS[1])
    alone.step([(donor, end)], tail_saves=((0, 16, 1),))
    same(reference.model.draft(request([donor], 5), alone.cache), long)

    heir = alone.start(PROMPTS[1], 16, donor.blocks[:2])
    alone.cache.load_tails([1], [heir.slot], [16])
    alone.step([(heir, end - 16)])
    same(reference.model.draft(request([heir], 5), alone.cache), long)

    rejecting = Server(reference.model, max_draft=5)
    sequence = rejecting.start(PROMPTS[1])
    rejecting.step([(sequence, 12)])
    while sequence.computed < end:
        begin = sequence.computed
        sequence.tokens = PROMPTS[1][: begin + 1] + [5] * 5
        rejecting.step([(sequence, 6)])
        sequence.computed = begin + 1
        sequence.tokens = list(PROMPTS[1])
        rejecting.model.draft(request([sequence], 5), rejecting.cache)  # a round in between leaves nothing behind
    same(reference.model.draft(request([sequence], 5), rejecting.cache), long)


def test_too_many_tokens_and_no_draft_are_refused() -> None:
    import msgspec

    server = Server(model(), num_tails=0)
    sequences, _ = prefill(server)
    with pytest.raises(ConfigError, match="6 draft tokens"):
        server.model.draft(request(sequences, 6), server.cache)
    closed = Server(server.model, max_draft=0)
    with pytest.raises(ConfigError, match="max_draft_tokens 0"):
        closed.model.draft(request(sequences, 1), closed.cache)
    without = V41Model(msgspec.structs.replace(SPEC, dspark=None), DictWeights(WEIGHTS), token_map=TOKEN_MAP)
    with pytest.raises(ConfigError, match="no draft"):
        without.draft(request(sequences, 1), without.new_cache(server.cache.config))


@pytest.mark.parametrize("rows", [[22], [3, 11, 12], list(range(21, -1, -1))])
def test_the_last_layer_computes_wanted_rows_only(rows: list[int]) -> None:
    """A last layer that selects for itself (Reindex inside candidates), asked for few rows or all of them in another order."""
    whole = Server(model(), num_tails=0)
    expected = whole.step([(whole.start(PROMPTS[1]), 23)]).logits_RV
    some = Server(whole.model, num_tails=0)
    sequence = some.start([*PROMPTS[1], 9])
    torch.testing.assert_close(some.step([(sequence, 23)], rows).logits_RV, expected[rows], rtol=0.0, atol=1e-4)
    other = whole.start([*PROMPTS[1], 9])
    whole.step([(other, 23)])
    torch.testing.assert_close(some.step([(sequence, 1)]).logits_RV, whole.step([(other, 1)]).logits_RV, rtol=0.0, atol=1e-4)
