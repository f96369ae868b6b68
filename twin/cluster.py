"""A cluster on the simulated clock: clients, the gateway before the replicas, and the answer when all is over."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from engine.core.errors import ConfigError, InvariantError
from engine.core.request import Request
from engine.core.step_cost import StepCost
from twin.clock import Clock, Process, Turn
from twin.config import TransferCost, TwinConfig
from twin.fold import MetricsFold
from twin.outcomes import DrawnOutcomes, sampling_params
from twin.replica import Call, Listener, Observer, Replica, StepTotals
from twin.result import Goodput, SimResult
from twin.routing import Router
from twin.workload.types import SimRequest, Workload

__all__ = ["Cluster", "TransferCost", "TwinConfig", "simulate"]


COLLECTION_THRESHOLD = 200_000  # objects made and not dropped


def simulate(
    config: TwinConfig, workload: Workload, cost: StepCost, *, observers: Sequence[Observer] = (), listeners: Sequence[Listener] = ()
) -> SimResult:
    """Run ``workload`` to its end. ``cost`` prices the steps of each replica; with observers every step is made.

    Raises ConfigError for a configuration or a request that cannot be, DomainError for a time that cannot be, InvariantError where a
    conservation law does not hold at the end.
    """
    config.validate()
    begin_s = time.perf_counter()
    cluster = Cluster(config, workload, cost, observers, listeners)
    cluster.run()
    return cluster.result(time.perf_counter() - begin_s)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A simulation makes and drops objects fast, none of them in cycles: looking for these as often as usual takes a good part of it."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECTION_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Cluster:
    """Clients, gateway and replicas of one simulation."""

    def __init__(
        self, config: TwinConfig, workload: Workload, cost: StepCost, observers: Sequence[Observer] = (), listeners: Sequence[Listener] = ()
    ) -> None:
        self.config = config
        self.clock = Clock()
        self.num_arrived = self.num_finished = self.num_rejected = self.num_cancelled = 0
        self._workload = workload
        self._open: dict[int, Call] = {}
        self._router = Router(config.routing, config.num_replicas)
        self.fold = MetricsFold(config.slo, config.door_s + config.reply_s, config.metrics)
        self._totals = [StepTotals() for _ in range(config.num_replicas)]
        # As in the engine the door is the gateway's: when all slots are free and a burst arrives, all of it waits for a moment.
        core_config = msgspec.structs.replace(config.scheduler, max_waiting=config.requests_per_replica)
        self.replicas = [
            Replica(
                index,
                core_config,
                self.clock,
                cost,
                DrawnOutcomes(config.acceptance, config.seed, index),
                self.fold,
                self._totals[index],
                self._ended,
                transfer=config.transfer,
                observers=observers,
                listeners=listeners,
                fast_forward=config.fast_forward,
                keeps_cache=config.routing == "prefix-aware",
            )
            for index in range(config.num_replicas)
        ]

    def run(self) -> None:
        """To the end of the workload; the conservation laws are checked there."""
        for replica in self.replicas:
            self.clock.process(replica.run())
        self.clock.process(self._arrivals())
        with _rare_collections():
            self.clock.run()
        if self._open:
            raise InvariantError(f"the simulation is over and {len(self._open)} requests have not ended")
        ends = self.num_finished + self.num_rejected + self.num_cancelled
        if ends != self.num_arrived:
            raise InvariantError(f"{self.num_arrived} requests arrived and {ends} ended")
        for replica in self.replicas:
            replica.core.check()
            if replica.core.has_work or replica.num_calls:
                raise InvariantError(f"replica {replica.index} still has work at the end")

    # -- clients ---------------------------------------------------------------------------------------------------------------

    def _arrivals(self) -> Process:
        for request in self._workload.arrivals():
            if request.arrival_s != self.clock.now_s:
                yield self.clock.at(request.arrival_s, Turn.ARRIVAL, f"arrival of request {request.index}")
            self._arrive(request)

    def _arrive(self, request: SimRequest) -> None:
        index = request.index
        if index in self._open:
            raise ConfigError(f"the workload has two requests with the index {index} at a time; needed: one each")
        if request.output_tokens < 1:
            raise ConfigError(f"request {index} has {request.output_tokens} output tokens; allowed: 1 or more")
        self.num_arrived += 1
        call = self._open[index] = Call(request)
        if request.cancel_after_s is not None:
            # By index, so that a request that has long ended is not kept for it.
            self.clock.call_at(self.clock.now_s + request.cancel_after_s, partial(self._leave, index), f"cancellation of request {index}")
        if self.config.door_s:
            self.clock.call_at(self.clock.now_s + self.config.door_s, partial(self._enter, call), f"door of request {index}")
        else:
            self._enter(call)

    def _leave(self, index: int) -> None:
        call = self._open.pop(index, None)
        if call is None:
            return
        call.left = True
        self.num_cancelled += 1
        if call.replica is not None:
            call.replica.leave(call)
        self._follow_up(call.request, self.clock.now_s)

    def _follow_up(self, request: SimRequest, end_s: float) -> None:
        following = self._workload.follow_up(request, end_s)
        if following is not None:
            self.clock.call_at(following.arrival_s, partial(self._arrive, following), f"arrival of request {following.index}")

    # -- the gateway -----------------------------------------------------------------------------------------------------------

    def _enter(self, call: Call) -> None:
        """Through the door: checked and tokenised. Refused where the replica it is for takes no more."""
        if call.left:
            return
        sim = call.request
        request = Request(sim.index, sim.prompt, sampling_params(sim), priority=sim.priority, cache_salt=sim.cache_salt)
        replica = self.replicas[self._router.choose(self.replicas, request)]
        if replica.num_calls >= self.config.requests_per_replica:
            self._ended(call, True)
        else:
            replica.submit(call, request)

    def _ended(self, call: Call, is_rejected: bool) -> None:
        """The engine is done with it; its client hears of it ``reply_s`` later."""
        if call.left:
            return
        del self._open[call.request.index]
        if is_rejected:
            self.num_rejected += 1
        else:
            self.num_finished += 1
        self._follow_up(call.request, self.clock.now_s + self.config.reply_s)

    # -- the answer ------------------------------------------------------------------------------------------------------------

    def result(self, wall_s: float) -> SimResult:
        """What came of it; ``wall_s`` is how long it took to simulate."""
        config, fold, totals = self.config, self.fold, StepTotals()
        for each in self._totals:
            totals.include(each)
        sim_s = fold.duration_s
        gpu_s = sim_s * config.num_replicas * config.gpus_per_replica
        usd, watts = config.usd_per_gpu_hour, config.watts_per_gpu
        return SimResult(
            requests=self.num_arrived,
            finished=self.num_finished,
            rejected=self.num_rejected,
            cancelled=self.num_cancelled,
            sim_s=sim_s,
            wall_s=wall_s,
            ttft_s=fold.ttft_s.distribution(),
            tpot_s=fold.tpot_s.distribution(),
            itl_s=fold.itl_s.distribution(),
            e2e_s=fold.e2e_s.distribution(),
            exact=fold.is_exact,
            output_tokens=fold.num_output_tokens,
            output_tokens_per_s=fold.num_output_tokens / sim_s if sim_s else None,
            goodput=Goodput(
                per_s=fold.num_good / sim_s if sim_s else None,
                share=fold.num_good / self.num_arrived if self.num_arrived else None,
                slo=config.slo,
            ),
            prefix_hit_rate=fold.prefix_hit_tokens / fold.prefix_query_tokens if fold.prefix_query_tokens else None,
            kv_peak=totals.kv_peak(config.scheduler.cache.num_blocks),
            preemptions=fold.num_preemptions,
            acceptance_length=fold.drafts.acceptance_length,
            steps=fold.num_steps,
            step_time=totals.step_time(),
            gpu_s=gpu_s,
            usd=None if usd is None else gpu_s / 3600.0 * usd,
            joules=None if watts is None else gpu_s * watts,
        )
