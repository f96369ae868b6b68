"""``twinfer predict``: step times of a layout before it runs.

A point is what ``bench steps`` measures with the same arguments: the median over whole steps, commit to commit, of a closed loop with
``batch`` requests per data rank; beside it the mean, which throughput follows, and which says more where about half of the steps have
prompts in them. ``context`` is the longest prompt (lengths are uniform from 80 % of it), so that sequences have about 0.9 x context tokens
in cache when they begin and as many more as they have generated; with ``new_tokens`` 1 every step computes prompts. The plans of that loop
are made by the engine's own scheduler and priced one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from calibration.cost_model import CalibratedCost, ModelFit, PricedTable, ProbeFactors
from calibration.features import table_of_plans
from calibration.imbalance import BALANCED, ExpertBalance
from calibration.steady import Load, Method, closed_loop, reduced
from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.layout import Deployment
from engine.core.memory import held_weight_bytes, plan_memory
from engine.core.sharding import EngramPlacement, RankPlace
from engine.core.specs import ModelSpec, V41Spec

BLOCK_SIZE = 128


class Question:
    """What is asked of every layout and batch size. ``acceptance`` as ``engine.core.acceptance.acceptance_probabilities`` gives it."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        context: int,
        new_tokens: int,
        draft_tokens: int = 0,
        acceptance: tuple[float, ...] = (),
        engram: EngramPlacement = "gpu",
        redundant_experts: int = 0,
        expert_balance: ExpertBalance = BALANCED,
        expert_rebalancing: bool = False,
        method: Method = "window",
        max_batched_tokens: int = 2048,
        memory_bytes: int | None = None,
    ) -> None:
        self.spec, self.context, self.new_tokens = spec, context, new_tokens
        self.draft_tokens, self.acceptance = draft_tokens, acceptance
        self.engram, self.redundant_experts = engram, redundant_experts
        self.expert_balance, self.expert_rebalancing = expert_balance, expert_rebalancing
        self.method, self.max_batched_tokens, self.memory_bytes = method, max_batched_tokens, memory_bytes

    def load(self, batch: int, num_ranks: int) -> Load:
        return Load(
            batch=batch,
            context=self.context,
            new_tokens=self.new_tokens,
            num_ranks=num_ranks,
            draft_tokens=self.draft_tokens,
            acceptance=self.acceptance,
            method=self.method,
            max_batched_tokens=self.max_batched_tokens,
            has_sequence_state=self.spec.has_sequence_state,
        )


def predict_point(
    fit: ModelFit, question: Question, deployment: Deployment, batch: int, probe: ProbeFactors | None = None
) -> dict[str, Any]:
    """One entry of ``points[]``. Raises DomainError where the calibration cannot say, ConfigError for a layout that cannot be."""
    if deployment.prefill is not None:
        raise ConfigError(f"layout {deployment}: predict prices one kind of replica; ask for the prefill and the decode layout apart")
    layout = deployment.decode.unit
    cost = CalibratedCost(
        fit,
        question.spec,
        layout,
        probe=probe,
        engram=question.engram,
        draft_tokens=question.draft_tokens,
        redundant_experts=question.redundant_experts,
        expert_balance=question.expert_balance,
        expert_rebalancing=question.expert_rebalancing,
    )
    load, stands_for = reduced(question.load(batch, layout.dp))
    loop = closed_loop(load)
    table = table_of_plans(loop.plans, question.spec)
    if stands_for > 1:
        table = table.tile_ranks(stands_for)
    priced = cost.price_table(table)
    middle = _median_step(priced)
    step_s, mean_s = float(np.median(priced.step_s)), float(priced.step_s.mean())
    emitted = loop.tokens_per_step * stands_for * deployment.decode.count
    rate = emitted / mean_s
    memory = _memory(question, deployment, batch, fit.dtype)
    return {
        "layout": str(deployment),
        "batch": batch,
        "context": question.context,
        "new_tokens": question.new_tokens,
        "step_s": step_s,
        "step_mean_s": mean_s,
        "lo_s": float(np.median(priced.low_s)),
        "hi_s": float(np.median(priced.high_s)),
        "components": {
            name: {"seconds": float(seconds[middle].mean()), "provenance": priced.provenance[name]}
            for name, seconds in sorted(priced.components.items())
            if seconds[middle].any()
        },
        "barrier_wait_s": float(priced.barrier_wait_s[middle].mean()),
        "extrapolated": bool(priced.extrapolated.any()),
        "note": priced.note,
        "memory_bytes": memory,
        "fits": None if memory["free"] is None else memory["free"] >= 0,
        "tokens_per_s_per_gpu": rate / deployment.num_gpus,
        "tokens_per_s_per_user": rate / (batch * layout.dp * deployment.decode.count),
        "usd_per_million_tokens": None,
        "joules_per_token": None,
    }


def _median_step(priced: PricedTable) -> list[int]:
    """The step, or the two, whose price is the median: their components add up to it."""
    order = np.argsort(priced.step_s, kind="stable")
    count = len(order)
    return [int(order[count // 2])] if count % 2 else [int(order[count // 2 - 1]), int(order[count // 2])]


def _memory(question: Question, deployment: Deployment, batch: int, dtype: str) -> dict[str, int | None]:
    """Bytes of the fullest rank by kind. ``engram`` and ``draft`` are parts of the weights and shown apart from them."""
    spec, layout = question.spec, deployment.decode.unit
    tokens = question.context + question.new_tokens + question.draft_tokens
    cache = CacheConfig(
        num_blocks=batch * -(-tokens // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_running=batch,
        max_batched_tokens=max(question.max_batched_tokens, batch * (1 + question.draft_tokens)),
        context_length=tokens,
        max_draft_tokens=question.draft_tokens,
    )
    place = RankPlace(layout=layout, engram=question.engram, redundant_experts=question.redundant_experts)
    plan = plan_memory(spec, cache, dtype, place)
    engram, draft = _held(spec, place, dtype)
    used = plan.weight_bytes + plan.cache_bytes
    free = None if question.memory_bytes is None else question.memory_bytes // layout.num_gpus - used
    return {"weights": plan.weight_bytes - engram - draft, "kv": plan.cache_bytes, "engram": engram, "draft": draft, "free": free}


def _held(spec: ModelSpec, place: RankPlace, dtype: str) -> tuple[int, int]:
    """(Engram's tables, the draft's layers), as ``core.memory`` counts them."""
    if not isinstance(spec, V41Spec):
        return 0, 0
    whole = held_weight_bytes(spec, dtype, place)
    draft = 0
    if spec.dspark is not None:
        draft = whole - held_weight_bytes(msgspec.structs.replace(spec, dspark=None), dtype, place)
    engram = 0
    if spec.engram is not None:
        on_device = held_weight_bytes(spec, dtype, place)
        engram = on_device - held_weight_bytes(spec, dtype, msgspec.structs.replace(place, engram="host"))
    return engram, draft


def points(
    fit: ModelFit, question: Question, deployments: Sequence[Deployment], batches: Sequence[int], probe: ProbeFactors | None
) -> list[dict[str, Any]]:
    """Every layout with every batch size, in this order."""
    return [predict_point(fit, question, deployment, batch, probe) for deployment in deployments for batch in batches]
