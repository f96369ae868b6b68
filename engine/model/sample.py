"""What goes into sampling and what comes out: the rows of a step's emitting items, their drafts, the tokens they emit.

Legend: I emitting items, R their logit rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.core.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The I emitting items of a step. Item i owns logit rows row_starts[i]:row_starts[i+1]: one after its last real token, one
    after each of its ``num_drafts_I[i]`` drafts. ``slots`` is ``slots_I`` on the host; slots are distinct.
    """

    slots_I: Tensor
    num_drafts_I: Tensor
    row_starts_I1: Tensor
    max_drafts: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """``tokens_IK`` int64 drafts (entries past an item's number of drafts are ignored, K >= max_drafts) and ``probs_IKV``, the
    distribution each was drawn from; None where all are greedy, which counts as a point mass.
    """

    tokens_IK: Tensor
    probs_IKV: Tensor | None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """``tokens_IK`` int64 [I, 1 + max_drafts], of which the first ``counts_I`` are emitted: counts - 1 accepted drafts, then one
    token of the model itself; the rest is 0. ``logprobs[i]`` has one entry per emitted token, None for requests without.

    ``errors`` says of the items that emitted nothing why they could not; ``unusable_logits`` whether the model's own output was to blame
    for one, in which case its cached rows are in doubt too.
    """

    tokens_IK: Tensor
    counts_I: Tensor
    logprobs: list[list[TokenLogprobs] | None] | None
    errors: dict[int, str] = field(default_factory=dict)
    unusable_logits: bool = False


@dataclass(frozen=True, slots=True)
class DraftControls:
    """What a draft round of the items needs; A = I."""

    temperatures_A: Tensor
    top_k_A: Tensor
    top_p_A: Tensor
    min_p_A: Tensor
    uniforms_AK: Tensor
    all_greedy: bool


def unusable(best_R: Tensor, rows: SampleRows) -> tuple[dict[int, str], bool]:
    """The items with a row that nothing can be chosen from, and why; and whether a row holds NaN or +inf. ``best_R`` are the rows'
    maxima: finite exactly where a row has no NaN (which max propagates), no +inf and something above -inf."""
    if bool(best_R.isfinite().all()):
        return {}, False
    errors: dict[int, str] = {}
    worst = False
    starts = rows.row_starts_I1.tolist()
    for row in (~best_R.isfinite()).nonzero()[:, 0].tolist():
        value = float(best_R[row])
        exhausted = value == -torch.inf
        worst |= not exhausted
        errors[bisect_right(starts, row) - 1] = (
            "no token is left to choose from: the model, a logit bias or the grammar excludes every one"
            if exhausted
            else f"the model's output is unusable: its largest logit is {value}"
        )
    return errors, worst


def blanked(logits_RV: Tensor, rows: SampleRows, items: Iterable[int]) -> Tensor:
    """The same with zeros in the rows of ``items``: something that every later operation can work with."""
    starts = rows.row_starts_I1.tolist()
    blank = [row for item in items for row in range(starts[item], starts[item + 1])]
    return logits_RV.index_fill(0, torch.tensor(blank, device=logits_RV.device), 0.0)
