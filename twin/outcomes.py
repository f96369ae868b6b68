"""What a step brings forth: the tokens of each emitting item, as the workload's true lengths and the acceptance of drafts have it.

A request's answer ends at its true length through a stop token, of which the scheduler knows no more than of any other: no policy sees
how long an answer will be. An answer as long as ``max_tokens`` ends by length.
"""

from __future__ import annotations

import random
from typing import Protocol

from engine.core.acceptance import draw_accepted
from engine.core.errors import InvariantError
from engine.core.plan import ItemResult, PlanItem, RankResult, RequestId, StepPlan, StepResult
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


class DrawnOutcomes:
    """Seeded: the same plans in the same order give the same results."""

    def __init__(self, acceptance: tuple[float, ...], seed: int, replica: int) -> None:
        self._acceptance = acceptance
        self._uniform = random.Random(f"{seed}:{replica}").random
        self._answers: dict[RequestId, _Answer] = {}

    def begin(self, request: SimRequest) -> None:
        if request.output_token == STOP_TOKEN:
            raise InvariantError(f"request {request.index}: its output token is the simulator's stop token")
        self._answers[request.index] = _Answer(request)

    def end(self, request: RequestId) -> None:
        """It finished or left; a plan made before may still have an item of it."""
        del self._answers[request]

    def answer_of(self, sequence: Sequence) -> Answer:
        answer = self._answers[sequence.id]
        return Answer(answer.token, answer.left)

    def skip(self, request: RequestId, count: int) -> None:
        """``count`` more results of it were given: its token each time."""
        self._answers[request].left -= count

    def result(self, plan: StepPlan, forward_s: float) -> StepResult:
        answers = self._answers
        ranks: list[RankResult] = []
        for rank in plan.ranks:
            results: list[ItemResult] = []
            for item in rank.items:
                if not item.emits:
                    continue
                answer = answers.get(item.request)
                if answer is not None and item.num_draft_tokens == 0 and answer.left > 1:
                    answer.left -= 1
                    results.append(answer.one)
                else:
                    results.append(self._item(item, answer))
            ranks.append(RankResult(tuple(results)))
        return StepResult(plan.step, tuple(ranks), forward_s)

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
