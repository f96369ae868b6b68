"""The workers of one replica together: loaded, driven in lock-step, blamed for what one of them does to the others, stopped."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import trio

from engine.actors.config import SupervisionConfig, WorkerConfig
from engine.actors.messages import Execute, Executed, Ready, WorkerCommand
from engine.actors.network import LOOPBACK, interface_of
from engine.actors.worker import WORKER_MODULE, LoadProgress, RankWorker, Worker
from engine.core.errors import InvariantError, TwinferError, WorkerError
from engine.core.plan import RankResult, StepPlan, StepResult, step_peers
from engine.core.rank_counters import RankCounters, added

# When a collective fails on one rank: until its peers have failed in it too, or said what happened to them.
_BLAME_TIMEOUT_S = 0.5


class WorkerGroup:
    """The workers of one replica, in lock-step: each gets its rank's part of a plan, an idle rank an empty one."""

    def __init__(self, workers: Sequence[RankWorker], infos: Sequence[Ready]) -> None:
        self.workers = tuple(workers)
        self.near = [worker for worker in workers if isinstance(worker, Worker)]  # in this node
        self._far = [worker for worker in workers if not isinstance(worker, Worker)]
        self.infos = tuple(infos)
        self.graceful = True  # how they are stopped at the end of ``open_workers``

    def kill(self) -> None:
        """Stop all of them now."""
        self.graceful = False
        for worker in self.workers:
            worker.kill()

    async def blame(self, error: TwinferError) -> TwinferError:
        """The root of a failure: a worker that dies, fails or hangs makes its peers fail too, and they may be heard first.

        For a group that nobody reads from any more. Takes a moment where ``error`` is such a consequence, else none.
        """
        heard = [worker for worker in self.workers if isinstance(error, WorkerError) and worker.name == error.worker]
        others = [worker for worker in self.workers if heard and worker is not heard[0]]
        for worker in others:
            if (killed := worker.killed_by_others()) is not None:
                return killed
        if not heard or not heard[0].let_down:
            return error
        silent = dict.fromkeys(others)
        roots: list[TwinferError] = []

        async def listen(worker: RankWorker) -> None:
            found = await worker.wait_failed()
            del silent[worker]
            if not worker.let_down:
                roots.append(found)
                scope.cancel()

        with trio.move_on_after(_BLAME_TIMEOUT_S, shield=True) as scope:
            async with trio.open_nursery() as nursery:
                for worker in others:
                    nursery.start_soon(listen, worker)
        if roots:
            return roots[0]
        return next((worker.hanging(error) for worker in silent), error)

    def queue(self, data_rank: int, command: WorkerCommand) -> None:
        for worker in self.workers:
            if worker.config.data_rank == data_rank:
                worker.queue(command)

    def queue_all(self, command: WorkerCommand) -> None:
        for worker in self.workers:
            worker.queue(command)

    async def send_all(self, command: WorkerCommand) -> None:
        await self._send(lambda _: command)

    async def send_plan(self, plan: StepPlan, *, report_counters: bool = False, time_components: bool = False) -> None:
        peers = step_peers(plan) if len(self.workers) > 1 else None
        await self._send(lambda worker: Execute(plan.step, plan.ranks[worker.config.data_rank], peers, report_counters, time_components))

    async def _send(self, command_for: Callable[[RankWorker], WorkerCommand]) -> None:
        """The longer way first; what goes to one node goes together."""
        for worker in self._far:
            worker.queue(command_for(worker))
        for worker in self._far:
            await worker.flush()
        for near in self.near:
            await near.send(command_for(near))

    async def receive_result(self, plan: StepPlan) -> StepResult:
        """Every worker's result of ``plan``. The slowest one makes the step, so the order of asking costs nothing."""
        results: list[RankResult | None] = [None] * len(plan.ranks)
        slowest: Executed | None = None
        counters: list[RankCounters] = []
        for worker in self.workers:
            executed = await worker.receive_executed(plan.step)
            if slowest is None or executed.forward_s > slowest.forward_s:
                slowest = executed
            if executed.counters is not None:
                counters.append(executed.counters)
            if worker.config.tensor_rank == 0:
                results[worker.config.data_rank] = executed.result
        if slowest is None or any(result is None for result in results):
            raise InvariantError(f"step {plan.step}: a rank without a worker; ranks of the workers do not cover the plan")
        ranks = tuple(result for result in results if result is not None)
        return StepResult(plan.step, ranks, slowest.forward_s, slowest.components, added(counters) if counters else None)


class OtherNodes(Protocol):
    """The ranks that are not in this node, and where all of them meet (``leader.Leader``)."""

    @property
    def workers(self) -> Mapping[int, RankWorker]: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def interface(self) -> str | None: ...

    reason: str | None  # why the replica ended; None for an orderly end


@contextlib.asynccontextmanager
async def open_workers(
    configs: Sequence[WorkerConfig],
    supervision: SupervisionConfig,
    module: str = WORKER_MODULE,
    loading: LoadProgress | None = None,
    others: OtherNodes | None = None,
) -> AsyncIterator[WorkerGroup]:
    """Spawn and load all workers together (their collectives need all of them), and stop every one of them on the way out."""
    workers: list[RankWorker] = []
    graceful = False
    meeting = tempfile.TemporaryDirectory(prefix="twinfer-") if len(configs) > 1 and others is None else None
    try:
        for config in configs:
            if others is not None and config.rank in others.workers:
                workers.append(others.workers[config.rank])
                continue
            if others is not None:
                config = msgspec.structs.replace(config, rendezvous=others.rendezvous, interface=others.interface)
            elif meeting is not None:
                # A file of its own for each generation: what the last one left in it would confuse the next. And no port that others reach.
                path = str(Path(meeting.name, "rendezvous"))
                config = msgspec.structs.replace(config, rendezvous=path, interface=interface_of(LOOPBACK))
            workers.append(Worker(config, supervision, module))
        infos: dict[str, Ready] = {}
        failures: list[TwinferError] = []

        async def start(worker: RankWorker) -> None:
            try:
                infos[worker.name] = await worker.start(loading)
            except TwinferError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()  # without this one the others wait for nothing

        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(start, worker)
        group = WorkerGroup(workers, [infos[worker.name] for worker in workers if worker.name in infos])
        if failures:
            raise await group.blame(failures[0])
        yield group
        graceful = group.graceful
        if others is not None and graceful:
            others.reason = None
    except TwinferError as error:
        if others is not None:
            others.reason = str(error)
        raise
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for worker in workers:
                    nursery.start_soon(partial(worker.stop, graceful=graceful))
        if meeting is not None:
            meeting.cleanup()
