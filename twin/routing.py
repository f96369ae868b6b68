"""Which replica a request goes to: the core's key functions for ranks, one level up.

A router sees what a real one can count, or is told by the replicas' cache events: prompt tokens it has sent and that have not ended, and
how much of this prompt a replica has in its cache. It does not see how long answers will be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from engine.core.policies import RankPolicy, RankView, rank_prefix_aware, rank_round_robin, rank_shortest_queue
from engine.core.request import Request
from engine.core.scheduler import Scheduler

# In a view's terms: rank is the replica, queued_tokens the prompt tokens of its requests that have not ended, cached_tokens the longest
# hit on any of its ranks, turn the place in the cycle after the replica last chosen.
ROUTING_POLICIES: dict[str, RankPolicy] = {
    "round-robin": rank_round_robin,
    "least-tokens": rank_shortest_queue,
    "prefix-aware": rank_prefix_aware,
}


class Routable(Protocol):
    """What a router looks at."""

    @property
    def core(self) -> Scheduler: ...

    @property
    def queued_prompt_tokens(self) -> int: ...


class Router:
    def __init__(self, policy: str, num_replicas: int) -> None:
        self._policy = ROUTING_POLICIES[policy]
        self._num_replicas = num_replicas
        self._last = num_replicas - 1

    def choose(self, replicas: Sequence[Routable], request: Request) -> int:
        """The index of the replica that ``request`` goes to."""
        if self._num_replicas == 1:
            return 0

        def key(index: int) -> tuple[int, ...]:
            replica = replicas[index]
            cached = cached_tokens(replica.core, request) if self._policy is rank_prefix_aware else 0
            turn = (index - self._last - 1) % self._num_replicas
            return self._policy(RankView(index, replica.queued_prompt_tokens, cached, turn))

        self._last = min(range(self._num_replicas), key=key)
        return self._last


def cached_tokens(core: Scheduler, request: Request) -> int:
    """Tokens of the prompt that the best rank would not compute."""
    config = core.config
    if not config.prefix_caching:
        return 0
    size = config.cache.block_size
    max_blocks = (len(request.prompt) - 1) // size
    tokens = array("i", request.prompt[: max_blocks * size]).tobytes()
    return size * max(
        rank.tree.match(request.namespace, tokens, max_blocks, need_tail=rank.tails is not None).num_blocks for rank in core.ranks
    )
