"""What ranks send each other: the choices that decide it, and the bytes that follow. Bytes are those a rank sends to *other* ranks.

Experts under data-parallel attention. A token travels to an expert rank once, with its expert ids and weights beside it, however many of
its experts are there, and one row of partial sums travels back. Where nearly every token goes nearly everywhere (as many experts a token
as expert ranks, or more) every row is sent to every rank: then all sizes follow from the step's plan and the exchange of counts, a
message's latency in each layer, is saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.layout import Layout
from engine.core.plan import StepPeers
from engine.core.sharding import RankPlace
from engine.core.specs import DenseSpec, ModelSpec, V41Spec

ONE_SHOT_BYTES = 32768  # CPU: up to here a sum of three or more ranks is one exchange of whole tensors, above it two of pieces
COUNT_BYTES = 8  # of an exchange of numbers of rows
ID_BYTES = 4  # of an Engram row
ROUTE_BYTES = 8  # an int32 expert slot and a float32 weight


def sends_everything(layout: Layout, experts_per_token: int) -> bool:
    """Whether tokens are dispatched to all ranks instead of to those of their experts."""
    return layout.ep <= experts_per_token


def token_shares(layout: Layout, num_tokens: Sequence[int]) -> tuple[int, ...]:
    """Tokens each world rank dispatches, where data rank d has ``num_tokens[d]``: its tensor ranks split them."""
    tp = layout.tp
    return tuple((index + 1) * count // tp - index * count // tp for count in num_tokens for index in range(tp))


def share_start(layout: Layout, tensor_rank: int, num_tokens: int) -> int:
    """Where a tensor rank's share begins among the tokens of its data rank."""
    return tensor_rank * num_tokens // layout.tp


def dispatch_row_bytes(hidden_size: int, experts_per_token: int, element_bytes: int) -> int:
    return hidden_size * element_bytes + experts_per_token * ROUTE_BYTES


def all_gather_bytes(num_bytes: int, num_ranks: int) -> int:
    """Of one rank, for ``num_bytes`` of its own."""
    return num_bytes * (num_ranks - 1)


def all_reduce_bytes(num_bytes: int, element_bytes: int, num_ranks: int) -> int:
    """Of one rank on CPUs; a GPU's ring sends 2 (n - 1) / n of the tensor."""
    if num_ranks == 2 or num_bytes <= ONE_SHOT_BYTES:
        return num_bytes * (num_ranks - 1)
    elements = num_bytes // element_bytes
    return 2 * -(-elements // num_ranks) * element_bytes * (num_ranks - 1)


def step_traffic(spec: ModelSpec, place: RankPlace, peers: StepPeers, element_bytes: int, draft_tokens: int = 0) -> dict[str, float]:
    """Bytes the rank at ``place`` sends to others in one step, by kind of collective. ``draft_tokens``: those of a draft round; 0: none.

    Exact for sums and gathers, and for dispatch and combine where every row goes everywhere. Where the routing or the hash decides, the
    expectation: experts and table rows chosen evenly and independently.
    """
    step = _Step(spec, place, element_bytes)
    tokens, rows, drafting = peers.num_tokens, peers.num_logit_rows, peers.num_emitting
    step.sum_rows(tokens)  # the embedding
    for layer in range(spec.num_layers):
        counts = rows if layer == spec.num_layers - 1 else tokens
        step.sum_rows(counts)
        step.sum_rows(counts)
        step.experts(counts, *_experts_of(spec, layer))
    step.gather_logits(rows[place.data_rank])
    if isinstance(spec, V41Spec):
        if draft_tokens and spec.dspark and any(drafting):
            block = [spec.dspark.block_size * count for count in drafting]
            step.sum_rows(block)
            for _ in range(spec.dspark.num_layers):
                step.sum_rows(block)
                step.sum_rows(block)
                step.experts(block, spec.dspark.num_experts, spec.dspark.experts_per_token)
            step.gather_logits(draft_tokens * drafting[place.data_rank])
        step.engram(tokens)
    return {kind: value for kind, value in step.sent.items() if value}


def _experts_of(spec: ModelSpec, layer: int) -> tuple[int, int]:
    if isinstance(spec, V41Spec):
        return spec.num_experts, spec.experts_per_token
    return (spec.moe.num_experts, spec.moe.experts_per_token) if spec.moe and spec.is_moe(layer) else (0, 0)


class _Step:
    """Adds up what one rank sends."""

    def __init__(self, spec: ModelSpec, place: RankPlace, element_bytes: int) -> None:
        self.spec, self.place, self.element_bytes = spec, place, element_bytes
        self.sent: dict[str, float] = {"dispatch": 0.0, "combine": 0.0, "all_reduce": 0.0, "all_gather": 0.0, "engram.fetch": 0.0}

    def sum_rows(self, counts: Sequence[int]) -> None:
        tp, count = self.place.layout.tp, counts[self.place.data_rank]
        if tp > 1:
            self.sent["all_reduce"] += all_reduce_bytes(count * self.spec.hidden_size * self.element_bytes, self.element_bytes, tp)

    def gather_logits(self, count: int) -> None:
        tp, index, size = self.place.layout.tp, self.place.tensor_rank, self.spec.vocab_size
        width = (index + 1) * size // tp - index * size // tp
        self.sent["all_gather"] += all_gather_bytes(count * width * 4, tp)

    def experts(self, counts: Sequence[int], num_experts: int, top_k: int) -> None:
        layout, others = self.place.layout, self.place.num_ranks - 1
        if layout.dp == 1 or not num_experts or not any(counts):
            return
        shares = token_shares(layout, counts)
        mine, theirs = shares[self.place.rank], sum(shares) - shares[self.place.rank]
        row_bytes = dispatch_row_bytes(self.spec.hidden_size, top_k, self.element_bytes)
        back_bytes = self.spec.hidden_size * self.element_bytes
        # The part of all ranks that a row travels to.
        reach = 1.0
        if not sends_everything(layout, top_k):
            reach = 1.0 - _none_of(num_experts, num_experts // layout.ep, top_k)
            self.sent["dispatch"] += others * COUNT_BYTES
        self.sent["dispatch"] += mine * others * reach * row_bytes
        self.sent["combine"] += theirs * reach * back_bytes

    def engram(self, counts: Sequence[int]) -> None:
        engram = None if isinstance(self.spec, DenseSpec) else self.spec.engram
        if engram is None or not self.place.shards_engram or not any(counts):
            return
        tp, num_ranks = self.place.layout.tp, self.place.num_ranks
        shares = token_shares(self.place.layout, counts)
        mine, total = shares[self.place.rank], sum(shares)
        ids, row_bytes = engram.num_columns * len(engram.layer_ids), engram.head_dim * self.element_bytes
        # Ids to everybody, rows to those who want them, then the rows of one's share to the tensor ranks.
        self.sent["engram.fetch"] += mine * ids * ID_BYTES * (num_ranks - 1)
        self.sent["engram.fetch"] += (total - mine) * ids * row_bytes / num_ranks + mine * ids * row_bytes * (tp - 1)


def _none_of(num_experts: int, held: int, top_k: int) -> float:
    """Probability that none of a token's ``top_k`` distinct experts is among the ``held`` ones of a rank."""
    result = 1.0
    for index in range(top_k):
        result *= max(0, num_experts - held - index) / (num_experts - index)
    return result
