"""``bench steps`` over layouts: what it measures, on which steps, and what it says of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import twinfer
from engine.cli.step_bench import FIRST_BATCHES, StepLoad, StepRecorder, _chosen_steps, _requests
from engine.core.plan import PlanItem, RankPlan, StepPlan, StepResult

SHAPE = ["--context", "48", "--shared-prefix", "32", "--block-size", "16", "--draft-tokens", "3", "--num-threads", "1"]
FORCED = ["--forced-acceptance", "2", "--forced-routing", "balanced"]


def points(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert twinfer.main(["bench", "steps", "tiny-v41", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return found


@pytest.mark.usefixtures("forked_workers")
def test_layouts_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(capsys, "--layout", "tp1dp1ep1,tp1dp2ep2", "--batch-sizes", "1", "--new-tokens", "7", "--components", *SHAPE, *FORCED)
    assert [point["layout"] for point in found] == ["tp1dp1ep1", "tp1dp2ep2"]
    for point in found:
        num_ranks = 2 if "dp2" in point["layout"] else 1
        assert point["requests"] == 10 * point["batch"] * num_ranks
        assert point["step_p10_s"] <= point["step_s"] <= point["step_p90_s"]
        assert point["forward_s"] <= point["step_p90_s"]
        emitted = point["step_mean_s"] * point["tokens_per_s"] * point["n"]
        assert emitted == pytest.approx(round(emitted))
        assert 0.9 * point["batch"] < point["batch_mean"] + 0.5 <= point["batch"] + 0.5
        # Two blocks of every prompt, which has 13 to 16 tokens of its own, come from the cache.
        assert point["prefix_hit_rate"] == pytest.approx(32 / point["prompt_tokens_mean"])
        drafts = point["drafts"]
        assert drafts["accepted_tokens_by_position"][2] == 0
        assert drafts["accepted_tokens_by_position"][:2] == drafts["draft_tokens_by_position"][:2]
        assert (point["forced_acceptance"], point["forced_routing"]) == (2.0, "balanced")
        assert point["warm_up"]["steps"] > 0
        exchanged = {"dispatch", "combine", "engram.fetch"} if num_ranks == 2 else set()
        assert set(point["traffic"]) == exchanged
        assert all(entry["bytes"] > 0 and entry["collectives"] > 0 for entry in point["traffic"].values())
        assert exchanged <= set(point["components"])


@pytest.mark.usefixtures("forked_workers")
def test_first_batches(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(capsys, "--method", "first-batches", "--batch-sizes", "1,2", "--new-tokens", "40", *SHAPE)
    for point, batch in zip(found, (1, 2), strict=True):
        assert point["n"] == FIRST_BATCHES
        assert point["batch_mean"] == point["batch"] == batch
        assert (point["traffic"], point["components"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--shared-prefix", "256"], "--shared-prefix is 256; needed: from 0 to less than --context 256"),
        (["--shared-prefix", "-1"], "--shared-prefix is -1"),
        (["--shared-prefix", "8", "--disable-radix-cache"], "needs the prefix cache"),
        (["--layout", "tp1dp1ep1,tp3dp1ep1"], "num_attention_heads 4 of tiny-v41 is not a multiple of tp = 3"),
        (["--layout", "tp1dp1ep1,"], "is not a unit"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.actors.supervisor.open_engine", None)
    assert twinfer.main(["bench", "steps", "tiny-v41", *arguments]) != 0
    assert reason in capsys.readouterr().err


def plan_of(step: int, *new_tokens: int) -> StepPlan:
    items = tuple(PlanItem(slot, slot, 10, count, 0, True) for slot, count in enumerate(new_tokens))
    return StepPlan(step, (RankPlan(items=items),))


def recorded(steps: list[tuple[int, tuple[int, ...]]]) -> StepRecorder:
    """Steps by how many requests were finished before each, and the new tokens of its items."""
    recorder = StepRecorder()
    for index, (finished, new_tokens) in enumerate(steps):
        recorder.finished = finished
        recorder.committed(plan_of(index, *new_tokens), StepResult(index, ()), float(index))
    return recorder


def test_the_window_is_20_to_90_percent_of_the_requests() -> None:
    recorder = recorded([(3 + finished, (1,)) for finished in range(11)])  # 3 were finished before the load began
    assert _chosen_steps(recorder, 0, 3, 10, StepLoad(1, 8, 4)) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_first_batches_are_the_full_ones_of_rank_0_behind_a_warm_up() -> None:
    prompts, full, short = (0, (7, 9)), (0, (1, 1)), (0, (1,))
    recorder = recorded([prompts, (0, (1, 5)), *[full] * 4, short, *[full] * 9])
    load = StepLoad(2, 8, 30, "first-batches")
    assert _chosen_steps(recorder, 0, 0, 2, load) == [4, 5, 7, 8, 9, 10, 11, 12, 13]
    assert len(_chosen_steps(recorder, 0, 0, 2, StepLoad(2, 8, 1, "first-batches"))) == FIRST_BATCHES


def test_prompts_share_what_they_are_to_share() -> None:
    shared = tuple(range(16))
    for method in ("window", "first-batches"):
        load = StepLoad(2, 40, 12, method, 16)
        prompts = [prompt for prompt, _ in _requests(random.Random(1), load, 2, shared, 1000)]
        assert all(prompt[:16] == shared for prompt in prompts)
        assert len({prompt[16] for prompt in prompts}) > len(prompts) // 2  # nothing behind the prefix is found in the cache
        assert all(prompt[17:] == prompts[0][17:] for prompt in prompts) == (method == "first-batches")
