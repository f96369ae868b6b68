"""The queue of requests that are not running: order, ageing, and the rank kept free for one that was passed too often."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable

from engine.core.policies import OrderPolicy, QueueView, order_fcfs, order_longest_prefix
from engine.core.request import Sequence


class WaitingQueue:
    """Sequences in order of arrival. Whatever the policy, nobody starves:

    a sequence is *passed* when a later arrival is admitted before it. After ``max_passes`` passes it is *aged*: it comes before all that
    are not, oldest first, and while it still does not fit, one rank admits nobody else until it does. The running requests of that rank
    end in finite time, and a request that fits no empty rank is refused on arrival, so it gets in.
    """

    def __init__(self, policy: OrderPolicy, max_passes: int) -> None:
        self._policy = policy
        self._max_passes = max_passes
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """At its place by arrival: a preempted request does not lose its turn."""
        bisect.insort(self._sequences, sequence, key=lambda waiting: waiting.sequence_number)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def is_aged(self, sequence: Sequence) -> bool:
        return sequence.num_passes >= self._max_passes

    def first(self, count: int, cached_tokens: Callable[[Sequence], int]) -> list[Sequence]:
        """The next ``count`` to look at. ``cached_tokens`` is asked only by a policy that orders by it, for the oldest ``count``."""
        waiting = self._sequences
        if self._policy is order_fcfs and not any(sequence.num_passes for sequence in waiting[:count]):
            return waiting[:count]  # nobody was passed (that begins with the oldest): the list is in order already
        candidates = waiting
        by_prefix = self._policy is order_longest_prefix
        if by_prefix:
            candidates = waiting[:count]

        def key(sequence: Sequence) -> tuple[bool, tuple[int, ...]]:
            if self.is_aged(sequence):
                return (False, (sequence.sequence_number,))
            cached = cached_tokens(sequence) if by_prefix else 0
            return (True, self._policy(QueueView(sequence.sequence_number, sequence.priority, cached)))

        return heapq.nsmallest(count, candidates, key=key)

    def admitted(self, sequence: Sequence) -> bool:
        """``sequence`` leaves the queue; every earlier arrival was passed. True where that made one of them aged: look again."""
        waiting = self._sequences
        aged = False
        for other in waiting:
            if other is sequence:
                break
            other.num_passes += 1
            aged = aged or other.num_passes == self._max_passes
        self.remove(sequence)
        sequence.num_passes = 0
        sequence.reserved_rank = None
        return aged

    def in_order(self) -> list[Sequence]:
        return list(self._sequences)
