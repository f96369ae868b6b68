"""What the actors are started with. Plain data: the command line and the tests fill it."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.expert_map import ExpertMap
from engine.core.scheduler_config import SchedulerConfig


class RecordConfig(msgspec.Struct, frozen=True):
    """What a worker records once it is told to (``messages.Record``), and where. ``environment`` is written beside it as it is."""

    folder: str
    mode: Literal["profile", "timers"] = "profile"
    max_steps: int | None = None  # None: the mode's own bound
    environment: dict[str, Any] = {}


class WorkerConfig(msgspec.Struct, frozen=True):
    """What one worker process loads; it travels in the Start message.

    ``rank`` counts the processes of the replica, ``data_rank`` the RankPlan of a StepPlan that this process executes. The
    members of one tensor-parallel group share a ``data_rank``; only the one with ``tensor_rank`` 0 reports tokens. ``rendezvous`` is
    where they meet, None for a replica of one process; a path is made anew for each generation of workers.
    """

    name: str
    model: str
    cache: CacheConfig
    dtype: str = "bfloat16"
    device: str = "cpu"
    layout: str = "tp1dp1ep1"
    rank: int = 0
    num_ranks: int = 1
    data_rank: int = 0
    tensor_rank: int = 0
    rendezvous: str | None = None
    collective_timeout_s: float = 60.0
    cpu_cores: tuple[int, ...] = ()  # those this process may run on; empty: all
    interface: str | None = None  # the network interface its collectives use; None leaves the choice to torch
    load_format: Literal["auto", "random"] = "auto"
    random_seed: int = 0
    num_threads: int | None = None
    cache_rounding: bool = True
    engram: Literal["gpu", "replicated", "host"] = "gpu"
    redundant_experts: int = 0
    draft_redundant_experts: int = 0
    forced_acceptance: float | None = None  # mean drafts accepted per verification, for measurements; None: the model decides
    forced_routing: Literal["model", "balanced", "imbalanced"] = "model"  # other than "model" for measurements
    time_components: bool = False  # seconds per component with each result; slows the steps a little
    record: RecordConfig | None = None  # None: nothing is ever written


class SupervisionConfig(msgspec.Struct, frozen=True):
    """Bounds on waiting: nothing in the engine waits for ever on a worker.

    A worker that answers no ping for ``heartbeat_timeout_s`` is dead; one whose process is seen stopped, after two pings. A
    forward of any length answers pings; ``step_timeout_s`` is what bounds it.
    """

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 10.0
    step_timeout_s: float = 600.0
    start_timeout_s: float = 900.0
    shutdown_timeout_s: float = 30.0  # for running requests, after the first stop signal
    worker_exit_timeout_s: float = 5.0  # between Shutdown and SIGKILL
    on_worker_death: Literal["exit", "restart"] = "exit"
    max_restarts: int = 3  # without a completed step between them
    restart_backoff_s: float = 1.0  # doubled for each restart without a completed step

    def validate(self) -> None:
        """Raise ConfigError naming the first field out of range."""
        for name in ("heartbeat_interval_s", "heartbeat_timeout_s", "step_timeout_s", "start_timeout_s", "worker_exit_timeout_s"):
            _positive(name, getattr(self, name))
        for name in ("shutdown_timeout_s", "restart_backoff_s"):
            _not_negative(name, getattr(self, name))
        if self.heartbeat_timeout_s < self.heartbeat_interval_s:
            least_s = self.heartbeat_interval_s
            raise ConfigError(f"heartbeat_timeout_s is {self.heartbeat_timeout_s:g}; allowed: at least heartbeat_interval_s = {least_s:g}")
        if not 0 <= self.max_restarts <= 1000:
            raise ConfigError(f"max_restarts is {self.max_restarts}; allowed: 0 to 1000")


class NodesConfig(msgspec.Struct, frozen=True):
    """One replica over several machines. Node k holds the ranks [k * n, (k + 1) * n) of ``num_nodes * n``; node 0 also serves.

    ``host`` and ``port`` are node 0's, where all meet. ``facts`` (name, value) must be equal on all nodes.
    """

    num_nodes: int
    node: int
    host: str
    port: int
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def rendezvous(self) -> str:
        """Where the ranks meet: beside the nodes."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def node_of(self, rank: int, num_ranks: int) -> int:
        return rank * self.num_nodes // num_ranks

    def validate(self, num_ranks: int) -> None:
        """Raise ConfigError where ``num_ranks`` ranks cannot be spread so."""
        if not 2 <= self.num_nodes <= num_ranks or num_ranks % self.num_nodes:
            raise ConfigError(f"num_nodes is {self.num_nodes}; needed: a divisor of the layout's {num_ranks} ranks, at least 2")
        if not 0 <= self.node < self.num_nodes:
            raise ConfigError(f"node is {self.node}; allowed: 0 to {self.num_nodes - 1}")
        if not self.host or not 0 < self.port < 65536:
            raise ConfigError(f"node 0 is at {self.host!r}, port {self.port}; needed: a host and a port from 1 to 65535")


class GatewayConfig(msgspec.Struct, frozen=True):
    """Bounds at the door. Each exists so that no client can make the engine hold or compute without limit."""

    # Running and waiting requests together, where that is less than the scheduler's slots and max_waiting. What is kept of a waiting
    # request is its prompt; the next request is refused with CapacityError.
    max_requests: int = 1 << 16
    # Outputs a reader may lag behind before it is dropped: minutes of decoding, a few MB at most per request.
    max_buffered_outputs: int = 4096
    # Samples per request: they share the prompt's blocks, but each takes a slot.
    max_samples: int = 128
    max_stop_strings: int = 16
    # Bounds the text held back while a stop string may still be under way.
    max_stop_chars: int = 1024
    # Longer than any context in text; refused before the tokenizer sees it.
    max_prompt_chars: int = 16 << 20
    # With forced acceptance the tokens are not the model's choice and cannot keep to a grammar: such requests are refused.
    allows_grammars: bool = True
    # None draws seeds from the operating system; a number makes the seeds of requests that bring none reproducible.
    seed: int | None = None

    def validate(self) -> None:
        """Raise ConfigError naming the first field out of range."""
        for name in ("max_requests", "max_buffered_outputs", "max_samples", "max_stop_strings", "max_stop_chars", "max_prompt_chars"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 30:
                raise ConfigError(f"{name} is {value}; allowed: 1 to {1 << 30}")


class EngineConfig(msgspec.Struct, frozen=True):
    """One replica: its workers, the core's options, the bounds on waiting and at the door."""

    workers: tuple[WorkerConfig, ...]
    scheduler: SchedulerConfig
    supervision: SupervisionConfig = SupervisionConfig()
    gateway: GatewayConfig = GatewayConfig()
    nodes: NodesConfig | None = None  # None: this machine alone
    expert_maps: tuple[ExpertMap, ...] = ()  # the placements that the ranks start with, one a layer; empty where experts are not spread
    report_steps: int = 0  # steps between the workers' reports of what they have counted (experts, messages, Engram waits); 0: none
    rebalance_experts: bool = False  # move experts where a report shows that it pays
    timed_steps: int = 64  # with a cost model: steps between those whose components are timed and compared; 0: none
    corrects_predictions: bool = False  # by what the last steps took beside them

    @property
    def is_follower(self) -> bool:
        """Whether this machine runs its ranks for another one, which serves."""
        return self.nodes is not None and self.nodes.node > 0

    @property
    def max_requests(self) -> int:
        """Samples that may be in the engine: those that fill every slot, and max_waiting beside them."""
        slots = self.scheduler.cache.max_running * self.scheduler.num_ranks
        return min(self.gateway.max_requests, self.scheduler.max_waiting + slots)

    def validate(self) -> None:
        """Raise ConfigError for values out of range and for workers that do not cover the scheduler's ranks."""
        self.scheduler.validate()
        self.supervision.validate()
        self.gateway.validate()
        if self.nodes is not None:
            self.nodes.validate(len(self.workers))
            if self.supervision.on_worker_death == "restart":
                raise ConfigError("on_worker_death is 'restart'; a replica over several nodes cannot be restarted in parts: use 'exit'")
        names = [worker.name for worker in self.workers]
        if len(set(names)) != len(names):
            raise ConfigError(f"two workers have the same name: {', '.join(names)}")
        reporting = sorted(worker.data_rank for worker in self.workers if worker.tensor_rank == 0)
        if reporting != list(range(self.scheduler.num_ranks)):
            raise ConfigError(f"workers serve the data ranks {reporting}; the scheduler has {self.scheduler.num_ranks}")
        for worker in self.workers:
            if worker.cache != self.scheduler.cache:
                raise ConfigError(f"{worker.name}: its cache differs from the scheduler's")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; allowed: more than 0 seconds, finite")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value}; allowed: 0 seconds or more, finite")
