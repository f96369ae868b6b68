"""The process groups of a replica and their collectives, on torch.distributed (NCCL on GPUs, gloo on CPUs).

Every method of a Group is a collective: all its members call it, in the same order. Each one has a time limit, so that a rank whose
peer died or hangs ends with a CollectiveError that names the operation and the rank instead of waiting for ever.

On CPUs everything is built from all-to-all, which in gloo takes half the time of its other collectives at the sizes of a decode step
(about 0.2 ms against 0.4 ms for 4 KB between two processes on two cores); sums are taken in the order of ranks, on every rank alike.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore  # torch.distributed's own names are not typed

from engine.core.errors import CollectiveError, ConfigError
from engine.core.sharding import RankPlace
from engine.core.traffic import ONE_SHOT_BYTES

DEFAULT_TIMEOUT_S = 60.0
# How long a CPU rank asks again, leaving its core to others in between, before it sleeps. Falling asleep and being woken costs several
# times what a small exchange takes (two ranks on two busy cores: 0.2 ms for 1 KB instead of 0.7 to 1.1 ms).
_POLLED_S = 0.005
_R = TypeVar("_R")


class Traffic:
    """What this rank has sent to others since the last ``take``, by kind of collective (names of ``core.specs.COMPONENTS``)."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def add(self, kind: str, num_bytes: int) -> None:
        self._bytes[kind] = self._bytes.get(kind, 0) + num_bytes
        self._calls[kind] = self._calls.get(kind, 0) + 1

    def take(self) -> tuple[tuple[str, int, int], ...]:
        """(kind, bytes, calls), sorted by kind."""
        taken = tuple((kind, self._bytes[kind], self._calls[kind]) for kind in sorted(self._bytes))
        self._bytes, self._calls = {}, {}
        return taken


class Group:
    """Some of the replica's ranks. ``index`` is this rank's place among ``ranks``."""

    def __init__(self, ranks: Sequence[int], rank: int, handle: dist.ProcessGroup, traffic: Traffic, timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)
        self.size = len(self.ranks)
        self._handle = handle
        self._traffic = traffic
        self._timeout_s = timeout_s
        self.is_nccl = dist.get_backend(handle) == "nccl"

    def all_to_all(self, kind: str, send: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Tensor:
        """Rows of ``send``, ``send_rows[i]`` of them to member i in turn; returns ``receive_rows[i]`` rows from each, in turn."""
        return self.start_all_to_all(kind, send, send_rows, receive_rows).wait()

    def start_all_to_all(self, kind: str, send: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Pending:
        """The same without waiting. All members start and await their collectives in the same order."""
        received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        row_bytes = math.prod(send.shape[1:]) * send.element_size()
        self._traffic.add(kind, (sum(send_rows) - send_rows[self.index]) * row_bytes)
        splits = (list(receive_rows), list(send_rows))
        work = self.run(kind, lambda: dist.all_to_all_single(received, send, *splits, group=self._handle, async_op=True))
        return Pending(self, kind, work, received)

    def all_gather(self, kind: str, x: Tensor) -> Tensor:
        """Every member's ``x``, which has the same shape everywhere: [size, ...]."""
        rows = [1] * self.size
        return self.all_to_all(kind, x.unsqueeze(0).expand(self.size, *x.shape).contiguous(), rows, rows)

    def all_gather_rows(self, kind: str, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Every member's rows one after the other; member i has ``rows[i]``."""
        mine = rows[self.index]
        return self.all_to_all(kind, x.repeat(self.size, *[1] * (x.dim() - 1)), [mine] * self.size, rows)

    def all_reduce(self, kind: str, x: Tensor) -> Tensor:
        """The sum over all members, bit-equal on each of them; may overwrite ``x``."""
        if self.is_nccl:
            num_bytes = x.numel() * x.element_size()
            self._traffic.add(kind, 2 * num_bytes * (self.size - 1) // self.size)  # a ring's
            self.run(kind, lambda: dist.all_reduce(x, group=self._handle))
            return x
        if self.size == 2 or x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            return self.all_gather(kind, x).sum(0)
        # Each member sums one piece, then everybody gets all pieces.
        flat = x.reshape(-1)
        piece = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, piece * self.size - flat.numel())).view(self.size, piece)
        rows = [1] * self.size
        summed = self.all_to_all(kind, padded, rows, rows).sum(0)
        return self.all_gather(kind, summed).flatten()[: flat.numel()].view(x.shape)

    def barrier(self, kind: str) -> None:
        """Wait until all members are here."""
        self.run(kind, lambda: dist.barrier(group=self._handle))

    def run(self, kind: str, collective: Callable[[], _R]) -> _R:
        """What ``collective`` returns; its failure as a CollectiveError that says who waited for whom."""
        begin_s = time.monotonic()
        try:
            return collective()
        except RuntimeError as error:  # torch's own errors of this kind derive from it
            waited_s = time.monotonic() - begin_s
            cause = str(error).strip().splitlines()
            raise CollectiveError(
                f"rank {self.rank}: {kind} with ranks {_ranges(self.ranks)} failed after {waited_s:.1f} s (limit {self._timeout_s:g} s); "
                f"a peer has died, hangs or is too slow: {cause[0] if cause else type(error).__name__}"
            ) from error


class Pending:
    """A collective under way, whose result is ``received``."""

    def __init__(self, group: Group, kind: str, work: dist.Work, received: Tensor) -> None:
        self._group, self._kind, self._work, self._received = group, kind, work, received

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        if not self._group.is_nccl:
            end_s = time.monotonic() + _POLLED_S
            while not self._work.is_completed() and time.monotonic() < end_s:
                os.sched_yield()
        self._group.run(self._kind, self._work.wait)
        return self._received


class ParallelGroups:
    """All groups of one rank: ``world`` of the replica, ``tensor`` of the ranks that share its tokens (None where tp is 1)."""

    def __init__(self, place: RankPlace, *, rendezvous: str, device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Meet the other ranks at ``rendezvous``: a path that all of them see and none has used before, or ``tcp://host:port``, where a
        TCPStore listens. Raises CollectiveError where they do not all come within ``timeout_s``."""
        self.place = place
        self.traffic = Traffic()
        limit = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        begin_s = time.monotonic()
        try:
            store = _store(rendezvous, place, limit)
            dist.init_process_group(
                backend,
                store=store,
                rank=place.rank,
                world_size=place.num_ranks,
                timeout=limit,
                device_id=device if device.type == "cuda" else None,
            )
            world = dist.group.WORLD
            assert world is not None
            self.world = Group(range(place.num_ranks), place.rank, world, self.traffic, timeout_s)
            self.tensor = self._tensor_group(world, limit, timeout_s)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {place.rank} of {place.num_ranks} did not meet its peers at {rendezvous} within {timeout_s:g} s "
                f"(waited {time.monotonic() - begin_s:.1f} s): {str(error).strip().splitlines()[0]}"
            ) from error

    def _tensor_group(self, world: dist.ProcessGroup, limit: timedelta, timeout_s: float) -> Group | None:
        tp = self.place.layout.tp
        if tp == 1:
            return None
        if tp == self.place.num_ranks:
            return self.world
        mine: Group | None = None
        for data_rank in range(self.place.layout.dp):  # every rank makes every group, as torch wants it
            ranks = range(data_rank * tp, (data_rank + 1) * tp)
            handle = dist.new_group(list(ranks), timeout=limit)
            if data_rank == self.place.data_rank:
                mine = Group(ranks, self.place.rank, handle, self.traffic, timeout_s)
        assert mine is not None
        assert world is not None
        return mine

    def close(self) -> None:
        dist.destroy_process_group()


def _store(rendezvous: str, place: RankPlace, limit: timedelta) -> Store:
    if not rendezvous.startswith("tcp://"):
        return FileStore(rendezvous, place.num_ranks)
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"rendezvous is {rendezvous!r}; needed: a file's path or tcp://HOST:PORT")
    store = TCPStore(host.strip("[]"), int(port), None, is_master=False, timeout=limit, wait_for_workers=False)
    return PrefixStore("ranks", store)


def _ranges(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 2 else ", ".join(map(str, ranks))
