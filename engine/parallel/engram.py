"""Where the Engram tables lie, and how a step's rows get from there: ``begin`` once a step, ``rows`` at each Engram layer.

LocalTables    whole tables on this rank's device.
ShardedTables  rows spread over all ranks, fetched by an all-to-all (a collective: ranks without tokens join); the rows travel while the
               layers before the first Engram layer are computed.
HostTables     tables in host memory (mapped from the checkpoint where it is a file), gathered by a side thread.

Row ids depend on token ids only, so all of it can begin before the first layer. Legend: T tokens, E Engram layers, C columns, I row
width, n ranks, S tokens of this rank's share, U those of all shares, Q rows asked for, P rows asked of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.core.traffic import share_start, token_shares
from engine.kernels.engram import engram_gather
from engine.kernels.timing import component
from engine.parallel.groups import ParallelGroups, Pending

_HOST_TIMEOUT_S = 60.0  # a page that a local disk does not deliver by then never comes


@dataclass(slots=True)
class EngramStats:
    """Since the last ``take``: how often rows were already there when a layer asked for them, and how long it waited otherwise."""

    hits: int = 0
    misses: int = 0
    wait_s: float = 0.0

    def count(self, ready: bool, wait_s: float) -> None:
        self.hits += ready
        self.misses += not ready
        self.wait_s += wait_s

    def take(self) -> EngramStats:
        taken = EngramStats(self.hits, self.misses, self.wait_s)
        self.hits, self.misses, self.wait_s = 0, 0, 0.0
        return taken


class EngramTables(Protocol):
    """``begin`` with the row ids of a step and the number of tokens of every data rank, then ``rows`` of each Engram layer, by its place
    among them."""

    stats: EngramStats

    def begin(self, row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None: ...

    def rows(self, index: int) -> Tensor:
        """[T, C * I] in the model's dtype, on its device."""
        ...

    def join(self, no_row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:
        """Take part in the fetch of other ranks; the ids are those of no tokens."""
        ...

    def held(self) -> list[Tensor]:
        """What lies on the device."""
        ...


class LocalTables:
    """Whole tables [N, I] on the device."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self.stats = EngramStats()
        self._tables = list(tables)
        self._row_ids_TEC: Tensor | None = None

    def begin(self, row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:  # noqa: ARG002 (the protocol's)
        self._row_ids_TEC = row_ids_TEC

    def rows(self, index: int) -> Tensor:
        assert self._row_ids_TEC is not None
        return engram_gather(self._row_ids_TEC[:, index], self._tables[index])

    def join(self, no_row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:
        """Nothing: there is no exchange."""

    def held(self) -> list[Tensor]:
        return self._tables


class ShardedTables:
    """This rank's rows of all tables, one table after the other; row r of table e is with rank q where q * N_e // n <= r."""

    def __init__(
        self, groups: ParallelGroups, shards: Sequence[Tensor], num_rows: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``shards`` as they are stored, on the host: they are copied one by one, so that the device never holds one twice."""
        self.stats = EngramStats()
        self._groups = groups
        counts = [shard.shape[0] for shard in shards]
        self._shard_NI = torch.empty((sum(counts), shards[0].shape[1]), dtype=dtype, device=device)
        for place, shard in zip(self._shard_NI.split_with_sizes(counts), shards, strict=True):
            place.copy_(shard)
        size, rank = groups.world.size, groups.place.rank
        bounds = torch.tensor([[index * rows // size for index in range(size + 1)] for rows in num_rows])
        self._ends_En = bounds[:, 1:].contiguous().to(device)
        self._first_E1, self._end_E1 = (bounds[:, index, None].to(device) for index in (rank, rank + 1))
        held_E1 = self._end_E1 - self._first_E1
        # Where this rank's rows of table e begin, less the first one's id: id + shift is the row here.
        self._shift_E1 = held_E1.cumsum(0) - held_E1 - self._first_E1
        self._pending: Pending | None = None
        self._shares: tuple[int, ...] = ()
        self._place_Q: Tensor | None = None
        self._shape = (0, 0)
        self._rows_TEX: Tensor | None = None

    @component("engram.fetch")
    def begin(self, row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:
        """Tell all ranks the row ids of one's share of the tokens, and send them the rows they want from here. Who sends how many follows
        from the ids, on both sides."""
        layout, me, world = self._groups.place.layout, self._groups.place, self._groups.world
        shares = token_shares(layout, num_tokens)
        start = share_start(layout, me.tensor_rank, row_ids_TEC.shape[0])
        mine_SEC = row_ids_TEC[start : start + shares[me.rank]]
        self._shares, self._shape = shares, (mine_SEC.shape[1], mine_SEC.shape[2])
        all_UEC = world.all_gather_rows("engram.fetch", mine_SEC.to(torch.int32), shares)
        here_UEC = (all_UEC >= self._first_E1) & (all_UEC < self._end_E1)
        owner_EX = torch.searchsorted(self._ends_En, mine_SEC.transpose(0, 1).flatten(1).contiguous(), right=True)
        owner_Q = owner_EX.view(owner_EX.shape[0], -1, mine_SEC.shape[2]).transpose(0, 1).flatten()
        order_Q = owner_Q.argsort(stable=True)
        wanted_U = here_UEC.flatten(1).sum(1)
        sent_n = torch.stack([part.sum() for part in wanted_U.split_with_sizes(shares)])
        sent, received = torch.stack((sent_n, torch.bincount(owner_Q, minlength=world.size))).tolist()
        rows_P = (all_UEC + self._shift_E1)[here_UEC]
        self._place_Q = order_Q.argsort()
        self._rows_TEX = None
        self._pending = world.start_all_to_all("engram.fetch", self._shard_NI.index_select(0, rows_P), sent, received)

    @component("engram.fetch")
    def rows(self, index: int) -> Tensor:
        if self._rows_TEX is None:
            self._rows_TEX = self._arrived()
        return self._rows_TEX[:, index]

    def _arrived(self) -> Tensor:
        assert self._pending is not None
        assert self._place_Q is not None
        ready, begin_s = self._pending.is_done(), time.perf_counter()
        fetched_QI = self._pending.wait()
        self.stats.count(ready, time.perf_counter() - begin_s)
        self._pending = None
        num_layers, columns = self._shape
        share_SEX = fetched_QI.index_select(0, self._place_Q).view(-1, num_layers, columns * fetched_QI.shape[1])
        tensor, me = self._groups.tensor, self._groups.place
        if tensor is None:
            return share_SEX
        return tensor.all_gather_rows("engram.fetch", share_SEX, self._shares[me.rank - me.tensor_rank :][: tensor.size])

    def join(self, no_row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:
        self.begin(no_row_ids_TEC, num_tokens)
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def held(self) -> list[Tensor]:
        return [self._shard_NI]


class HostTables:
    """Tables in host memory, in the dtype they are stored in."""

    def __init__(self, tables: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.stats = EngramStats()
        self._tables = list(tables)
        self._dtype, self._device = dtype, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engram")
        self._futures: list[Future[Tensor]] = []

    @component("engram.fetch")
    def begin(self, row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:  # noqa: ARG002 (the protocol's)
        ids_ETC = row_ids_TEC.transpose(0, 1).contiguous().cpu()
        self._futures = [self._thread.submit(self._gather, table, ids) for table, ids in zip(self._tables, ids_ETC, strict=True)]

    @component("engram.fetch")
    def rows(self, index: int) -> Tensor:
        future = self._futures[index]
        ready, begin_s = future.done(), time.perf_counter()
        rows_TX = future.result(_HOST_TIMEOUT_S)
        self.stats.count(ready, time.perf_counter() - begin_s)
        return rows_TX.to(self._device, non_blocking=True)

    def join(self, no_row_ids_TEC: Tensor, num_tokens: Sequence[int]) -> None:
        """Nothing: there is no exchange."""

    def _gather(self, table_NI: Tensor, ids_TC: Tensor) -> Tensor:
        rows_TX = table_NI.index_select(0, ids_TC.flatten()).to(self._dtype).view(ids_TC.shape[0], -1)
        return rows_TX.pin_memory() if self._device.type == "cuda" else rows_TX

    def held(self) -> list[Tensor]:
        return []
