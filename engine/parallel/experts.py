"""Routed experts spread over ranks: the tokens of every rank reach the experts they chose, and the weighted sums come back.

With one data rank (tp, with or without ep) all ranks hold the same tokens: each adds up its experts' part, and the caller's sum over the
tensor group completes it. With more, a rank's tokens are its own, and a tensor rank takes its share of them: *dispatch* sends each to the
ranks of its experts, *combine* returns one row from each of them, and the rows are added in the order of ranks, whatever else is in
the batch. Which tokens go where: ``engine.core.traffic``.

Legend: T tokens here, M rows received, K experts a token, D hidden, n world ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.core.errors import InvariantError
from engine.core.expert_map import ExpertMap, moves
from engine.core.sharding import RankPlace
from engine.core.traffic import sends_everything, share_start, token_shares
from engine.kernels.experts import expert_gemm_partial
from engine.kernels.timing import component
from engine.parallel.groups import ParallelGroups

Routing = Literal["model", "balanced", "imbalanced"]
_COUNTED_TOGETHER = 64


class RoutedExperts:
    """One layer's experts on one rank: w13 [slots, 2I, D] and w2 [slots, I, D], I the width a rank has of each.

    ``w13`` and ``w2`` are changed in place by ``rebalance``.
    """

    def __init__(self, groups: ParallelGroups, placement: ExpertMap, experts_per_token: int, w13: Tensor, w2: Tensor, limit: float | None):
        self.groups = groups
        self.placement = placement
        self.w13, self.w2, self.limit = w13, w2, limit
        self._layout = groups.place.layout
        self._top_k = experts_per_token
        self._everything = sends_everything(self._layout, experts_per_token)
        self._slots_ER, self._counts_E = _slot_table(placement, w13.device)
        # Place on this rank of every physical slot, the number of places for those of others.
        self._local_of_slot = torch.full((len(placement.logical),), placement.slots_per_rank, device=w13.device)
        first = groups.place.expert_rank * placement.slots_per_rank
        self._local_of_slot[first : first + placement.slots_per_rank] = torch.arange(placement.slots_per_rank, device=w13.device)
        self._chosen_E = torch.zeros(placement.num_experts, dtype=torch.int64, device=w13.device)
        self._uncounted: list[Tensor] = []

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """The routed sum [T, D], to be added up over the tensor group. ``num_tokens`` says how many every data rank calls this with."""
        self._count(ids_TK)
        slots_TK = self._physical(ids_TK)
        if self._layout.dp == 1:
            return expert_gemm_partial(x_TD, weights_TK, self._local(slots_TK), self.w13, self.w2, self.limit)
        shares = token_shares(self._layout, num_tokens)
        if not any(shares):
            return x_TD
        start = share_start(self._layout, self.groups.place.tensor_rank, x_TD.shape[0])
        stop = start + shares[self.groups.place.rank]
        exchange = self._exchange_all if self._everything else self._exchange
        if self._layout.tp == 1:
            return exchange(x_TD, weights_TK, slots_TK, shares)
        own = slice(start, stop)
        mine_SD = exchange(x_TD[own], weights_TK[own], slots_TK[own], shares)
        return torch.nn.functional.pad(mine_SD, (0, 0, start, x_TD.shape[0] - stop))

    def join(self, num_tokens: Sequence[int]) -> None:
        """Take part in a call of other data ranks."""
        empty_0D = self.w2.new_empty((0, self.w2.shape[2]))
        empty_0K = torch.empty((0, self._top_k), device=self.w2.device)
        self(empty_0D, empty_0K, empty_0K.long(), num_tokens)

    # -- the two ways of exchanging -----------------------------------------------------------------------------------------

    def _exchange_all(self, x_SD: Tensor, weights_SK: Tensor, slots_SK: Tensor, shares: Sequence[int]) -> Tensor:
        """Every row to every rank: nothing but the shares has to be known."""
        sent = [x_SD.shape[0]] * len(shares)
        packed = _packed(x_SD, weights_SK, slots_SK)
        out_MD = self._compute(_dispatch(self.groups, packed.repeat(len(shares), 1), sent, shares))
        return _combine(self.groups, out_MD, shares, sent).view(len(shares), *x_SD.shape).sum(0)

    def _exchange(self, x_SD: Tensor, weights_SK: Tensor, slots_SK: Tensor, shares: Sequence[int]) -> Tensor:
        """Each row to the ranks of its experts; how many rows come from where is exchanged first."""
        size, width = len(shares), self._layout.expert_tp
        goes_Sn = torch.zeros((x_SD.shape[0], size // width), dtype=torch.bool, device=x_SD.device)
        goes_Sn.scatter_(1, slots_SK // self.placement.slots_per_rank, True)
        goes_Sn = goes_Sn.repeat_interleave(width, dim=1)
        sent, received = _exchange_counts(self.groups, goes_Sn.sum(0))
        row_X = goes_Sn.t().nonzero()[:, 1]  # by rank, then by token
        packed = _packed(x_SD, weights_SK, slots_SK).index_select(0, row_X)
        out_MD = self._compute(_dispatch(self.groups, packed, sent, received))
        back_XD = _combine(self.groups, out_MD, received, sent)
        # Where each token's rows are, by rank; the row of zeros behind them stands for the ranks it did not visit.
        place_Sn = goes_Sn.t().flatten().cumsum(0).view(size, x_SD.shape[0]).t() - 1
        most = min(slots_SK.shape[1] * width, size)
        place_SY = place_Sn.masked_fill(~goes_Sn, back_XD.shape[0]).sort(dim=1).values[:, :most]
        return torch.nn.functional.pad(back_XD, (0, 0, 0, 1))[place_SY].sum(1)

    def _compute(self, packed_MX: Tensor) -> Tensor:
        x_MD, weights_MK, slots_MK = _unpacked(packed_MX, self._top_k)
        return expert_gemm_partial(x_MD, weights_MK, self._local(slots_MK), self.w13, self.w2, self.limit)

    # -- counts -------------------------------------------------------------------------------------------------------------

    def _count(self, ids_TK: Tensor) -> None:
        """Each token once in the replica: by the tensor rank whose share it is in. Added up some calls at a time."""
        layout, me, num_tokens = self._layout, self.groups.place.tensor_rank, ids_TK.shape[0]
        own = slice(share_start(layout, me, num_tokens), share_start(layout, me + 1, num_tokens))
        self._uncounted.append(ids_TK[own] if layout.tp > 1 else ids_TK)
        if len(self._uncounted) == _COUNTED_TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        if self._uncounted:
            ids_P = torch.cat(self._uncounted).flatten()
            self._chosen_E.scatter_add_(0, ids_P, torch.ones_like(ids_P))
            self._uncounted.clear()

    def take_counts(self) -> list[int]:
        """How often each expert was chosen by this rank's tokens since the last call; the ranks' counts add up to the replica's."""
        self._add_up()
        counts: list[int] = self._chosen_E.tolist()
        self._chosen_E.zero_()
        return counts

    # -- slots --------------------------------------------------------------------------------------------------------------

    def _physical(self, ids_TK: Tensor) -> Tensor:
        """The slot each choice goes to; the slots of a redundant expert take turns over the tokens, alike on all ranks that have these."""
        if self._counts_E is None:
            return ids_TK
        turn_T1 = torch.arange(ids_TK.shape[0], device=ids_TK.device).unsqueeze(1) + self.groups.place.data_rank
        return self._slots_ER[ids_TK, turn_T1 % self._counts_E[ids_TK]]

    def _local(self, slots_MK: Tensor) -> Tensor:
        return self._local_of_slot.index_select(0, slots_MK.reshape(-1)).view(slots_MK.shape)

    def rebalance(self, placement: ExpertMap) -> int:
        """Take up another placement between two steps, a collective of all ranks; returns how many experts this rank received."""
        steps = moves(self.placement, placement)
        width, size = self._layout.expert_tp, placement.slots_per_rank
        me = self.groups.place
        outgoing: list[list[int]] = [[] for _ in range(me.num_ranks)]
        incoming: list[list[int]] = [[] for _ in range(me.num_ranks)]
        for move in steps:
            source, target = move.source_slot // size, move.slot // size
            if source == me.expert_rank:  # to the rank that holds the same columns of its experts
                outgoing[target * width + me.expert_tensor_rank].append(move.source_slot % size)
            if target == me.expert_rank:
                incoming[source * width + me.expert_tensor_rank].append(move.slot % size)
        sent, received = [len(slots) for slots in outgoing], [len(slots) for slots in incoming]
        from_slots = torch.tensor([slot for slots in outgoing for slot in slots], dtype=torch.int64, device=self.w13.device)
        to_slots = torch.tensor([slot for slots in incoming for slot in slots], dtype=torch.int64, device=self.w13.device)
        for stack in (self.w13, self.w2):
            arrived = self.groups.world.all_to_all("other", stack.index_select(0, from_slots), sent, received)
            stack.index_copy_(0, to_slots, arrived)
        self.placement = placement
        self._slots_ER, self._counts_E = _slot_table(placement, self.w13.device)
        return len(to_slots)


def rebalance(layers: Sequence[RoutedExperts], maps: Sequence[ExpertMap]) -> int:
    """A placement for each layer; returns how many experts this rank received. Raises InvariantError where their number differs."""
    if len(maps) != len(layers):
        raise InvariantError(f"{len(maps)} expert maps for {len(layers)} layers with experts")
    return sum(layer.rebalance(placement) for layer, placement in zip(layers, maps, strict=True))


def forced_ids(routing: Routing, like_TK: Tensor, num_experts: int, spread: RoutedExperts | None, num_tokens: Sequence[int]) -> Tensor:
    """Expert ids for measurements: ``balanced`` deals them out over ranks and experts in turn, over the tokens of all data ranks
    together; ``imbalanced`` names the first K experts always."""
    count, top_k = like_TK.shape
    if routing == "imbalanced":
        return torch.arange(top_k, device=like_TK.device).expand(count, top_k)
    place = RankPlace() if spread is None else spread.groups.place
    per_rank, first = num_experts // place.layout.ep, sum(num_tokens[: place.data_rank])
    turn_TK = torch.arange(first * top_k, (first + count) * top_k, device=like_TK.device).view(count, top_k)
    return turn_TK % place.layout.ep * per_rank + turn_TK // place.layout.ep % per_rank


@component("dispatch")
def _dispatch(groups: ParallelGroups, packed: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    return groups.world.all_to_all("dispatch", packed, sent, received)


@component("combine")
def _combine(groups: ParallelGroups, out_MD: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    return groups.world.all_to_all("combine", out_MD, sent, received)


@component("dispatch")
def _exchange_counts(groups: ParallelGroups, sent_n: Tensor) -> tuple[list[int], list[int]]:
    rows = [1] * groups.world.size
    received_n = groups.world.all_to_all("dispatch", sent_n, rows, rows)
    sent, received = torch.stack((sent_n, received_n)).tolist()
    return sent, received


def _packed(x_SD: Tensor, weights_SK: Tensor, slots_SK: Tensor) -> Tensor:
    """One row a token, weights and slots behind x as they lie in memory: one message instead of three."""
    dtype = x_SD.dtype
    return torch.cat((x_SD, weights_SK.contiguous().view(dtype), slots_SK.to(torch.int32).view(dtype)), dim=1)


def _unpacked(packed_MX: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    width = 4 * top_k // packed_MX.element_size()
    x, weights, slots = packed_MX.split_with_sizes((packed_MX.shape[1] - 2 * width, width, width), dim=1)
    return x, weights.view(torch.float32), slots.view(torch.int32)


def _slot_table(placement: ExpertMap, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Slots [E, R] of each expert, repeated to the right, and their number [E]; no numbers where every expert has its own slot alone."""
    slots = placement.slots()
    if placement.logical == tuple(range(placement.num_experts)):
        return torch.zeros((0, 0), dtype=torch.int64), None
    most = max(len(of_expert) for of_expert in slots)
    table = [[of_expert[turn % len(of_expert)] for turn in range(most)] for of_expert in slots]
    return torch.tensor(table, device=device), torch.tensor([len(of_expert) for of_expert in slots], device=device)
