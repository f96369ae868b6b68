"""Whatever the scheduler may do to a sequence, its logits are those of an undisturbed run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from tests.model.v41_paged import Case, Sequence, Server, load_case

CASES = ("v41_csa2_plain", "v41_engram", "v41_ragged_greedy")
TOLERANCE = 1e-4  # float32 sums in another order; a wrong row shows as 0.1 and more


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


def prompt_of(case: Case) -> list[int]:
    return max(case.prompts, key=len)


def expected_rows(case: Case) -> Tensor:
    """Golden logits of the longest prompt."""
    index = max(range(len(case.prompts)), key=lambda i: len(case.prompts[i]))
    bounds = case.expected["cu_seqlens"]
    return case.expected["logits"][bounds[index] : bounds[index + 1]]


def close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() <= TOLERANCE


def run_to_end(server: Server, sequence: Sequence, chunk: int = 16) -> Tensor:
    rows = []
    while sequence.computed < len(sequence.tokens):
        rows.append(server.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))]).logits_RV)
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 33, 64])
def test_chunked_prefill_equals_whole(case: Case, chunk: int) -> None:
    server = Server(case.model)
    close(run_to_end(server, server.start(prompt_of(case)), chunk), expected_rows(case))


@pytest.mark.parametrize("block_size", [2, 4, 32])
def test_block_size_does_not_matter(case: Case, block_size: int) -> None:
    server = Server(case.model, block_size=block_size)
    close(run_to_end(server, server.start(prompt_of(case)), 21), expected_rows(case))


def test_batched_equals_alone(case: Case) -> None:
    """Sequences that start at different steps, with chunks of different length in every step."""
    server = Server(case.model)
    prompt = prompt_of(case)
    sequences = [server.start(prompt[: 40 + 9 * index] if index else prompt) for index in range(4)]
    rows: list[list[Tensor]] = [[] for _ in sequences]
    step = 0
    while any(sequence.computed < len(sequence.tokens) for sequence in sequences):
        work = []
        for index, sequence in enumerate(sequences):
            left = len(sequence.tokens) - sequence.computed
            if left and step >= index:
                work.append((sequence, min(left, (1, 5, 17, 2)[(step + index) % 4])))
        output = server.step(work).logits_RV
        start = 0
        for sequence, count in work:
            rows[sequences.index(sequence)].append(output[start : start + count])
            start += count
        step += 1
    for sequence, parts in zip(sequences, rows, strict=True):
        close(torch.cat(parts), expected_rows(case)[: len(sequence.tokens)])


def test_slots_and_blocks_are_reused(case: Case) -> None:
    """A second sequence in the first one's slot and blocks sees nothing of it."""
    server = Server(case.model, max_running=1, num_blocks=22, block_size=8)
    prompt = prompt_of(case)
    first = server.start(list(reversed(prompt)))
    run_to_end(server, first)
    server.stop(first)
    close(run_to_end(server, server.start(prompt)), expected_rows(case))


@pytest.mark.parametrize("chunks", [(40,), (8, 16, 16), (33, 7), (39, 1), (24, 29)])
def test_a_saved_tail_resumes_at_the_block_boundary(case: Case, chunks: tuple[int, ...]) -> None:
    """Saved where the boundary is inside, at the end or beyond the chunk's middle; resumed in another slot with shared blocks."""
    server = Server(case.model)
    prompt = prompt_of(case)
    boundary = 40
    donor = server.start(prompt)
    for chunk in chunks:
        saves = donor.computed < boundary <= donor.computed + chunk
        server.step([(donor, chunk)], tail_saves=((0, boundary, 2),) if saves else ())
    run_to_end(server, donor)
    server.stop(server.start(prompt))  # shift the slots
    heir = server.start(prompt, boundary, donor.blocks[: boundary // server.block_size])
    server.cache.load_tails([2], [heir.slot], [boundary])
    close(run_to_end(server, heir), expected_rows(case)[boundary:])


def test_a_tail_shorter_than_the_window(case: Case) -> None:
    server = Server(case.model)
    prompt = prompt_of(case)
    donor = server.start(prompt)
    server.step([(donor, 30)], tail_saves=((0, 8, 0), (0, 16, 1)))
    heirs = [server.start(prompt, 8, donor.blocks[:1]), server.start(prompt, 16, donor.blocks[:2])]
    server.cache.load_tails([0, 1], [heir.slot for heir in heirs], [8, 16])
    output = server.step([(heir, 20) for heir in heirs]).logits_RV
    close(output, torch.cat((expected_rows(case)[8:28], expected_rows(case)[16:36])))


@pytest.mark.parametrize("at", [29, 32])
def test_a_fork_continues_like_its_source(case: Case, at: int) -> None:
    """The fork shares full blocks, gets a copy of the partial one, and takes the state; both go on, with different tokens."""
    server = Server(case.model)
    prompt = prompt_of(case)
    source = server.start(prompt)
    server.step([(source, at)])
    full, rest = divmod(at, server.block_size)
    fork = server.start(prompt, at, source.blocks[:full])
    if rest:
        copied = server.free_blocks.pop()
        server.cache.copy_blocks([source.blocks[full]], [copied])
        fork.blocks.append(copied)
    server.cache.copy_state([source.slot], [fork.slot])
    source.tokens = source.tokens[:at] + [9] * 60
    server.step([(source, 60)])
    close(run_to_end(server, fork), expected_rows(case)[at:])


def test_a_fork_one_token_late(case: Case) -> None:
    """The source is a step ahead when the fork takes its state."""
    server = Server(case.model)
    prompt = prompt_of(case)
    source = server.start(prompt)
    server.step([(source, 64)])
    server.step([(source, 1)])
    fork = server.start(prompt, 64, source.blocks[:8])
    server.cache.copy_state([source.slot], [fork.slot])
    close(run_to_end(server, fork), expected_rows(case)[64:])


@pytest.mark.parametrize("at", [31, 45, 48])
def test_swap_out_and_in(case: Case, at: int) -> None:
    server = Server(case.model)
    prompt = prompt_of(case)
    sequence = server.start(prompt)
    server.step([(sequence, at)])
    hosts = list(range(3, 3 + len(sequence.blocks)))
    server.cache.swap_out(sequence.slot, sequence.blocks, hosts, 1)
    server.stop(sequence)
    intruder = server.start([5] * 120)
    run_to_end(server, intruder)
    again = server.start(prompt, at, [server.free_blocks.pop() for _ in hosts])
    server.cache.swap_in(hosts, again.blocks)
    server.cache.restore_state(1, again.slot)
    close(run_to_end(server, again), expected_rows(case)[at:])


@pytest.mark.parametrize("start", [40, 41, 63])
def test_rejected_drafts_leave_no_trace(case: Case, start: int) -> None:
    """Wrong drafts are computed and rejected, all or all but some, over and over; the kept rows stay those of the oracle."""
    server = Server(case.model, max_draft=3)
    prompt = prompt_of(case)
    sequence = server.start(prompt)
    server.step([(sequence, start)])
    rows = []
    step = 0
    while sequence.computed + 4 < len(prompt):
        accepted = step % 4  # right drafts before the first wrong one
        begin = sequence.computed
        sequence.tokens = prompt[: begin + 1 + accepted] + [(token + 1) % 200 for token in prompt[begin + 1 + accepted : begin + 4]]
        output = server.step([(sequence, 4)]).logits_RV
        rows.append(output[: 1 + accepted])
        sequence.computed = begin + 1 + accepted
        step += 1
    kept = torch.cat(rows)
    close(kept, expected_rows(case)[start : start + kept.shape[0]])


def test_a_prompt_longer_than_the_ring_in_one_step_then_decode(case: Case) -> None:
    """The ring takes over the last rows of a long chunk only."""
    server = Server(case.model, max_draft=0)
    prompt = prompt_of(case)
    sequence = server.start(prompt)
    cut = len(prompt) - 10
    server.step([(sequence, cut)])
    close(run_to_end(server, sequence, 1), expected_rows(case)[cut:])


def test_ring_writes_never_collide(case: Case) -> None:
    """Where a chunk is longer than a ring only its last rows go there: writing a row twice in one scatter has no defined winner."""
    server = Server(case.model, max_draft=2)
    long, short = server.start(prompt_of(case)), server.start(prompt_of(case))
    server.step([(short, 5)])
    step = case.model.builder.build(server.batch([(long, 90), (short, 3)]), server.cache)
    for rows, dump, ring in (
        (step.ring_rows_T, server.cache.dump_row, server.cache.ring_rows),
        (step.pair_ring_rows_T, server.cache.pair_dump_row, server.cache.pair_ring_rows),
    ):
        assert rows is not None
        kept = rows[rows != dump]
        assert kept.numel() == torch.unique(kept).numel() == min(90, ring) + 3
    for ratio in step.ratios.values():
        kept = ratio.write_rows_T[ratio.write_rows_T < ratio.zero_row]
        assert kept.numel() == torch.unique(kept).numel()


def test_cache_rounding_survives_chunking() -> None:
    """Rounded rows are cached as rounded: chunked and whole differ by rare flips only, like two whole runs with noise would."""
    case = load_case("v41_csa2_cacheround")
    server = Server(case.model)
    rows = run_to_end(server, server.start(prompt_of(case)), 13)
    assert (rows - expected_rows(case)).abs().mean() <= case.meta["tolerance"]["logits_mean_abs"]
    assert (rows.argmax(-1) == expected_rows(case).argmax(-1)).float().mean() >= case.meta["tolerance"]["argmax_agreement_min"]


def test_num_bytes_is_what_the_spec_says(case: Case) -> None:
    """Window tensor, pair state and blocks, from numbers alone (float32)."""
    server = Server(case.model, block_size=8, num_blocks=50, max_running=3, num_tails=2, max_draft=3)
    spec = case.spec
    window_rows = 3 * (spec.sliding_window + 5) + 512 + 2 * spec.sliding_window + 2
    expected = spec.num_layers * window_rows * spec.head_dim * 4
    for layer in spec.kv_source_layer_ids:
        expected += (50 * 8 // spec.compress_ratios[layer] + 2) * (spec.head_dim + spec.index_head_dim) * 4
        if spec.compress_ratios[layer] == 2:
            expected += (3 * 5 + 512 + 1) * 2 * spec.head_dim * 4
    assert server.cache.num_bytes() == expected


def test_a_block_size_that_splits_a_group_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match="block_size 7"):
        case.model.new_cache(CacheConfig(num_blocks=4, block_size=7, max_running=1, max_batched_tokens=8, context_length=28))
