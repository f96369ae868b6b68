"""What a simulation is told beside its workload and its cost model."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.core.errors import ConfigError
from engine.core.metrics import Slo
from engine.core.plan import RankPlan, StepPlan
from engine.core.policies import named_policy
from engine.core.scheduler_config import SchedulerConfig
from twin.routing import ROUTING_POLICIES

MetricsMode = Literal["exact", "flat"]
MAX_REPLICAS = 4096
MAX_GPUS = 1 << 20
MAX_SECONDS = 1e9


class TransferCost(msgspec.Struct, frozen=True):
    """Time of the block moves that the cache manager orders, where the cost model does not price them.

    ``block_bytes`` are one rank's bytes of a block; swaps cross to host memory, copies stay on the device. The ranks move at the same time,
    so the slowest one counts.
    """

    block_bytes: int
    host_bytes_per_s: float
    device_bytes_per_s: float | None = None  # None: copies on the device take no time of their own
    latency_s: float = 0.0  # of each direction that a rank uses in a step

    def validate(self) -> None:
        """Raise ConfigError naming the field, its value and what is allowed."""
        if self.block_bytes < 1:
            raise ConfigError(f"block_bytes is {self.block_bytes}; allowed: 1 or more")
        for name in ("host_bytes_per_s", "device_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; allowed: finite, more than 0")
        _seconds("latency_s", self.latency_s)

    def seconds(self, plan: StepPlan) -> float:
        """Of all moves in ``plan``; 0 without any."""
        return max(self._rank_seconds(rank) for rank in plan.ranks)

    def _rank_seconds(self, rank: RankPlan) -> float:
        if not (rank.swap_outs or rank.swap_ins or rank.copies):
            return 0.0
        seconds = 0.0
        for num_blocks in (sum(len(order.blocks) for order in rank.swap_outs), sum(len(order.blocks) for order in rank.swap_ins)):
            if num_blocks:
                seconds += self.latency_s + num_blocks * self.block_bytes / self.host_bytes_per_s
        if rank.copies and self.device_bytes_per_s is not None:
            seconds += self.latency_s + len(rank.copies) * self.block_bytes / self.device_bytes_per_s
        return seconds


class TwinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of equal replicas behind one gateway.

    scheduler         of each replica, as the engine's; its ``max_waiting`` bounds the door (429 above it and the slots), as there
    routing           which replica a request goes to; a key of ``routing.ROUTING_POLICIES``
    max_requests      requests running or waiting in one replica, where that is less than slots + max_waiting
    door_s            from a client's request to the scheduler's mailbox: connection, parsing, tokenising
    reply_s           from a committed token to the client
    acceptance        probability at each draft position of acceptance, given all before (see ``core.acceptance``)
    transfer          time of swaps and copies, added to the step; None: the cost model prices them
    gpus_per_replica  what ``gpu_s`` counts; ``usd_per_gpu_hour`` and ``watts_per_gpu`` make money and energy of it, None: unknown
    slo               limits of the requests that count as goodput
    fast_forward      stretches of plain decode in one event, with the same results; off: every step is made
    metrics           exact: percentiles of every value, up to a bound on their number; flat: histograms, memory independent of the requests
    """

    scheduler: SchedulerConfig
    num_replicas: int = 1
    routing: str = "round-robin"
    max_requests: int | None = None
    door_s: float = 0.0
    reply_s: float = 0.0
    acceptance: tuple[float, ...] = ()
    transfer: TransferCost | None = None
    gpus_per_replica: int = 1
    usd_per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    slo: Slo = Slo()
    seed: int = 0
    fast_forward: bool = True
    metrics: MetricsMode = "exact"

    @property
    def requests_per_replica(self) -> int:
        """Requests that one replica takes, running and waiting: the engine's own bound."""
        slots = self.scheduler.cache.max_running * self.scheduler.num_ranks
        bound = self.scheduler.max_waiting + slots
        return bound if self.max_requests is None else min(bound, self.max_requests)

    def validate(self) -> None:
        """Raise ConfigError naming the field, its value and what is allowed."""
        self.scheduler.validate()
        named_policy(ROUTING_POLICIES, self.routing, "routing")
        bounds = (("num_replicas", self.num_replicas, MAX_REPLICAS), ("gpus_per_replica", self.gpus_per_replica, MAX_GPUS))
        for name, value, high in bounds:
            if not 1 <= value <= high:
                raise ConfigError(f"{name} is {value}; allowed: 1 to {high}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"max_requests is {self.max_requests}; allowed: 1 or more")
        _seconds("door_s", self.door_s)
        _seconds("reply_s", self.reply_s)
        for name, number in (("usd_per_gpu_hour", self.usd_per_gpu_hour), ("watts_per_gpu", self.watts_per_gpu)):
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise ConfigError(f"{name} is {number}; allowed: finite, 0 or more")
        if len(self.acceptance) != self.scheduler.draft_tokens:
            raise ConfigError(
                f"acceptance has {len(self.acceptance)} positions; needed: one for each of {self.scheduler.draft_tokens} draft tokens"
            )
        for position, probability in enumerate(self.acceptance):
            if not 0.0 <= probability <= 1.0:
                raise ConfigError(f"acceptance at position {position} is {probability}; allowed: 0 to 1")
        if self.transfer is not None:
            self.transfer.validate()


def _seconds(name: str, value: float) -> None:
    if not 0.0 <= value <= MAX_SECONDS:
        raise ConfigError(f"{name} is {value}; allowed: 0 to {MAX_SECONDS:g} seconds")
