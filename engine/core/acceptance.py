"""How many drafts a verification accepts, as a distribution: the probability at each position that a draft is accepted, given that all
before it were (position 0 is the draft right after the last token, as in ``core.metrics``).

With conditional probabilities p_0, p_1, ... the number accepted is at least j with probability p_0 ... p_(j-1), so its mean is the sum of
these products: what ``acceptance_by_position`` of a log and vLLM's per-position acceptance rates are, of all drafts proposed at a place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engine.core.errors import ConfigError

MAX_DRAFT_TOKENS = 64
_ROUNDS = 80  # of bisection: more than a float64 has bits


def acceptance_probabilities(acceptance: float | Sequence[float], draft_tokens: int) -> tuple[float, ...]:
    """Conditional probabilities of the ``draft_tokens`` positions.

    ``acceptance`` is the mean number of accepted drafts a verification, and one probability p for every position then has this mean,
    p + p^2 + ... + p^k; or the accepted share of the drafts proposed at each position, never rising. Raises ConfigError for others.
    """
    if not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"draft tokens are {draft_tokens}; needed: 0 to {MAX_DRAFT_TOKENS}")
    if isinstance(acceptance, Sequence):
        return _conditional([float(share) for share in acceptance], draft_tokens)
    mean = float(acceptance)
    if not (math.isfinite(mean) and 0.0 <= mean <= draft_tokens):
        raise ConfigError(f"acceptance is {mean:g}; needed: a mean from 0 to the draft tokens = {draft_tokens}")
    return (_same_everywhere(mean, draft_tokens),) * draft_tokens


def acceptance_of_counts(accepted_by_position: Sequence[int], drafts_by_position: Sequence[int]) -> tuple[float, ...]:
    """Shares for ``acceptance_probabilities``, of counters as ``core.metrics.DraftCounts`` has them; 0 where nothing was proposed.

    Where drafts of several lengths were verified, a position's share is of the drafts that reached it. Raises ConfigError for counters that
    cannot be.
    """
    if len(accepted_by_position) != len(drafts_by_position):
        raise ConfigError(f"accepted drafts of {len(accepted_by_position)} positions beside drafts of {len(drafts_by_position)}")
    shares: list[float] = []
    for position, (accepted, drafts) in enumerate(zip(accepted_by_position, drafts_by_position, strict=True)):
        if not 0 <= accepted <= drafts:
            raise ConfigError(f"at position {position} {accepted} of {drafts} drafts were accepted; needed: no more than there were")
        share = accepted / drafts if drafts else 0.0
        shares.append(min(share, shares[-1]) if shares else share)
    return tuple(shares)


def mean_accepted(probabilities: Sequence[float]) -> float:
    """Accepted drafts of a verification, without the token of the model itself."""
    total, reached = 0.0, 1.0
    for probability in probabilities:
        reached *= probability
        total += reached
    return total


def draw_accepted(probabilities: Sequence[float], num_drafts: int, uniform: Callable[[], float]) -> int:
    """Accepted drafts of one verification of ``num_drafts``; ``uniform`` gives numbers in [0, 1), one for each position looked at."""
    accepted = 0
    for probability in probabilities[:num_drafts]:
        if uniform() >= probability:
            break
        accepted += 1
    return accepted


def _conditional(shares: Sequence[float], draft_tokens: int) -> tuple[float, ...]:
    if len(shares) != draft_tokens:
        raise ConfigError(f"acceptance has {len(shares)} positions; needed: one share for each of {draft_tokens} draft tokens")
    found: list[float] = []
    before = 1.0
    for position, share in enumerate(shares):
        if not (math.isfinite(share) and 0.0 <= share <= before):
            raise ConfigError(
                f"acceptance at position {position} is {share:g}; needed: 0 to {before:g}, the share at the position before it (a draft "
                "counts as accepted where all before it were)"
            )
        found.append(share / before if before else 0.0)
        before = share
    return tuple(found)


def _same_everywhere(mean: float, count: int) -> float:
    """p in [0, 1] with p + ... + p^count = mean, which rises with p."""
    if mean >= count:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if mean_accepted((middle,) * count) < mean:
            low = middle
        else:
            high = middle
    return high if mean > 0 else 0.0
