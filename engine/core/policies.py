"""Swappable decisions as small key functions. Smaller keys come first; every key ends in a number that is unique, so there are no ties.

A policy sees the views below and nothing else: there is no field from which it could learn how long an output will be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from engine.core.errors import ConfigError

Key = tuple[int, ...]
T = TypeVar("T")


class QueueView(NamedTuple):
    """A waiting request. ``priority``: lower is more urgent (vLLM's rule); ``cached_tokens`` is filled for policies that ask for it."""

    sequence_number: int  # order of arrival
    priority: int
    cached_tokens: int


class VictimView(NamedTuple):
    """A running request that could be preempted."""

    sequence_number: int
    priority: int


class NodeView(NamedTuple):
    """A leaf of the prefix tree."""

    last_use_tick: int
    num_uses: int
    priority: int
    creation_tick: int


class RankView(NamedTuple):
    """A data-parallel rank at an admission. ``queued_tokens`` counts what its requests hold and still have to compute."""

    rank: int
    queued_tokens: int
    cached_tokens: int  # of the request's prompt, 0 where the policy does not ask for it
    turn: int  # ranks after the last chosen one, in cyclic order


# --- admission order ---------------------------------------------------------------------------------------------------


def order_fcfs(view: QueueView) -> Key:
    """First come, first served."""
    return (view.sequence_number,)


def order_priority(view: QueueView) -> Key:
    """vLLM's priority scheduling: the lower number first, then first come."""
    return (view.priority, view.sequence_number)


def order_longest_prefix(view: QueueView) -> Key:
    """SGLang's lpm: the longest cached prefix first."""
    return (-view.cached_tokens, view.sequence_number)


# --- victim ------------------------------------------------------------------------------------------------------------


def victim_newest(view: VictimView) -> Key:
    """vLLM's rule: the least urgent, then the newest. The oldest of the most urgent is never preempted, so work always gets done."""
    return (-view.priority, -view.sequence_number)


# --- eviction (SGLang's evict_policy: a policy is a two-line key function) ------------------------------------------------


def evict_lru(view: NodeView) -> Key:
    return (view.last_use_tick, view.creation_tick)


def evict_lfu(view: NodeView) -> Key:
    return (view.num_uses, view.last_use_tick, view.creation_tick)


def evict_slru(view: NodeView) -> Key:
    """Segmented LRU: what was never hit goes before what was."""
    return (min(view.num_uses, 1), view.last_use_tick, view.creation_tick)


def evict_priority(view: NodeView) -> Key:
    """The least urgent first (a node has the urgency of the most urgent request that used it), then LRU."""
    return (-view.priority, view.last_use_tick, view.creation_tick)


# --- rank at admission ---------------------------------------------------------------------------------------------------


def rank_shortest_queue(view: RankView) -> Key:
    return (view.queued_tokens, view.rank)


def rank_round_robin(view: RankView) -> Key:
    return (view.turn, view.rank)


def rank_prefix_aware(view: RankView) -> Key:
    """SGLang router's cache-aware rule in its plainest form: what must be computed here, after what is queued here."""
    return (view.queued_tokens - view.cached_tokens, view.rank)


OrderPolicy = Callable[[QueueView], Key]
EvictionPolicy = Callable[[NodeView], Key]
RankPolicy = Callable[[RankView], Key]

ORDER_POLICIES: dict[str, OrderPolicy] = {"fcfs": order_fcfs, "priority": order_priority, "longest-prefix": order_longest_prefix}
EVICTION_POLICIES: dict[str, EvictionPolicy] = {"lru": evict_lru, "lfu": evict_lfu, "slru": evict_slru, "priority": evict_priority}
RANK_POLICIES: dict[str, RankPolicy] = {
    "shortest-queue": rank_shortest_queue,
    "round-robin": rank_round_robin,
    "prefix-aware": rank_prefix_aware,
}


def named_policy(policies: dict[str, T], name: str, option: str) -> T:
    """Raise ConfigError with the known names where ``name`` is not one of them."""
    if name not in policies:
        raise ConfigError(f"{option} is {name!r}; known: {', '.join(policies)}")
    return policies[name]
