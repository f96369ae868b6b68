"""The sampler: exact distributions, lossless verification, independence of the batch, and what it refuses."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from engine.core.sampling import SamplingParams
from engine.kernels.sampling import Draw, filtered_probs, inverse_cdf, uniforms
from engine.model.sample import DraftTokens, SampleOutput, SampleRows
from engine.model.sampler import Sampler

EOS = 3


def rows_for(slots: list[int], num_drafts: list[int] | None = None) -> SampleRows:
    drafts = torch.tensor(num_drafts or [0] * len(slots))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), (drafts + 1).cumsum(0)))
    return SampleRows(torch.tensor(slots), drafts, starts, int(drafts.max()), slots)


def make(params: list[SamplingParams], vocab_size: int = 16, prompts: list[list[int]] | None = None) -> Sampler:
    sampler = Sampler(vocab_size, len(params), torch.device("cpu"), (EOS,))
    for slot, param in enumerate(params):
        sampler.start(slot, param, 100 + slot, prompts[slot] if prompts else [1, 2], [])
    return sampler


def emitted(output: SampleOutput) -> list[list[int]]:
    return [row[:count] for row, count in zip(output.tokens_IK.tolist(), output.counts_I.tolist(), strict=True)]


def chi2(counts: Tensor, probs: Tensor) -> float:
    assert not counts[probs == 0].any(), "a token of probability 0 was emitted"
    expected = probs[probs > 0] * counts.sum()
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


def logits_of(num_rows: int, vocab_size: int = 16, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_is_the_argmax() -> None:
    logits = logits_of(3)
    assert emitted(make([SamplingParams()] * 3).sample(logits, rows_for([2, 0, 1]))) == logits.argmax(1, keepdim=True).tolist()


def test_sampling_has_the_exact_distribution() -> None:
    """8000 slots with their own seeds draw from one row; four parameter sets side by side in one batch."""
    kinds = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.7, min_p=0.05),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, logit_bias=((2, 1.5), (7, -100.0))),
    ]
    n = 8000
    sampler = make([kinds[slot % 4] for slot in range(4 * n)])
    row = logits_of(1, seed=5)
    tokens = sampler.sample(row.expand(4 * n, -1), rows_for(list(range(4 * n)))).tokens_IK[:, 0]
    for kind, params in enumerate(kinds):
        logits = row.clone()
        for token, bias in params.logit_bias:
            logits[0, token] += bias
        probs = filtered_probs(
            logits,
            torch.tensor([params.temperature]),
            torch.tensor([params.top_k]),
            torch.tensor([params.top_p]),
            torch.tensor([params.min_p]),
        )[0]
        assert chi2(torch.bincount(tokens[kind::4], minlength=16), probs) < 50  # at most 15 degrees of freedom: 1e-5 tail is 51


def joint_counts(tokens_IK: Tensor, counts_I: Tensor, vocab_size: int) -> Tensor:
    """Counts of emitted (first, second) pairs, of the items that emitted two or more."""
    two = tokens_IK[counts_I > 1]
    return torch.bincount(two[:, 0] * vocab_size + two[:, 1], minlength=vocab_size**2)


@pytest.mark.parametrize("with_probs", [True, False])
def test_verification_is_lossless(with_probs: bool) -> None:
    """Drafts from a wrong distribution q; the first emitted token must follow p exactly, and so must what follows an accept."""
    n, vocab_size, num_drafts = 30_000, 6, 2
    params = SamplingParams(temperature=0.9, top_p=0.95)
    sampler = make([params] * n, vocab_size)
    rows = rows_for(list(range(n)), [num_drafts] * n)
    target = logits_of(3, vocab_size, seed=8, scale=1.0)
    draft_logits = logits_of(num_drafts, vocab_size, seed=9)
    p = filtered_probs(target, torch.full((3,), 0.9), None, torch.full((3,), 0.95))
    q = draft_logits.softmax(1)
    if with_probs:
        draws = sampler.draft_controls(rows, num_drafts).uniforms_AK
        drafts = torch.stack([inverse_cdf(q[j].expand(n, -1), draws[:, j]) for j in range(num_drafts)], 1)
        given = DraftTokens(drafts, q.expand(n, num_drafts, vocab_size))
    else:
        given = DraftTokens(torch.tensor([[int(p[0].argmax()), int(p[1].topk(2).indices[1])]]).expand(n, -1), None)
    output = sampler.sample(target.repeat(n, 1), rows, given)
    first = torch.bincount(output.tokens_IK[:, 0], minlength=vocab_size)
    assert chi2(first, p[0]) < 35  # at most 5 degrees of freedom; 1e-5 tail 31
    accepted = output.counts_I > 1
    # The rows do not depend on the drafts here, so given an accepted first draft the second token follows p[1], the third p[2].
    assert chi2(torch.bincount(output.tokens_IK[accepted, 1], minlength=vocab_size), p[1]) < 35
    assert chi2(torch.bincount(output.tokens_IK[output.counts_I > 2, 2], minlength=vocab_size), p[2]) < 35
    q_first = q[0] if with_probs else torch.nn.functional.one_hot(given.tokens_IK[0, 0], vocab_size).float()
    rate = float(torch.minimum(p[0], q_first).sum())
    assert abs(float(accepted.float().mean()) - rate) < 0.015
    assert 0.2 < rate < 0.95  # both branches were exercised


def test_wrong_q_would_be_noticed() -> None:
    """The control of the test above: claiming another q than the drafts' must distort the first token."""
    n, vocab_size = 30_000, 6
    sampler = make([SamplingParams(temperature=0.9)] * n, vocab_size)
    rows = rows_for(list(range(n)), [1] * n)
    target, q = logits_of(2, vocab_size, seed=8), logits_of(1, vocab_size, seed=9).softmax(1)
    drafts = inverse_cdf(q.expand(n, -1), sampler.draft_controls(rows, 1).uniforms_AK[:, 0])[:, None]
    output = sampler.sample(target.repeat(n, 1), rows, DraftTokens(drafts, torch.full((n, 1, vocab_size), 1 / vocab_size)))
    p = filtered_probs(target, torch.full((2,), 0.9))
    assert chi2(torch.bincount(output.tokens_IK[:, 0], minlength=vocab_size), p[0]) > 200


def test_greedy_verification_and_ragged_items() -> None:
    """Items with 0, 3, 2 and 1 drafts; greedy ones keep the prefix that equals the arg-max."""
    best = [4, 9, 1, 2, 5, 6, 7, 8, 10, 11]  # rows: item 0 | item 1 x4 | item 2 x3 | item 3 x2
    logits = torch.nn.functional.one_hot(torch.tensor(best), 16).float() * 50
    params = [SamplingParams(), SamplingParams(), SamplingParams(), SamplingParams(temperature=1.0)]
    drafts = torch.tensor([[0, 0, 0, 15], [9, 1, 3, 15], [6, 7, 0, 15], [10, 0, 0, 15]])
    output = make(params).sample(logits, rows_for([0, 1, 2, 3], [0, 3, 2, 1]), DraftTokens(drafts, None))
    assert emitted(output) == [[4], [9, 1, 2], [6, 7, 8], [10, 11]]
    assert output.tokens_IK.shape == (4, 4)


def test_a_rejected_point_mass_is_not_drawn_again() -> None:
    n = 2000
    sampler = make([SamplingParams(temperature=1.0)] * n, 4)
    logits = torch.zeros(2 * n, 4)
    output = sampler.sample(logits, rows_for(list(range(n)), [1] * n), DraftTokens(torch.full((n, 1), 2), None))
    rejected = output.tokens_IK[output.counts_I == 1, 0]
    assert not (rejected == 2).any()
    assert abs(len(rejected) / n - 0.75) < 0.05
    assert chi2(torch.bincount(rejected, minlength=4), torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3])) < 25


def test_a_request_does_not_depend_on_its_batch() -> None:
    """The same requests alone, together, and in another order with other neighbours' features emit the same tokens."""
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=4, frequency_penalty=1.0),
        SamplingParams(temperature=1.3, top_p=0.8, repetition_penalty=1.4),
        SamplingParams(temperature=1.0, min_p=0.1, logit_bias=((3, 2.0),)),
        SamplingParams(),
        SamplingParams(temperature=2.0, min_tokens=4, presence_penalty=0.5),
    ]
    logits = [logits_of(len(params), 700, seed=step) for step in range(6)]
    together = make(params, 700)
    expected = [together.sample(rows, rows_for(list(range(6)))).tokens_IK[:, 0].tolist() for rows in logits]
    shuffled = make(params, 700)
    order = [5, 2, 0, 4, 1, 3]
    for step, rows in enumerate(logits):
        tokens = shuffled.sample(rows[order], rows_for(order)).tokens_IK[:, 0].tolist()
        assert tokens == [expected[step][slot] for slot in order]
    for slot in range(6):
        alone = make(params, 700)
        assert [alone.sample(rows[slot : slot + 1], rows_for([slot])).tokens_IK.item() for rows in logits] == [e[slot] for e in expected]


def test_a_resumed_request_continues_as_if_it_had_not_left() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=6)
    logits = [logits_of(1, 50, seed=step) for step in range(8)]
    whole = make([params], 50)
    expected = [whole.sample(rows, rows_for([0])).tokens_IK.item() for rows in logits]
    resumed = make([params] * 2, 50)
    resumed.start(1, params, 100, [1, 2], [int(token) for token in expected[:3]])
    assert [resumed.sample(rows, rows_for([1])).tokens_IK.item() for rows in logits[3:]] == expected[3:]
    other_seed = make([params] * 2, 50)
    assert [other_seed.sample(rows, rows_for([1])).tokens_IK.item() for rows in logits] != expected


def naive_adjusted(row: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    row = row.clone()
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in set(prompt) | set(output):
        row[token] = row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))):
            row[token] = -torch.inf
    return row


ADJUSTING = [
    SamplingParams(repetition_penalty=1.8, presence_penalty=0.4, frequency_penalty=0.9),
    SamplingParams(frequency_penalty=-1.5, logit_bias=((4, 3.0), (4, 1.0), (0, -2.0))),
    SamplingParams(min_tokens=5, stop_token_ids=(7, 9)),
    SamplingParams(min_tokens=3, stop_token_ids=(1,), ignore_eos=True, presence_penalty=2.0),
    SamplingParams(),
]


def test_adjustments_match_the_definition_over_a_run() -> None:
    prompts = [[1, 1, 6], [2], [3, 3], [], [5]]
    sampler = make(ADJUSTING, prompts=prompts)
    outputs: list[list[int]] = [[] for _ in ADJUSTING]
    for step in range(10):
        logits = logits_of(len(ADJUSTING), seed=step % 2, scale=1.0)
        logits[:, EOS] += 5.0
        tokens = sampler.sample(logits, rows_for(list(range(len(ADJUSTING))))).tokens_IK[:, 0].tolist()
        for slot, params in enumerate(ADJUSTING):
            assert tokens[slot] == int(naive_adjusted(logits[slot], params, prompts[slot], outputs[slot]).argmax()), (step, slot)
            outputs[slot].append(tokens[slot])
    assert EOS in outputs[2][5:]
    assert EOS not in outputs[2][:5]
    assert EOS in outputs[3][:3]


def test_penalties_see_earlier_drafts_and_what_was_accepted() -> None:
    """Greedy verification with penalties equals one-by-one greedy decoding of the same rows."""
    params = [SamplingParams(frequency_penalty=2.0, repetition_penalty=1.5, min_tokens=2, stop_token_ids=(5,)), SamplingParams()]
    base = logits_of(1, seed=3)[0]
    one_by_one: list[int] = []
    for _ in range(7):
        one_by_one.append(int(naive_adjusted(base, params[0], [1, 2], one_by_one).argmax()))
    assert len(set(one_by_one)) > 2
    sampler = make(params)
    first = sampler.sample(base.expand(5, -1), rows_for([0, 1], [3, 0]), DraftTokens(torch.tensor([one_by_one[:3], [0, 0, 0]]), None))
    assert emitted(first)[0] == one_by_one[:4]
    wrong = [one_by_one[4], (one_by_one[5] + 1) % 16, 0]
    second = sampler.sample(base.expand(4, -1), rows_for([0], [3]), DraftTokens(torch.tensor([wrong]), None))
    assert emitted(second)[0] == one_by_one[4:6]
    third = sampler.sample(base.expand(1, -1), rows_for([0]))
    assert emitted(third)[0] == one_by_one[6:7]


def test_a_slot_is_clean_after_its_request() -> None:
    sampler = make(ADJUSTING)
    logits = logits_of(1)
    for _ in range(3):
        sampler.sample(logits, rows_for([0]))
    sampler.start(0, SamplingParams(), 1, [1], [])
    assert sampler.sample(logits, rows_for([0])).tokens_IK.item() == int(logits.argmax())
    sampler.start(1, SamplingParams(presence_penalty=0.01), 1, [1], [])  # takes the row that slot 0 gave back
    assert sampler.sample(logits, rows_for([1])).tokens_IK.item() == int(logits.argmax())


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = [SamplingParams(temperature=0.3, top_k=2, logprobs=3, logit_bias=((0, 5.0),)), SamplingParams(), SamplingParams(logprobs=0)]
    logits = logits_of(3)
    output = make(params).sample(logits, rows_for([0, 1, 2]))
    raw = logits.log_softmax(1)
    assert output.logprobs is not None
    assert output.logprobs[1] is None
    first, last = output.logprobs[0], output.logprobs[2]
    assert first is not None
    assert last is not None
    assert first[0].chosen == pytest.approx(float(raw[0, output.tokens_IK[0, 0]]), abs=1e-6)
    assert first[0].top_ids == tuple(raw[0].topk(3).indices.tolist())
    assert first[0].top_logprobs == pytest.approx(raw[0].topk(3).values.tolist(), abs=1e-6)
    assert last[0].top_ids == ()


def test_logprobs_of_every_accepted_draft() -> None:
    logits = logits_of(5)
    best = logits.argmax(1).tolist()
    sampler = make([SamplingParams(), SamplingParams(logprobs=1)])
    output = sampler.sample(
        logits, rows_for([0, 1], [0, 3]), DraftTokens(torch.tensor([[0, 0, 0], [best[1], best[2], (best[3] + 1) % 16]]), None)
    )
    assert output.logprobs is not None
    entries = output.logprobs[1]
    assert entries is not None
    raw = logits.log_softmax(1)
    assert [entry.chosen for entry in entries] == pytest.approx([float(raw[row].max()) for row in (1, 2, 3)], abs=1e-6)
    assert [entry.top_ids for entry in entries] == [(best[1],), (best[2],), (best[3],)]


@pytest.mark.parametrize(
    ("bad", "params"),
    list(
        product([torch.nan, torch.inf], [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logit_bias=((1, -torch.inf),))])
    ),
)
def test_unusable_logits_end_their_item_alone(bad: float, params: SamplingParams) -> None:
    good = logits_of(3)
    logits = good.clone()
    logits[1, 1] = bad
    sampler, undisturbed = make([params] * 3), make([params] * 3)
    for _ in range(3):  # the state of the others goes on as if nothing had happened
        output = sampler.sample(logits, rows_for([0, 2, 1]))
        healthy = emitted(undisturbed.sample(good, rows_for([0, 2, 1])))
        assert list(output.errors) == [1]
        assert "unusable" in output.errors[1]
        assert output.unusable_logits
        assert emitted(output) == [healthy[0], [], healthy[2]]


@pytest.mark.parametrize("bad_row", [0, 1, 2])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, logprobs=2, frequency_penalty=0.5)])
def test_a_bad_row_among_drafts_ends_its_item_alone(bad_row: int, params: SamplingParams) -> None:
    logits, drafts = logits_of(7, scale=6.0), DraftTokens(torch.tensor([[1, 2], [3, 4], [5, 6]]), None)
    rows = rows_for([0, 1, 2], [2, 2, 0])
    healthy = make([params] * 3).sample(logits, rows, drafts)
    logits[3 + bad_row, 7] = torch.nan
    output = make([params] * 3).sample(logits, rows, drafts)
    assert list(output.errors) == [1]
    wanted = emitted(healthy)
    assert emitted(output) == [wanted[0], [], wanted[2]]
    if params.logprobs is not None:
        assert output.logprobs is not None
        assert output.logprobs[1] == []


def test_everything_masked_ends_the_item_alone() -> None:
    bias = tuple((token, -torch.inf) for token in range(16))
    sampler = make([SamplingParams(logit_bias=bias, temperature=1.0), SamplingParams()])
    output = sampler.sample(logits_of(2), rows_for([0, 1]))
    assert list(output.errors) == [0]
    assert "no token is left" in output.errors[0]
    assert not output.unusable_logits
    assert emitted(output)[1] == [int(logits_of(2)[1].argmax())]


def test_filters_at_their_limits_are_greedy() -> None:
    limits = [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-12),
        SamplingParams(temperature=1.0, min_p=1.0),
    ]
    sampler = make(limits, 5000)
    for step in range(20):
        logits = logits_of(3, 5000, seed=step)
        assert sampler.sample(logits, rows_for([0, 1, 2])).tokens_IK[:, 0].tolist() == logits.argmax(1).tolist()


def test_draft_uniforms_follow_the_output_position() -> None:
    sampler = make([SamplingParams(temperature=1.0), SamplingParams()])
    rows = rows_for([0, 1])
    sampler.sample(logits_of(2), rows)
    controls = sampler.draft_controls(rows, 3)
    assert not controls.all_greedy
    assert torch.equal(controls.uniforms_AK[0], uniforms(torch.tensor(100), torch.tensor([1, 2, 3]), Draw.DRAFT))
    assert sampler.draft_controls(rows_for([1]), 3).all_greedy
