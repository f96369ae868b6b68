"""What a plan costs, as numbers: all that a cost model reads of it. One entry per rank in every list; sums over the rank's items.

A *pair* is one query with one key it looks at. For a query at position t (n = t + 1 visible tokens):

context      n                        full attention of a dense model
window       min(n, window)           every V4.1 layer, draft layers too
selected[r]  min(n // r, top_k)       sparse attention of a layer with ratio r
scanned[r]   n // r                   index scores of a full layer with ratio r
candidate    min(n // r, candidates)  index scores of a layer that looks inside the candidate set
"""

from __future__ import annotations

import msgspec

from engine.core.counts import candidate_rows
from engine.core.plan import DecodeItems, PlanItem, RankPlan, StepPlan
from engine.core.specs import AttentionRole, ModelSpec, V41Spec


class Features(msgspec.Struct):
    """Lists have one number per rank; the dicts are keyed by compress ratio (empty for a dense model)."""

    requests: list[int]
    tokens: list[int]
    prompt_tokens: list[int]  # tokens of items with more than one non-draft token, or that emit nothing
    emitting_rows: list[int]  # rows of logits: one for each emitting item and one for each of its drafts
    draft_rows: list[int]
    context_tokens: list[int]  # tokens in cache after the step, over the items
    longest_query_tokens: list[int]
    longest_context_tokens: list[int]
    context_pairs: list[int]
    window_pairs: list[int]
    candidate_pairs: list[int]
    selected_pairs: dict[int, list[int]]
    scanned_pairs: dict[int, list[int]]
    copied_blocks: list[int]
    swapped_blocks: list[int]
    started_requests: list[int]
    saved_tails: list[int]


def features(plan: StepPlan, spec: ModelSpec, *, has_pairs: bool = True) -> Features:
    """Exact integer sums, in O(items). Lists of pairs stay empty without ``has_pairs``: where nothing reads them, much is saved."""
    ratios = sorted({ratio for ratio in spec.compress_ratios if ratio}) if isinstance(spec, V41Spec) else []
    table = Features(
        [], [], [], [], [], [], [], [], [], [], [], {ratio: [] for ratio in ratios}, {ratio: [] for ratio in ratios}, [], [], [], []
    )  # fmt: skip
    for rank in plan.ranks:
        _add_rank(table, rank)
        if has_pairs:
            _add_pairs(table, rank, spec, ratios)
    return table


def _add_rank(table: Features, rank: RankPlan) -> None:
    if isinstance(rank.items, DecodeItems):
        _add_decodes(table, rank.items)
    else:
        _add_items(table, rank.items)
    table.copied_blocks.append(len(rank.copies))
    table.swapped_blocks.append(sum(len(order.blocks) for order in rank.swap_outs) + sum(len(order.blocks) for order in rank.swap_ins))
    table.started_requests.append(len(rank.starts))
    table.saved_tails.append(len(rank.tail_saves))


def _add_decodes(table: Features, items: DecodeItems) -> None:
    count = len(items)
    table.requests.append(count)
    table.tokens.append(count)
    table.prompt_tokens.append(0)
    table.emitting_rows.append(count)
    table.draft_rows.append(0)
    table.context_tokens.append(items.context_tokens)
    table.longest_query_tokens.append(1)
    table.longest_context_tokens.append(items.longest_context_tokens)


def _add_items(table: Features, items: tuple[PlanItem, ...]) -> None:
    new_tokens = [item.num_new_tokens for item in items]
    tokens = sum(new_tokens)
    emitting = [item for item in items if item.emits]
    table.requests.append(len(items))
    table.tokens.append(tokens)
    if tokens == len(items):  # one each, hence no drafts
        table.prompt_tokens.append(tokens - len(emitting))
        table.emitting_rows.append(len(emitting))
        table.draft_rows.append(0)
    else:
        prompts = [item for item in items if not item.emits or item.num_new_tokens - item.num_draft_tokens > 1]
        table.prompt_tokens.append(sum(item.num_new_tokens for item in prompts))
        table.emitting_rows.append(sum(1 + item.num_draft_tokens for item in emitting))
        table.draft_rows.append(sum(item.num_draft_tokens for item in items))
    contexts = [item.num_computed_tokens + item.num_new_tokens for item in items]
    table.context_tokens.append(sum(contexts))
    table.longest_query_tokens.append(max(new_tokens, default=0))
    table.longest_context_tokens.append(max(contexts, default=0))


def _add_pairs(table: Features, rank: RankPlan, spec: ModelSpec, ratios: list[int]) -> None:
    if not isinstance(spec, V41Spec):
        table.window_pairs.append(0)
        table.candidate_pairs.append(0)
        if isinstance(rank.items, DecodeItems):
            table.context_pairs.append(rank.items.context_tokens)
            return
    spans = [(item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens) for item in rank.items]
    table.context_pairs.append(sum(pairs(begin, end) for begin, end in spans))
    if not isinstance(spec, V41Spec):
        return
    table.window_pairs.append(sum(pairs(begin, end, cap=spec.sliding_window) for begin, end in spans))
    for ratio in ratios:
        table.selected_pairs[ratio].append(sum(pairs(begin, end, ratio, spec.index_top_k) for begin, end in spans))
        table.scanned_pairs[ratio].append(sum(pairs(begin, end, ratio) for begin, end in spans))
    total = 0
    for layer in range(spec.num_layers):
        if spec.role(layer) is AttentionRole.REINDEX:
            # All reindexing layers of a model have the same ratio and candidates; the first one stands for each.
            ratio = spec.compress_ratios[layer]
            total = sum(pairs(begin, end, ratio, candidate_rows(spec, layer)) for begin, end in spans)
            break
    table.candidate_pairs.append(total)


def pairs(begin: int, end: int, ratio: int = 1, cap: int | None = None) -> int:
    """Sum over positions t in [begin, end) of min((t + 1) // ratio, cap)."""
    if end - begin == 1:  # most items decode
        return end // ratio if cap is None else min(end // ratio, cap)
    return _pairs_until(end, ratio, cap) - _pairs_until(begin, ratio, cap)


def _pairs_until(count: int, ratio: int, cap: int | None) -> int:
    """Sum over n in [0, count] of min(n // ratio, cap)."""
    if cap is not None and count >= ratio * cap:
        return _pairs_until(ratio * cap - 1, ratio, None) + cap * (count - ratio * cap + 1)
    groups = (count + 1) // ratio  # complete groups of ``ratio`` values 0, 1, 2, ...
    return ratio * groups * (groups - 1) // 2 + groups * (count + 1 - ratio * groups)
