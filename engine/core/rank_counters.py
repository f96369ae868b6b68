"""What a rank counts beside its results, for metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RankCounters(msgspec.Struct, frozen=True, array_like=True):
    """Since the last time they were taken.

    expert_choices  of every layer with spread experts (backbone before draft), how often this rank's tokens chose each
    traffic      (kind of collective, bytes sent to other ranks, number of collectives)
    engram_hits  fetches whose Engram rows were there when a layer asked for them; ``engram_misses``: those waited for, ``engram_wait_s`` in
                 all. Tables that lie whole on the device need no fetch and count nothing.
    """

    expert_choices: tuple[tuple[int, ...], ...] = ()
    traffic: tuple[tuple[str, int, int], ...] = ()
    engram_hits: int = 0
    engram_misses: int = 0
    engram_wait_s: float = 0.0


def added(counters: Sequence[RankCounters]) -> RankCounters:
    """Those of several ranks of one replica together; a rank that reports no experts adds none."""
    choices = [each.expert_choices for each in counters if each.expert_choices]
    num_bytes: dict[str, int] = {}
    num_calls: dict[str, int] = {}
    for each in counters:
        for kind, sent_bytes, calls in each.traffic:
            num_bytes[kind] = num_bytes.get(kind, 0) + sent_bytes
            num_calls[kind] = num_calls.get(kind, 0) + calls
    return RankCounters(
        expert_choices=tuple(tuple(map(sum, zip(*layer, strict=True))) for layer in zip(*choices, strict=True)),
        traffic=tuple((kind, num_bytes[kind], num_calls[kind]) for kind in sorted(num_bytes)),
        engram_hits=sum(each.engram_hits for each in counters),
        engram_misses=sum(each.engram_misses for each in counters),
        engram_wait_s=sum(each.engram_wait_s for each in counters),
    )
