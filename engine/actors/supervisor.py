"""Supervision, written once: what starts in which order, what follows a failure, and how everything ends.

    open_engine
    |- signals          first SIGINT/SIGTERM: drain; second: stop at once
    |- workers          one generation after another
    |  |- heartbeat     one per worker process
    |  `- scheduler     plan, send, receive, commit
    `- the body         the command or server that opened the engine

Going down is always the same: no new requests, a bounded wait, then force. No task and no process outlives ``open_engine``.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Sequence

import msgspec
import trio

from engine.actors.cache import CacheManager
from engine.actors.config import EngineConfig
from engine.actors.gateway import Gateway
from engine.actors.leader import open_leader
from engine.actors.scheduler import Observer, SchedulerActor
from engine.actors.worker import WORKER_MODULE, LoadProgress
from engine.actors.worker_group import WorkerGroup, open_workers
from engine.core.errors import CapacityError, InvariantError, TwinferError, WorkerError
from engine.core.expert_balance import ExpertBalancer
from engine.core.scheduler import Scheduler
from engine.core.shadow import Shadow
from engine.core.step_cost import StepCost
from engine.tokenizer import Tokenizer

# After a failure or a drain, readers get this long to take the error or the last output before the body is cancelled.
READER_GRACE_S = 2.0

_log = logging.getLogger("twinfer.supervisor")


@contextlib.asynccontextmanager
async def open_engine(
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    *,
    handle_signals: bool = False,
    observers: Sequence[Observer] = (),
    worker_module: str = WORKER_MODULE,
    loading: LoadProgress | None = None,
    cost: StepCost | None = None,
) -> AsyncIterator[Gateway]:
    """Start an engine, give its gateway, stop it. Raises ConfigError or WorkerError bare, never inside a group.

    ``cost`` prices every plan beside its run, and steps for ``config.scheduler.tpot_slo_s``.
    After a stop signal (``handle_signals``) the body is cancelled once the requests are over and the context ends normally;
    ``gateway.exit_code`` is then the process's. A signal during the start raises KeyboardInterrupt or SystemExit.
    """
    config.validate()
    supervisor = _Supervisor(config, tokenizer, observers, worker_module, loading, cost)
    body_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            if handle_signals:
                await nursery.start(supervisor.watch_signals)
            await nursery.start(supervisor.run_workers)
            with supervisor.body_scope:
                try:
                    yield supervisor.gateway
                except GeneratorExit:
                    raise
                except BaseException as error:
                    if _is_cancellation(error):
                        raise
                    body_error = error
            await supervisor.stop()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if body_error is None:
            raise _single(group) from None
    if body_error is not None:
        raise body_error


class _Supervisor:
    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        observers: Sequence[Observer],
        worker_module: str,
        loading: LoadProgress | None,
        cost: StepCost | None,
    ) -> None:
        self._config = config
        self._worker_module = worker_module
        self._loading = loading
        self._cache = CacheManager(config.scheduler.cache)
        # The door is the gateway's: when all slots are free and a burst arrives, all of it waits for a moment.
        core_config = msgspec.structs.replace(config.scheduler, max_waiting=config.max_requests)
        self._scheduler = SchedulerActor(
            lambda: Scheduler(core_config, cost),
            self._cache,
            config.max_requests,
            observers,
            report_steps=config.report_steps,
            make_balancer=lambda: ExpertBalancer(config.expert_maps) if config.rebalance_experts else None,
            shadow=None if cost is None else Shadow(cost, corrects=config.corrects_predictions),
            timed_steps=config.timed_steps,
        )
        self.gateway = Gateway(config, self._scheduler, self._cache, tokenizer)
        self.body_scope = trio.CancelScope()
        self.started = False  # once all workers were ready
        self._restarts = config.supervision.on_worker_death == "restart"
        self._life = trio.CancelScope()  # all generations
        self._serving = trio.CancelScope()  # the current one's tasks; its workers are then stopped gracefully
        self._stopping = False
        self._workers: WorkerGroup | None = None
        self._workers_gone = trio.Event()

    # -- workers --------------------------------------------------------------------------------------------------------------

    async def run_workers(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """One generation of workers after another, as the policy on death has it; returns when the engine stops."""
        num_restarts = 0
        try:
            with self._life:
                while True:
                    error = await self._run_generation(task_status)
                    if error is None or self._stopping:
                        return
                    if self._scheduler.num_steps:
                        num_restarts = 0
                    if not self.started or not self._restarts or num_restarts >= self._config.supervision.max_restarts:
                        self.gateway.closed("failed", str(error))
                        await self._let_readers_go()
                        raise error
                    pause_s = self._config.supervision.restart_backoff_s * 2**num_restarts
                    num_restarts += 1
                    _log.warning("%s; restart %d in %.1f s", error, num_restarts, pause_s)
                    await trio.sleep(pause_s)
        finally:
            self._workers_gone.set()

    async def _run_generation(self, task_status: trio.TaskStatus[None]) -> WorkerError | None:
        """Start workers and serve with them: None when told to stop, the worker's error when one failed. Raises anything else."""
        self._scheduler.reset()
        try:
            config = self._config
            async with (
                open_leader(config) as others,
                open_workers(config.workers, config.supervision, self._worker_module, self._loading, others) as self._workers,
            ):
                await self._serve(self._workers, task_status)
        except (TwinferError, BaseExceptionGroup) as caught:
            error = caught if isinstance(caught, TwinferError) else _single(caught)
            if not isinstance(error, WorkerError):
                raise error from None
            return error
        finally:
            self._workers = None
            self.gateway.workers_gone()
        return None

    async def _serve(self, workers: WorkerGroup, task_status: trio.TaskStatus[None]) -> None:
        """On a failure every request ends with its reason before anything else happens, the workers' end included."""
        self._cache.reset(workers.infos[0].cache_bytes // self._config.scheduler.cache.num_blocks)
        self._serving = trio.CancelScope()
        if self._stopping:
            return
        try:
            with self._serving:
                async with trio.open_nursery() as nursery:
                    for worker in workers.workers:
                        nursery.start_soon(worker.run_heartbeat)
                    nursery.start_soon(self._scheduler.serve, workers)
                    self.gateway.opened(workers)
                    if not self.started:
                        self.started = True
                        task_status.started()
        except BaseException as caught:
            error = _single(caught) if isinstance(caught, BaseExceptionGroup) else caught
            if isinstance(error, WorkerError):
                error = await workers.blame(error)
            if _is_cancellation(error):
                self._scheduler.fail_all(CapacityError("the engine was stopped"))
                raise
            self._end_requests(error if isinstance(error, TwinferError) else InvariantError(f"the engine failed: {error!r}"))
            raise error from None
        self._scheduler.fail_all(CapacityError("the engine was stopped"))

    def _end_requests(self, error: TwinferError) -> None:
        if isinstance(error, WorkerError):
            self.gateway.closed("restarting" if self._restarts else "failed", str(error))
            self._scheduler.fail_all(error)
            return
        self.gateway.closed("failed", str(error))
        # The core may be what is broken: clients are told first, and a second complaint does not hide the first.
        with contextlib.suppress(InvariantError):
            self._scheduler.fail_all(error)

    async def _let_readers_go(self) -> None:
        with trio.move_on_after(READER_GRACE_S):
            await self.gateway.wait_streams_released()

    # -- stopping -------------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End the current generation and wait for its processes; bounded, because stopping a worker is."""
        if self.gateway.health.state != "failed":
            self.gateway.closed("stopped", "the engine has stopped")
        self._cancel_generation()
        await self._workers_gone.wait()

    def _cancel_generation(self) -> None:
        self._stopping = True
        self._serving.cancel()
        if self._workers is None:  # between two generations, or loading: there is nothing to be graceful about
            self._life.cancel()

    async def watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """First signal: drain. Second signal, or a first one before the engine is up: stop at once."""
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                task_status.started()
                async for number in signals:
                    if not self.started:
                        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
                    if self.gateway.stop_signal is None:
                        self.gateway.stop_signal = number
                        _log.info("%s: draining; once more stops at once", signal.Signals(number).name)
                        nursery.start_soon(self._drain)
                    else:
                        self._force()

    async def _drain(self) -> None:
        timeout_s = self._config.supervision.shutdown_timeout_s
        self.gateway.closed("draining", "the engine is shutting down")
        with trio.move_on_after(timeout_s):
            while self._scheduler.num_requests:
                await trio.sleep(0.01)
        if self._scheduler.num_requests:
            self.gateway.forced = True
            self._scheduler.abort_all(CapacityError(f"the engine shut down before the request was finished ({timeout_s:g} s)"))
        self.gateway.drained()
        await trio.sleep(READER_GRACE_S)
        self.body_scope.cancel()

    def _force(self) -> None:
        self.gateway.forced = True
        self._scheduler.abort_all(CapacityError("the engine was stopped"))
        self.gateway.drained()
        self.body_scope.cancel()
        self._cancel_generation()
        if self._workers is not None:
            self._workers.kill()


def _is_cancellation(error: BaseException) -> bool:
    """Whether a trio cancellation is in it, which must go on to its scope."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, trio.Cancelled)


def _single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that a group of tasks ended with: a group's shape says which tasks there were, not what went wrong.

    A worker's failure is the cause of the others where it is among several; the others are kept as notes.
    """
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = [*error.exceptions, *pending]
        elif error not in leaves:
            leaves.append(error)
    if any(isinstance(leaf, trio.Cancelled) for leaf in leaves):
        return group
    ranked = sorted(leaves, key=lambda leaf: (not isinstance(leaf, (KeyboardInterrupt, SystemExit)), not isinstance(leaf, WorkerError)))
    for other in ranked[1:]:
        ranked[0].add_note(f"also: {other!r}")
    return ranked[0]
