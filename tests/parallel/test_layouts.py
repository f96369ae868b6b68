"""Every layout gives the tokens of one rank: ranks as processes of their own, gloo between them, everything in float32.

A process that imports torch takes seconds, so each number of ranks is started once and serves all its cases.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from engine.core.expert_map import ExpertMap, balanced_map
from engine.core.layout import Layout
from engine.core.model_config import model_spec
from engine.core.plan import StepPlan, step_peers
from engine.core.sharding import RankPlace, num_routed_experts
from engine.core.specs import DenseSpec, V41Spec
from engine.core.traffic import step_traffic
from tests.model.engine_harness import small_v41_spec
from tests.parallel.lockstep import Case, Job, Outcome, run_case
from tests.parallel.processes import launch

SPEC = small_v41_spec()
# Of very different load: one rank idles at the end, one has a prompt of several chunks.
JOBS = (Job(1, 0, 5), Job(70, 1, 12), Job(21, 2, 3))
LONELY = (Job(70, 3, 5),)  # all ranks but one idle from the first chunk on
DENSE: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
BIASED = DENSE | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "tie_word_embeddings": False, "norm_topk_prob": True,
}  # fmt: skip


def place(text: str, **options: Any) -> RankPlace:
    tp, dp, ep = map(int, text.split("."))
    return RankPlace(layout=Layout(tp=tp, dp=dp, ep=ep), **options)


def dense(config: dict[str, Any]) -> DenseSpec:
    spec = model_spec(config, "dense")
    assert isinstance(spec, DenseSpec)
    return spec


def skewed_maps(spec: V41Spec, spare: int, ranks: int) -> tuple[ExpertMap, ...]:
    """Another placement for every layer of backbone and draft."""
    assert spec.dspark is not None
    layers = [num_routed_experts(spec)] * spec.num_layers + [num_routed_experts(spec, draft=True)] * spec.dspark.num_layers
    return tuple(
        balanced_map([float((7 * expert + 3 * layer) % 5) for expert in range(count)], spare, ranks) for layer, count in enumerate(layers)
    )


CASES: dict[int, list[Case]] = {
    2: [
        Case("dp2ep2", place("1.2.2"), SPEC, JOBS, draft_tokens=3),
        Case("dp2ep2, one idle", place("1.2.2"), SPEC, LONELY, draft_tokens=3),
        Case("dp2ep2 grouped", place("1.2.2"), SPEC, JOBS, draft_tokens=3, grouped=True),
        Case("dp2ep1", place("1.2.1"), SPEC, JOBS),
        Case("tp2ep1", place("2.1.1"), SPEC, JOBS, draft_tokens=3),
        Case(
            "tp2ep2 redundant", place("2.1.2", redundant_experts=2, draft_redundant_experts=4), SPEC, JOBS, draft_tokens=5, grouped=True
        ),
        Case("engram replicated", place("1.2.2", engram="replicated"), SPEC, JOBS),
        Case("engram host", place("2.1.1", engram="host"), SPEC, JOBS),
        Case(
            "redundant, moved twice", place("1.2.2", redundant_experts=2, draft_redundant_experts=2), SPEC, JOBS, draft_tokens=3,
            rebalance={3: skewed_maps(SPEC, 2, 2), 6: skewed_maps(SPEC, 2, 2)[2:4] * 4 + skewed_maps(SPEC, 2, 2)[-2:]},
        ),
        Case("balanced", place("1.2.2"), SPEC, JOBS, draft_tokens=3, routing="balanced"),
        Case("imbalanced", place("1.2.2"), SPEC, LONELY, routing="imbalanced"),
        Case("dense tp2", place("2.1.1"), dense(BIASED), JOBS),
        Case("moe tp2ep2", place("2.1.2"), dense(MOE), JOBS),
        Case("moe dp2ep2", place("1.2.2"), dense(MOE), JOBS),
    ],
    4: [
        Case("tp2dp2ep4", place("2.2.4"), SPEC, JOBS, draft_tokens=3),
        Case("tp2dp2ep2", place("2.2.2"), SPEC, LONELY),
        Case("dp4ep4 grouped, moved", place("1.4.4"), SPEC, JOBS, draft_tokens=3, grouped=True, rebalance={4: skewed_maps(SPEC, 0, 4)}),
        Case("tp4 with fewer kv heads", place("4.1.1"), dense(BIASED), JOBS),
    ],
}  # fmt: skip


@cache
def witness(spec_case: bytes) -> Outcome:
    return run_case(msgspec.json.decode(spec_case, type=Case), None, None, 0)


@pytest.fixture(scope="module", params=[2, 4])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, list[Outcome]]]:
    """Each case with what its ranks said."""
    cases = CASES[request.param]
    found = launch(tmp_path_factory.mktemp("ranks"), cases, request.param)
    return [(case, [rank[case.name] for rank in found]) for case in cases]


def test_tokens_and_probabilities_are_those_of_one_rank(served: list[tuple[Case, list[Outcome]]]) -> None:
    for case, ranks in served:
        if case.routing != "model":
            continue
        alone = Case("alone", RankPlace(), case.spec, case.jobs, case.draft_tokens, case.grouped)
        expected = witness(msgspec.json.encode(alone))
        for outcome in ranks:
            assert outcome.tokens == expected.tokens, case.name
        for mine, theirs in zip(ranks[0].logprobs, expected.logprobs, strict=True):
            assert [entry.top_ids for entry in mine] == [entry.top_ids for entry in theirs], case.name
            assert [entry.chosen for entry in mine] == pytest.approx([entry.chosen for entry in theirs], abs=2e-5), case.name


def test_the_cases_are_what_they_claim(served: list[tuple[Case, list[Outcome]]]) -> None:
    for case, ranks in served:
        plans = ranks[0].plans
        if case.place.layout.dp > 1:  # one works while another idles
            assert any(plan.ranks[0].items and not plan.ranks[-1].items for plan in plans) or any(
                plan.ranks[-1].items and not plan.ranks[0].items for plan in plans
            ), case.name
        if case.draft_tokens:
            assert any(item.num_draft_tokens == case.draft_tokens for plan in plans for rank in plan.ranks for item in rank.items)
        assert (sum(outcome.moved_experts for outcome in ranks) > 0) == bool(case.rebalance), case.name


def test_memory_is_what_was_predicted(served: list[tuple[Case, list[Outcome]]]) -> None:
    for case, ranks in served:
        for outcome in ranks:
            assert outcome.predicted_bytes <= outcome.held_bytes <= outcome.predicted_bytes * 1.02, case.name
            assert outcome.predicted_cache_bytes <= outcome.cache_bytes <= outcome.predicted_cache_bytes * 1.05 + 16384, case.name


def test_message_volume_follows_the_formula(served: list[tuple[Case, list[Outcome]]]) -> None:
    for case, ranks in served:
        if case.rebalance:
            continue
        for rank, outcome in enumerate(ranks):
            expected: dict[str, float] = {}
            for plan in outcome.plans:
                add(expected, traffic(case, rank, plan))
            sent = {kind: num_bytes for kind, num_bytes, _ in outcome.traffic if num_bytes}
            assert sent.keys() == expected.keys(), case.name
            for kind, num_bytes in sent.items():
                # Routing and hashes are not quite even over a few tokens.
                routed = kind == "engram.fetch" or (case.place.layout.ep > 2 and kind in ("dispatch", "combine"))
                assert num_bytes == pytest.approx(expected[kind], rel=0.3 if routed else 1e-9), (case.name, rank, kind)


def test_expert_counts_add_up(served: list[tuple[Case, list[Outcome]]]) -> None:
    """Each token counts once in the replica, whatever the layout: the routing does not depend on it."""
    for case, ranks in served:
        num_experts = num_routed_experts(case.spec)
        if not num_experts:
            continue
        totals = [sum(rank.expert_counts[0][expert] for rank in ranks) for expert in range(num_experts)]
        tokens = sum(rank.num_tokens for plan in ranks[0].plans for rank in plan.ranks)
        assert sum(totals) == tokens * 2, case.name  # experts a token
        if case.routing == "balanced":  # over the two ranks, in every step
            assert sum(totals[: num_experts // 2]) == sum(totals[num_experts // 2 :])
        elif case.routing == "imbalanced":
            assert sum(totals[:2]) == sum(totals)
        else:
            assert min(totals) > 0


def traffic(case: Case, rank: int, plan: StepPlan) -> dict[str, float]:
    where = msgspec.structs.replace(case.place, rank=rank)
    return step_traffic(case.spec, where, step_peers(plan), element_bytes=4, draft_tokens=case.draft_tokens)


def add(total: dict[str, float], more: dict[str, float]) -> None:
    for kind, value in more.items():
        total[kind] = total.get(kind, 0.0) + value
