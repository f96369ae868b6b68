"""Properties of the packed kernels that no golden data covers: experts both ways, ragged index scores, tiling."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import attention_sparse, indexer
from engine.kernels.attention_sparse import sparse_attention, window_attention
from engine.kernels.experts import expert_form, expert_gemm, expert_gemm_dense, expert_gemm_single, gated_ffn, swiglu
from engine.kernels.indexer import index_scores, token_groups
from engine.kernels.kv_write import kv_write

torch.set_num_threads(1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40])
def test_experts_grouped_and_dense_equal_a_loop(dtype: torch.dtype, tokens: int) -> None:
    experts, inner, hidden, top_k, limit = 8, 24, 32, 3, 0.7
    rng = generator(tokens)
    x = torch.randn(tokens, hidden, generator=rng).to(dtype)
    w13 = (torch.randn(experts + 1, 2 * inner, hidden, generator=rng) * 0.3).to(dtype)
    w2 = (torch.randn(experts + 1, inner, hidden, generator=rng) * 0.3).to(dtype)
    ids = torch.rand(tokens, experts, generator=rng).topk(top_k).indices if tokens else torch.zeros(0, top_k, dtype=torch.int64)
    weights = torch.rand(tokens, top_k, generator=rng)
    always = torch.zeros(1, experts + 1)
    always[0, experts] = 1.0
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        chosen = [*zip(ids[token].tolist(), weights[token].tolist(), strict=True), (experts, 1.0)]
        for expert, weight in chosen:
            both = w13[expert].float() @ x[token].float()
            gate, up = both[:inner].clamp(max=limit), both[inner:].clamp(-limit, limit)
            expected[token] += (gate * torch.sigmoid(gate) * up * weight) @ w2[expert].float()
    dense = expert_gemm_dense(x, weights, ids, w13, w2, always, limit)
    grouped = expert_gemm(x, weights, ids, w13[:experts], w2[:experts], limit) + gated_ffn(x, w13[experts], w2[experts], limit)
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    if tokens == 1:
        ids_all, weights_all = torch.cat((ids[0], torch.tensor([experts]))), torch.cat((weights[0], torch.ones(1)))
        single = expert_gemm_single(x, weights_all, ids_all, w13, w2, limit)
        torch.testing.assert_close(single.float(), expected, rtol=0.0, atol=tolerance)
    assert dense.dtype == grouped.dtype == dtype
    torch.testing.assert_close(dense.float(), expected, rtol=0.0, atol=tolerance)
    torch.testing.assert_close(grouped.float(), expected, rtol=0.0, atol=tolerance)


def test_the_form_of_the_experts() -> None:
    small, large = torch.zeros(9, 24, 64), torch.zeros(385, 64, 256)
    assert expert_form(1, 2, small) == "single"
    assert expert_form(8, 2, small) == "dense"
    assert expert_form(4000, 2, small) == "grouped"
    assert expert_form(2, 6, large) == "grouped"
    assert expert_form(1, 6, torch.zeros(7, 2304, 512)) == "grouped"  # too much to copy
    assert expert_form(4000, 2, torch.zeros(9, 23, 64)) == "dense"  # rows that grouped_mm refuses


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([-30.0, -5.0, 5.0]), torch.tensor([2.0, -2.0, 2.0])
    expected = torch.tensor([-30.0, -5.0, 1.0]) * torch.sigmoid(torch.tensor([-30.0, -5.0, 1.0])) * torch.tensor([1.0, -1.0, 1.0])
    torch.testing.assert_close(swiglu(gate, up, 1.0), expected)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 3, 3, 3), (4, 2, 3), (70, 1, 1, 33), (200,), (1, 64, 65)])
@pytest.mark.parametrize("tile", [1, 1 << 30])
def test_index_scores_of_a_ragged_batch(lengths: tuple[int, ...], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_TILE_ELEMENTS_CPU", tile)
    rng = generator(sum(lengths))
    heads, dim, positions = 5, 8, 13
    tokens = sum(lengths)
    q = torch.randn(tokens, heads, dim, generator=rng)
    weights = torch.randn(tokens, heads, generator=rng)
    keys = torch.randn(100, dim, generator=rng)
    rows = torch.randint(0, 100, (len(lengths), positions), generator=rng)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    groups = token_groups(starts, owner, len(lengths), max(lengths))
    expected = torch.einsum("th,thj->tj", weights, torch.einsum("thi,tji->thj", q, keys[rows[owner]]).relu())
    torch.testing.assert_close(index_scores(q, weights, keys, rows, groups), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [1, 1 << 30])
def test_attention_equals_a_softmax_with_sink(dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_sparse, "_TILE_ELEMENTS_CPU", tile)
    rng = generator(1)
    tokens, heads, dim, window, chosen = 9, 3, 16, 6, 4
    q = torch.randn(tokens, heads, dim, generator=rng).to(dtype)
    cache = torch.randn(50, dim, generator=rng).to(dtype)
    cache[49] = 0
    table = torch.randint(0, 49, (tokens, 1 + window + chosen), generator=rng)
    table[:, 0] = 49
    hidden = torch.rand(tokens, 1 + window + chosen, generator=rng) < 0.3
    hidden[0, 1:] = True  # a token that sees nothing but the sink
    bias = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")).to(dtype)
    table[hidden] = 49
    sink = torch.randn(heads, generator=rng)

    def expected(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("thd,tkd->thk", q.float(), rows.float()) * 0.25
        weights = scores.exp() * ~mask.unsqueeze(1)
        return torch.einsum("thk,tkd->thd", weights / (weights.sum(-1, keepdim=True) + sink.exp().view(1, -1, 1)), rows.float())

    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    both = sparse_attention(q, cache, table, bias, sink, 0.25)
    torch.testing.assert_close(both.float(), expected(cache[table[:, 1:]], hidden[:, 1:]), rtol=0.0, atol=tolerance)
    near = slice(0, 1 + window)
    alone = window_attention(q, cache, table[:, near], bias[:, near], sink, 0.25)
    torch.testing.assert_close(alone.float(), expected(cache[table[:, near][:, 1:]], hidden[:, near][:, 1:]), rtol=0.0, atol=tolerance)


def test_kv_write_touches_its_rows_only() -> None:
    cache = torch.zeros(6, 2)
    kv_write(cache, torch.tensor([4, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert cache.tolist() == [[0, 0], [3, 4], [0, 0], [0, 0], [1, 2], [0, 0]]
