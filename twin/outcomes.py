"""What a step brings forth: the tokens of each emitting item, as the workload's true lengths and the acceptance of drafts have it.

A request's answer ends at its true length through a stop token, of which the scheduler knows no more than of any other: no policy sees
how long an answer will be. An answer as long as ``max_tokens`` ends by length.
"""

from __future__ import annotations

import random
from typing import Protocol

from engine.core.acceptance import draw_accepted
from engine.core.errors import InvariantError
from engine.core.plan import DecodeItems, ItemResult, PlanItem, RankResult, RequestId, StepPlan, StepResult
from engine.core.request import MAX_TOKEN_ID, Sequence
from engine.core.sampling import SamplingParams
from engine.core.stretch import Answer
from twin.workload.types import SimRequest

STOP_TOKEN = MAX_TOKEN_ID  # above every vocabulary


class Outcomes(Protocol):
    """Gives a replica the results of its steps, and is told who lives there."""

    def begin(self, request: SimRequest) -> None: ...

    def end(self, request: RequestId) -> None: ...

    def result(self, plan: StepPlan, forward_s: float) -> StepResult: ...


def sampling_params(request: SimRequest) -> SamplingParams:
    """What the scheduler is told of how an answer ends."""
    return SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, stop_token_ids=(STOP_TOKEN,))


class _Answer:
    """What is left of one request's answer. ``one`` is the result of an item that brings one more token and not the last."""

    __slots__ = ("ends_by_length", "left", "one", "token")

    def __init__(self, request: SimRequest) -> None:
        self.token = request.output_token
        self.left = min(request.output_tokens, request.max_tokens)
        self.ends_by_length = request.output_tokens >= request.max_tokens
        self.one = ItemResult(request.index, (request.output_token,))


class _Run:
    """Decodes of a rank that go on, each with the token before: ``result`` was theirs ``num_given`` times more than is taken off from what
    is left of their answers; ``num_left`` is the least of these."""

    __slots__ = ("num_given", "num_left", "requests", "result")

    def __init__(self, requests: tuple[RequestId, ...], result: RankResult, num_left: int) -> None:
        self.requests, self.result, self.num_left = requests, result, num_left
        self.num_given = 0


class DrawnOutcomes:
    """Seeded: the same plans in the same order give the same results."""

    def __init__(self, acceptance: tuple[float, ...], seed: int, replica: int) -> None:
        self._acceptance = acceptance
        self._uniform = random.Random(f"{seed}:{replica}").random
        self._answers: dict[RequestId, _Answer] = {}
        self._runs: dict[int, _Run] = {}  # of each rank that has one

    def begin(self, request: SimRequest) -> None:
        if request.output_token == STOP_TOKEN:
            raise InvariantError(f"request {request.index}: its output token is the simulator's stop token")
        self._answers[request.index] = _Answer(request)

    def end(self, request: RequestId) -> None:
        """It finished or left; a plan made before may still have an item of it."""
        del self._answers[request]

    def answer_of(self, sequence: Sequence) -> Answer:
        self._settle(sequence.rank)
        answer = self._answers[sequence.id]
        return Answer(answer.token, answer.left)

    def skip(self, request: RequestId, count: int) -> None:
        """``count`` more results of it were given: its token each time."""
        self._answers[request].left -= count

    def result(self, plan: StepPlan, forward_s: float) -> StepResult:
        answers = self._answers
        ranks: list[RankResult] = []
        for index, rank in enumerate(plan.ranks):
            items, run = rank.items, self._runs.get(index)
            if run is not None and type(items) is DecodeItems and items.requests is run.requests and run.num_left > 1:
                run.num_left -= 1
                run.num_given += 1
                ranks.append(run.result)
                continue
            self._settle(index)
            results: list[ItemResult] = []
            for item in items:
                if not item.emits:
                    continue
                answer = answers.get(item.request)
                if answer is not None and item.num_draft_tokens == 0 and answer.left > 1:
                    answer.left -= 1
                    results.append(answer.one)
                else:
                    results.append(self._item(item, answer))
            ranks.append(RankResult(tuple(results)))
            if type(items) is DecodeItems:
                self._begin_run(index, items, ranks[-1])
        return StepResult(plan.step, tuple(ranks), forward_s)

    def _begin_run(self, rank: int, items: DecodeItems, result: RankResult) -> None:
        """``result`` is that of ``items``, and of those that follow on them until one of their answers is at its last token."""
        answers = [self._answers.get(request) for request in items.requests]
        num_left = min(0 if answer is None else answer.left for answer in answers)
        if num_left > 1:
            self._runs[rank] = _Run(items.requests, result, num_left)

    def _settle(self, rank: int | None) -> None:
        """Before anybody asks what is left of an answer on ``rank``."""
        run = None if rank is None else self._runs.pop(rank, None)
        if run is not None and run.num_given:
            for request in run.requests:
                if request in self._answers:
                    self._answers[request].left -= run.num_given

    def _item(self, item: PlanItem, answer: _Answer | None) -> ItemResult:
        """One with drafts, the last of an answer, or one that was planned before its request's end was known (nobody reads it)."""
        accepted = draw_accepted(self._acceptance, item.num_draft_tokens, self._uniform)
        if answer is None or answer.left == 0:
            return ItemResult(item.request, (STOP_TOKEN,))
        count = min(1 + accepted, answer.left)
        answer.left -= count
        tokens = (answer.token,) * count
        if answer.left == 0 and not answer.ends_by_length:
            tokens = (*tokens[:-1], STOP_TOKEN)
        return ItemResult(item.request, tokens)
