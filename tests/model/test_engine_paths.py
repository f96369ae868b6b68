"""Scheduler, runner and model together: the same tokens whatever way the work is cut, cached, preempted, forked or drafted.

All in float32 on a random V4.1 with every part on; the witness is a request that runs alone, cold, one plan at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.model.base import Model
from tests.model.engine_harness import Engine, Finished, Preempted, random_v41, small_v41_spec

P = 16
NEW = 20


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_v41(small_v41_spec())


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(length)]


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[tuple[int, int], list[int]]:
    """Greedy continuations of some prompts, each by itself on a cold engine without overlap."""
    answers = {}
    for seed, length in enumerate((1, P - 1, P, P + 1, 3 * P, 3 * P + 5, 70)):
        answers[seed, length] = Engine(model, overlap=False, prefix_caching=False).generate(prompt(length, seed), max_tokens=NEW)
    return answers


def test_batched_and_overlapped_equals_alone(model: Model, alone: dict[tuple[int, int], list[int]]) -> None:
    engine = Engine(model)
    ids = {key: engine.submit(prompt(key[1], key[0]), max_tokens=NEW)[0] for key in alone}
    tokens = engine.run()
    assert any(len(plan.ranks[0].items) > 3 for plan in engine.plans)
    for key, expected in alone.items():
        assert tokens[ids[key]] == expected, key


@pytest.mark.parametrize("chunk", [1, 7, P])
def test_chunked_prefill_equals_whole(model: Model, alone: dict[tuple[int, int], list[int]], chunk: int) -> None:
    for (seed, length), expected in alone.items():
        assert Engine(model, chunked_prefill_size=chunk).generate(prompt(length, seed), max_tokens=NEW) == expected


def test_a_prefix_hit_equals_cold(model: Model, alone: dict[tuple[int, int], list[int]]) -> None:
    engine = Engine(model)
    for (seed, length), expected in alone.items():
        for repeat in range(3):
            request = engine.submit(prompt(length, seed), max_tokens=NEW)[0]
            assert engine.run()[request] == expected
            assert engine.cached_tokens(request) == (0 if repeat == 0 else (length - 1) // P * P)


def test_a_hit_on_generated_tokens_equals_cold(model: Model) -> None:
    engine = Engine(model)
    first = prompt(20, 5)
    answer = engine.generate(first, max_tokens=40)
    follow_up = [*first, *answer, 9, 8, 7]
    request = engine.submit(follow_up, max_tokens=NEW)[0]
    assert engine.run()[request] == Engine(model).generate(follow_up, max_tokens=NEW)
    assert engine.cached_tokens(request) >= 2 * P


def test_tenants_do_not_share(model: Model) -> None:
    engine = Engine(model)
    engine.submit(prompt(50), max_tokens=4, cache_salt="a")
    engine.run()
    other = engine.submit(prompt(50), max_tokens=4, cache_salt="b")[0]
    same = engine.submit(prompt(50), max_tokens=4, cache_salt="a")[0]
    engine.run()
    assert engine.cached_tokens(other) == 0
    assert engine.cached_tokens(same) == 48


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_preempted_equals_undisturbed(model: Model, alone: dict[tuple[int, int], list[int]], swap: bool, draft_tokens: int) -> None:
    host: dict[str, Any] = {"num_host_blocks": 32, "num_host_states": 8, "swap_threshold_tokens": 1} if swap else {}
    engine = Engine(model, num_blocks=13, watermark_blocks=0, draft_tokens=draft_tokens, **host)
    ids = {key: engine.submit(prompt(key[1], key[0]), max_tokens=NEW)[0] for key in alone}
    tokens = engine.run()
    kinds = {event.kind for event in engine.of_kind(Preempted)}
    assert ("swap" if swap else "recompute") in kinds
    for key, expected in alone.items():
        assert tokens[ids[key]] == expected, key


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_greedy_drafts_change_nothing(model: Model, alone: dict[tuple[int, int], list[int]], draft_tokens: int) -> None:
    engine = Engine(model, draft_tokens=draft_tokens)
    ids = {key: engine.submit(prompt(key[1], key[0]), max_tokens=NEW)[0] for key in alone}
    tokens = engine.run()
    assert any(item.num_draft_tokens == draft_tokens for plan in engine.plans for item in plan.ranks[0].items)
    for key, expected in alone.items():
        assert tokens[ids[key]] == expected, key


def test_accepted_drafts_change_nothing(model: Model, alone: dict[tuple[int, int], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle draft that is right two times of three exercises the acceptance of several tokens at once, which random weights do not."""
    engine = Engine(model, draft_tokens=3)
    ids = {key: engine.submit(prompt(key[1], key[0]), max_tokens=NEW)[0] for key in alone}
    texts = {ids[key]: [*prompt(key[1], key[0]), *alone[key], *[0] * 8] for key in alone}
    original = engine.runner.model.draft
    count = 0

    def oracle(request: object, cache: object) -> object:
        nonlocal count
        output = original(request, cache)  # type: ignore[arg-type]
        for row, (slot, position) in enumerate(zip(request.slots_A.tolist(), request.positions_A.tolist(), strict=True)):  # type: ignore[attr-defined]
            owner = next(item.request for plan in reversed(engine.plans) for item in plan.ranks[0].items if item.slot == slot)
            count += 1
            for index in range(3):
                right = texts[owner][position + 1 + index]
                output.tokens_AK[row, index] = right if (count + index) % 3 else 5
        return output

    monkeypatch.setattr(engine.runner.model, "draft", oracle)
    tokens = engine.run()
    for key, expected in alone.items():
        assert tokens[ids[key]] == expected, key
    # Fewer steps than tokens: drafts were really accepted.
    assert len(engine.plans) < NEW


def test_samples_of_one_prompt_equal_samples_alone(model: Model) -> None:
    for length in (P - 1, P, 40):
        engine = Engine(model)
        ids = engine.submit(prompt(length), n=4, max_tokens=NEW, temperature=1.0, seed=3)
        tokens = engine.run()
        assert len({tuple(tokens[sample]) for sample in ids}) == 4
        for offset, sample in enumerate(ids):
            single = Engine(model, prefix_caching=False).generate(prompt(length), max_tokens=NEW, temperature=1.0, seed=3 + offset)
            assert tokens[sample] == single, (length, offset)


def test_more_samples_than_slots_all_finish(model: Model) -> None:
    engine = Engine(model, max_running=3)
    ids = engine.submit(prompt(30), n=7, max_tokens=5, temperature=1.0)
    tokens = engine.run()
    assert all(len(tokens[sample]) == 5 for sample in ids)
    assert sorted(event.request for event in engine.of_kind(Finished)) == ids


def test_sampled_drafts_are_reproducible_and_finish(model: Model) -> None:
    runs = []
    for _ in range(2):
        engine = Engine(model, draft_tokens=4)
        ids = [engine.submit(prompt(10 + index, index), max_tokens=NEW, temperature=0.8, top_p=0.9, seed=index)[0] for index in range(5)]
        ids += [engine.submit(prompt(12, 9), max_tokens=NEW)[0]]
        tokens = engine.run()
        runs.append([tokens[sample] for sample in ids])
    assert runs[0] == runs[1]
    assert runs[0][-1] == Engine(model).generate(prompt(12, 9), max_tokens=NEW)


def test_everything_at_once_under_pressure(model: Model, alone: dict[tuple[int, int], list[int]]) -> None:
    """Shared prefixes, tiny pool, chunks, forks, drafts, aborts: greedy answers stay what they are alone, and nothing leaks."""
    for draft_tokens in (0, 2):
        engine = Engine(model, num_blocks=14, max_running=5, chunked_prefill_size=11, draft_tokens=draft_tokens, watermark_blocks=0)
        keys = list(alone)
        ids = [(key, engine.submit(prompt(key[1], key[0]), max_tokens=NEW)[0]) for key in keys * 3]
        aborted = engine.submit(prompt(60, 99), n=2, max_tokens=50, temperature=0.5)
        waiting: list[tuple[object, object]] = []
        for _ in range(15):
            engine.step(waiting)  # type: ignore[arg-type]
        engine.events += engine.scheduler.abort(aborted[0], 0.0)
        while engine.step(waiting):  # type: ignore[arg-type]
            pass
        tokens = engine.run()
        for key, request in ids:
            assert tokens[request] == alone[key], key
        ended = [event.request for event in engine.of_kind(Finished)]
        assert sorted(ended) == sorted([request for _, request in ids] + aborted)
