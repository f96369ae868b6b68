"""The event log: what the engine, and the twin, say about every request and step. One JSON object a line.

``now_s`` is the driver's clock (wall clock or simulated). Everything that is measured from the log is defined in ``metrics``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, Union

import msgspec

from engine.core.plan import RequestId, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]
Origin = Literal["cold", "prefix", "fork"]
PreemptionKind = Literal["recompute", "swap"]


class Arrived(msgspec.Struct, frozen=True, tag="arrived", omit_defaults=True):
    """A sample was accepted into the queue. ``parent`` is the first sample's id where it is one of several.

    ``now_s`` is when it came to the door, which may be before the times of events that stand earlier in the log.
    """

    now_s: float
    request: RequestId
    num_prompt_tokens: int
    parent: RequestId | None = None


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Refused at the door; never queued, never finished. ``code`` is "invalid_request" or "queue_full"."""

    now_s: float
    request: RequestId
    code: str
    message: str


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """First start on a rank. ``num_cached_tokens`` of the prompt were found in the cache (or come with the fork)."""

    now_s: float
    request: RequestId
    rank: int
    num_prompt_tokens: int
    num_cached_tokens: int
    origin: Origin


class TokensEmitted(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True, gc=False):
    now_s: float
    request: RequestId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class DecodesEmitted(msgspec.Struct, frozen=True, tag="decodes", gc=False):
    """A token of each of ``requests``, written as one: the same as the events of ``expanded``. Only where a driver asks for it.

    While the same requests go on, ``requests`` is one object in all their events.
    """

    now_s: float
    requests: tuple[RequestId, ...]
    tokens: tuple[int, ...]

    def expanded(self) -> Iterator[TokensEmitted]:
        for request, token in zip(self.requests, self.tokens, strict=True):
            yield TokensEmitted(self.now_s, request, (token,))


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    now_s: float
    request: RequestId
    rank: int
    kind: PreemptionKind
    num_computed_tokens: int


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """``num_cached_tokens`` did not have to be computed again (all of them after a swap)."""

    now_s: float
    request: RequestId
    rank: int
    kind: PreemptionKind
    num_cached_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    now_s: float
    request: RequestId
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    stop_token: int | None = None
    message: str = ""


class StepPlanned(msgspec.Struct, frozen=True, tag="planned"):
    now_s: float
    step: int
    num_items: int
    num_tokens: int
    num_running: int
    num_waiting: int


class StepCommitted(msgspec.Struct, frozen=True, tag="committed"):
    """``num_verified_items`` emitted with drafts in them. ``drafts_by_position`` counts these drafts by their place after the last token,
    ``accepted_by_position`` the accepted ones; both are as long as the longest draft.
    """

    now_s: float
    step: int
    forward_s: float
    num_tokens: int
    num_emitted_tokens: int
    num_verified_items: int = 0
    drafts_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.drafts_by_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)


class DecodeStretch(msgspec.Struct, frozen=True, tag="stretch"):
    """Steps that only decode, written as one: the same as the events of ``expanded``.

    Round i plans step ``step`` + i at ``now_s`` (i = 0) or ``committed_s``[i - 1], and commits step ``step`` - ``depth`` + i at
    ``committed_s``[i], which gives one of ``tokens`` to each of ``requests``, always the same.
    """

    now_s: float
    step: int
    depth: int
    committed_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    requests: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    num_waiting: int

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between its commits."""
        return tuple([after - before for before, after in itertools.pairwise(self.committed_s)])

    def expanded(self) -> Iterator[Event]:
        count = len(self.requests)
        pairs = [(request, (token,)) for request, token in zip(self.requests, self.tokens, strict=True)]
        planned_s = self.now_s
        for index, (committed_s, forward_s) in enumerate(zip(self.committed_s, self.forward_s, strict=True)):
            yield StepPlanned(planned_s, self.step + index, count, count, count, self.num_waiting)
            for request, tokens in pairs:
                yield TokensEmitted(committed_s, request, tokens)
            yield StepCommitted(committed_s, self.step - self.depth + index, forward_s, count, count)
            planned_s = committed_s


class StepPriced(msgspec.Struct, frozen=True, tag="priced"):
    """What a cost model expects of a planned step, and its 90 % interval; said before the step's result is known."""

    now_s: float
    step: int
    predicted_s: float
    low_s: float
    high_s: float
    extrapolated: bool


class StepMeasured(msgspec.Struct, frozen=True, tag="measured"):
    """What a priced step took, commit to commit. ``within`` its interval; None where timing its components has slowed it."""

    now_s: float
    step: int
    measured_s: float
    predicted_s: float
    within: bool | None


class DriftAlarm(msgspec.Struct, frozen=True, tag="drift"):
    """Steps take another time than predicted, lastingly, or (not ``raised``) do so no longer. ``component`` has moved most, to ``ratio`` of
    what it was; "step" where no component was timed."""

    now_s: float
    component: str
    ratio: float
    raised: bool


Event = Union[
    Arrived, Rejected, Admitted, TokensEmitted, DecodesEmitted, Preempted, Resumed, Finished, StepPlanned, StepCommitted, StepPriced,
    StepMeasured, DriftAlarm,
]  # fmt: skip
LogEvent = Union[Event, DecodeStretch]


def expand(events: Iterable[LogEvent]) -> Iterator[Event]:
    """The log in its long form."""
    for event in events:
        if isinstance(event, DecodeStretch | DecodesEmitted):
            yield from event.expanded()
        else:
            yield event


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def encode_lines(events: Iterable[LogEvent]) -> bytes:
    """JSON Lines of the log in its long form, each line ended by a newline."""
    return b"".join(_encoder.encode(event) + b"\n" for event in expand(events))


def decode_lines(data: bytes) -> Iterator[Event]:
    """Raises msgspec.ValidationError at a line that is no event."""
    for line in data.splitlines():
        if line.strip():
            yield _decoder.decode(line)
