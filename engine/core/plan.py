"""StepPlan and StepResult: the project's currency.

The worker executes a plan, the trace recorder labels kernels with it, calibration regresses on it, the cost model prices
it, the twin advances time by it. A plan never carries token ids: the worker keeps the tokens of each request it was given
(and those it sampled itself), so a recorded plan holds no text, and plan N+1 can be made before the tokens of N are known.

Slots. A request that has begun holds one *slot* of its rank: an index in [0, max_running) under which the worker keeps its
block table row, its token row and its per-sequence state (window rings, compressor state). Orders in one RankPlan are
executed in the order of the fields below; plans of one worker are executed strictly in order, which is what makes it safe to
reuse a block, slot or tail in a later plan while an earlier one is still running.
"""

from __future__ import annotations

import msgspec

from engine.core.rank_counters import RankCounters

RequestId = int


class PlanItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute ``num_new_tokens`` tokens of one request, at positions [num_computed, num_computed + num_new).

    The last ``num_draft_tokens`` of them are drafts to be verified. ``emits`` is true where the last non-draft token is the newest
    token of the request, so that sampling follows; it is false for a prompt chunk that does not end the prompt.
    """

    slot: int
    request: RequestId
    num_computed_tokens: int
    num_new_tokens: int
    num_draft_tokens: int
    emits: bool


class DecodeItems(tuple[PlanItem, ...]):
    """Items that each decode one token, with what they come to, so that nobody has to count it item by item. While the same requests go on,
    ``requests`` is one object in all their plans. On the wire these are items like any, and their reader finds a plain tuple."""

    requests: tuple[RequestId, ...]
    context_tokens: int  # in cache after the step, of all of them
    longest_context_tokens: int


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy the content of device block ``src`` to device block ``dst`` (all layers)."""

    src: int
    dst: int


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes ``slot``; its first ``num_computed_tokens`` tokens are already in ``blocks``.

    Exactly one origin of the per-sequence state: cold or dense (all None, state zeroed), a stored window tail (``tail``), a
    fork of a running sequence (``fork_of_slot``), or a swapped-out state (``host_state``).
    """

    slot: int
    request: RequestId
    num_computed_tokens: int
    blocks: tuple[int, ...]
    tail: int | None = None
    fork_of_slot: int | None = None
    host_state: int | None = None


class BlockAppend(msgspec.Struct, frozen=True, array_like=True):
    """Append ``blocks`` to the block table of ``slot``, beginning at entry ``first_index``."""

    slot: int
    first_index: int
    blocks: tuple[int, ...]


class SwapOut(msgspec.Struct, frozen=True, array_like=True):
    """Copy ``blocks`` and the per-sequence state of ``slot`` to host blocks and one host state.

    A model without per-sequence state has no host states: ``host_state`` is then 0 and means nothing.
    """

    slot: int
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    host_state: int


class SwapIn(msgspec.Struct, frozen=True, array_like=True):
    """Copy host blocks back into device ``blocks``; the state follows with the SequenceStart of the same plan."""

    host_blocks: tuple[int, ...]
    blocks: tuple[int, ...]


class TailSave(msgspec.Struct, frozen=True, array_like=True):
    """After this step, keep the window rows that end at ``position`` (exclusive) of ``slot`` under ``tail``.

    ``position`` is a multiple of the block size with num_computed < position <= num_computed + num_new of the slot's item in
    this plan, never among its draft tokens.
    """

    slot: int
    position: int
    tail: int


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one data-parallel rank does in a step. An idle rank has an empty plan and joins all the same."""

    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    items: tuple[PlanItem, ...] = ()
    tail_saves: tuple[TailSave, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.items) if isinstance(self.items, DecodeItems) else sum(item.num_new_tokens for item in self.items)


class StepPlan(msgspec.Struct, frozen=True, tag="plan"):
    """One step of one replica: one RankPlan per data-parallel rank. ``step`` counts from 0 without gaps."""

    step: int
    ranks: tuple[RankPlan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(rank.num_tokens for rank in self.ranks)


class StepPeers(msgspec.Struct, frozen=True, array_like=True):
    """What a rank must know of the whole step to take part in its collectives: one entry for each data-parallel rank."""

    num_tokens: tuple[int, ...]
    num_logit_rows: tuple[int, ...]  # one for each emitting item and one for each of its drafts
    num_emitting: tuple[int, ...]  # items that emit, which are the sequences of the draft round that follows


def step_peers(plan: StepPlan) -> StepPeers:
    """The peers' view of ``plan``; every worker of the replica is given the same."""
    emitting = [rank.items if isinstance(rank.items, DecodeItems) else [item for item in rank.items if item.emits] for rank in plan.ranks]
    return StepPeers(
        num_tokens=tuple(rank.num_tokens for rank in plan.ranks),
        num_logit_rows=tuple(
            len(items) if isinstance(items, DecodeItems) else sum(1 + item.num_draft_tokens for item in items) for items in emitting
        ),
        num_emitting=tuple(len(items) for items in emitting),
    )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one emitted position, of the model's own distribution."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class ItemResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of one emitting item: the accepted drafts and then one token of the target model itself.

    ``len(tokens)`` is 1 + accepted drafts. ``logprobs`` is empty or of the same length. With an ``error`` there are no tokens: nothing
    could be sampled for this request, and what its item computed is not to be used; it ends, and it alone.
    """

    request: RequestId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class RankResult(msgspec.Struct, frozen=True, array_like=True):
    """Results of the emitting items of a RankPlan, in the plan's order."""

    items: tuple[ItemResult, ...] = ()


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """What came of a StepPlan. Times are measured by the executor; the core never reads them.

    ``components`` are (name, seconds) of the slowest rank, names from ``specs.COMPONENTS``; empty unless the executor was asked for them.
    ``counters``: what all ranks together have counted since the last report; None where none was asked for.
    """

    step: int
    ranks: tuple[RankResult, ...]
    forward_s: float = 0.0
    components: tuple[tuple[str, float], ...] = ()
    counters: RankCounters | None = None
