"""kernels.sampling against independent, slow definitions of the same things."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.sampling import Draw, accept_sampled, filtered_probs, inverse_cdf, penalised, residual, uniforms


def naive_filtered(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The definition, one row at a time in Python floats: temperature, top-k, top-p of the rest, min-p."""
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k:
        order = order[:top_k]
    mass = sum(weights[i] for i in order)
    kept: list[int] = []
    before = 0.0
    for i in order:
        if top_p < 1.0 and kept and before >= top_p * mass:
            break
        kept.append(i)
        before += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


def splitmix_uniform(seed: int, position: int, draw: int) -> float:
    """The published splitmix64 finaliser in Python integers, chained as documented."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return (mix((mix((seed + draw * golden) & mask) + position * golden) & mask) >> 40) / (1 << 24)


@pytest.mark.parametrize("seed", [0, 1, 12345678901, 2**63 - 1])
def test_uniforms_are_the_published_hash(seed: int) -> None:
    positions = torch.arange(0, 2000, 13)
    for draw in Draw:
        expected = [splitmix_uniform(seed, int(position), draw) for position in positions]
        assert uniforms(torch.tensor(seed), positions, draw).tolist() == expected


def test_uniforms_look_uniform_and_independent() -> None:
    u = uniforms(torch.arange(200)[:, None], torch.arange(500)[None, :], Draw.SAMPLE)
    v = uniforms(torch.arange(200)[:, None], torch.arange(500)[None, :], Draw.ACCEPT)
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    counts = torch.histc(u, 64, 0.0, 1.0)
    chi2 = float(((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum())
    assert chi2 < 120  # 63 degrees of freedom: mean 63, 1e-5 tail about 120
    for left, right in ((u, v), (u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1])) < 0.015


CASES = [
    (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 1.0, 1.0),
    (1.0, 0, 1.0, 0.1), (2.0, 20, 0.8, 0.05), (0.5, 10_000_000, 0.5, 0.0), (5.0, 3, 0.999999, 0.0), (100.0, 0, 0.999, 0.0),
    (50.0, 0, 1.0, 0.0), (20.0, 300, 1.0, 0.0), (20.0, 300, 0.9, 0.0), (3.0, 2999, 0.99, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [40, 3000])  # 3000 takes the path with candidates, which 20.0 / 300 must widen
def test_filters_match_the_definition(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(CASES), vocab_size, generator=generator) * 3
    probs = filtered_probs(
        logits,
        torch.tensor([case[0] for case in CASES]),
        torch.tensor([case[1] for case in CASES]),
        torch.tensor([case[2] for case in CASES]),
        torch.tensor([case[3] for case in CASES]),
    )
    for row, case in enumerate(CASES):
        expected = torch.tensor(naive_filtered(logits[row].tolist(), *case))
        assert torch.equal(probs[row] > 0, expected > 0), case
        torch.testing.assert_close(probs[row], expected, atol=2e-6, rtol=2e-4)


def test_ties_at_the_cut_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 3.0, 1.0]]).repeat(3, 1)
    probs = filtered_probs(logits, torch.ones(3), torch.tensor([1, 4, 0]), torch.tensor([1.0, 1.0, 0.3]))
    assert [(row > 0).nonzero().flatten().tolist() for row in probs] == [[1], [0, 1, 2, 4], [1]]
    assert probs[1, 1] == probs[1, 4]


def test_minus_infinity_is_never_kept() -> None:
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0]])
    probs = filtered_probs(logits, torch.ones(1), torch.tensor([3]), torch.tensor([1.0]), torch.tensor([0.0]))
    torch.testing.assert_close(probs, torch.tensor([[0.0, 0.73105858, 0.0, 0.26894142]]))


def test_tiny_temperature_is_the_argmax() -> None:
    logits = torch.tensor([[4.0, 4.1, -3.0]])
    assert filtered_probs(logits, torch.tensor([1e-30])).tolist() == [[0.0, 1.0, 0.0]]


def test_inverse_cdf_edges() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    below_half = 0.25 - 2.0**-24
    for u, token in ((0.0, 1), (below_half, 1), (0.25, 3), (1.0 - 2.0**-24, 3)):
        assert int(inverse_cdf(weights, torch.tensor([u]))) == token
    # A total of many terms rounds; the largest uniform still lands on a token with weight.
    flat = torch.full((1, 49152), 1e-5)
    flat[:, -7:] = 0.0
    assert int(inverse_cdf(flat, torch.tensor([1.0 - 2.0**-24]))) < 49152 - 7


def test_inverse_cdf_distribution() -> None:
    p = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05])
    u = uniforms(torch.tensor(7), torch.arange(40_000), Draw.SAMPLE)
    counts = torch.bincount(inverse_cdf(p.expand(40_000, 5), u), minlength=5)
    assert counts[2] == 0
    expected = p[p > 0] * 40_000
    assert float(((counts[p > 0] - expected) ** 2 / expected).sum()) < 25  # 3 degrees of freedom: 1e-5 tail


def naive_penalised(row: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float) -> Tensor:
    row = row.clone()
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= presence + frequency * output.count(token)
    return row


def test_penalties_match_the_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 12, generator=generator)
    prompts, outputs = [[1, 1, 5], [], [0]], [[5, 7, 7, 7], [], [11, 11]]
    numbers = [(1.5, 0.3, -0.2), (2.0, 1.0, 1.0), (0.8, -0.5, 0.4)]
    result = penalised(
        logits,
        torch.stack([torch.bincount(torch.tensor(p, dtype=torch.int64), minlength=12) > 0 for p in prompts]),
        torch.stack([torch.bincount(torch.tensor(o, dtype=torch.int64), minlength=12) for o in outputs]),
        *(torch.tensor(column) for column in zip(*numbers, strict=True)),
    )
    for row in range(3):
        torch.testing.assert_close(result[row], naive_penalised(logits[row], prompts[row], outputs[row], *numbers[row]))
    assert torch.equal(result[1], logits[1])


def test_acceptance_and_residual() -> None:
    p, q = torch.tensor([[0.6, 0.4, 0.0]]), torch.tensor([[0.2, 0.3, 0.5]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.4, 0.1, 0.0]]))
    torch.testing.assert_close(residual(p, p), p)  # nothing left: p itself, not a division by zero
    u = torch.tensor([[0.1, 0.9, 0.0]])
    assert accept_sampled(p, q, u).tolist() == [[True, True, False]]
    assert accept_sampled(p, None, u).tolist() == [[True, False, False]]
