"""Steady decode of one rank, step by step: requests of which each plan computes one more token have their counts kept once for all.

While nobody joins or leaves a rank, a step changes the same counts of every request by one, and hands each a token. ``SteadyDecode``
holds what all have in common, how many plans and commits there were and the tokens of each commit; the ``Sequence`` objects themselves
stay as they were until ``settle`` brings them up to date. Whoever is about to read or change a running sequence settles its rank first;
plans, events, blocks and everything else are those of sequences that never lag (tested).

Not for drafts, whose accepted number differs, nor where window tails are saved: their requests' tokens are read as they go.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.plan import DecodeItems, ItemResult, PlanItem, RequestId
from engine.core.request import Sequence

# Plans of one steady decode: a bound on the tokens that wait in it. What follows is another one.
MAX_PLANS = 256
# It begins after so many plans with the same decodes, and only where it can last for so many more: beginning and settling cost about two.
MIN_PLANS = 3


class SteadyDecode:
    """``sequences`` are the first that their rank runs, and all of it when this begins; each is past its prompt.

    num_planned     plans made since; ``columns`` holds the tokens of each commit since, in the order of ``requests``
    max_plans       so many plans can be made before the first request reaches its limit; its last token is left to ``Scheduler.commit``
    """

    __slots__ = (
        "_accepted", "_column", "_context_tokens", "_growth", "_longest", "_place", "_positions", "_slots", "_stop_ids", "columns",
        "max_plans", "num_expected", "num_planned", "requests", "sequences",
    )  # fmt: skip

    def __init__(self, sequences: list[Sequence], block_size: int) -> None:
        self.sequences = list(sequences)
        self.requests: tuple[RequestId, ...] = tuple([sequence.id for sequence in sequences])
        self.num_planned = 0
        self.columns: list[tuple[int, ...]] = []
        self.max_plans = min(MAX_PLANS, *[sequence.limit - sequence.num_expected for sequence in sequences])
        self.num_expected = sum([sequence.num_expected for sequence in sequences])
        self._slots = [sequence.slot for sequence in sequences]
        self._positions = [sequence.num_planned for sequence in sequences]
        self._context_tokens, self._longest = sum(self._positions), max(self._positions)
        self._stop_ids = frozenset[int]().union(*{sequence.stop_ids for sequence in sequences})
        self._accepted: tuple[ItemResult, ...] = ()  # results that were looked at, and their tokens
        self._column: tuple[int, ...] = ()
        # (plan, index) of a request that needs a block for its item, in the order of stepping.
        self._growth: list[tuple[int, int]] = []
        for index, (sequence, position) in enumerate(zip(sequences, self._positions, strict=True)):
            first = len(sequence.blocks) * block_size - position
            self._growth += [(plan, index) for plan in range(first, self.max_plans, block_size)]
        self._growth.sort()
        self._place = 0

    @property
    def num_held_tokens(self) -> int:
        """The sum of ``num_expected``."""
        return self.num_expected + self.num_planned * len(self.sequences)

    def growing(self) -> list[int]:
        """Indices of those that need a block for the next plan."""
        growth, end = self._growth, self._place
        while end < len(growth) and growth[end][0] == self.num_planned:
            end += 1
        return [index for _, index in growth[self._place : end]]

    def plan(self) -> DecodeItems:
        """The next items, whose blocks have been allocated."""
        ahead = self.num_planned
        items = DecodeItems(
            [
                PlanItem(slot, request, position + ahead, 1, 0, True)
                for slot, request, position in zip(self._slots, self.requests, self._positions, strict=True)
            ]
        )
        items.requests = self.requests
        items.context_tokens = self._context_tokens + (ahead + 1) * len(items)
        items.longest_context_tokens = self._longest + ahead + 1
        self._place += len(self.growing())
        self.num_planned += 1
        return items

    def commit(self, results: tuple[ItemResult, ...]) -> tuple[int, ...] | None:
        """The tokens, one of each request; None, and nothing done, where a request ends or the results are not one token each."""
        if len(self.columns) + 1 >= self.max_plans:
            return None
        if results is not self._accepted:  # an executor may say the same again
            if len(results) != len(self.requests):
                return None
            for outcome, request in zip(results, self.requests, strict=True):
                if outcome.request != request or len(outcome.tokens) != 1 or outcome.logprobs:
                    return None
            column = tuple([outcome.tokens[0] for outcome in results])
            if not self._stop_ids.isdisjoint(column):
                return None
            self._accepted, self._column = results, column
        self.columns.append(self._column)
        return self._column

    def settle(self) -> None:
        """Bring the sequences up to date. This is then of no more use."""
        num_planned, num_committed = self.num_planned, len(self.columns)
        for sequence in self.sequences:
            sequence.num_planned += num_planned
            sequence.num_expected += num_planned
            sequence.num_computed += num_committed
        for sequence, tokens in zip(self.sequences, _rows(self.columns), strict=False):
            sequence.tokens.extend(tokens)


def _rows(columns: Seq[tuple[int, ...]]) -> Seq[tuple[int, ...]]:
    return list(zip(*columns, strict=True))
