"""A node that follows node 0: launches and watches its own ranks, and passes on what goes to them and comes from them."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, assert_never

import msgspec
import trio

from engine.actors.config import EngineConfig
from engine.actors.link import NodeLink, NodeLostError, open_link
from engine.actors.messages import Beat, Commands, Failed, Goodbye, NodeCommand, NodeFailed, NodeReply, Ready, Reply, Start, WorkerCommand
from engine.actors.worker import WORKER_MODULE, Worker
from engine.actors.worker_group import WorkerGroup
from engine.core.errors import ConfigError, StoppedError, TwinferError, WorkerError

# After a failure here: until node 0 has said what it thinks was the cause.
_VERDICT_TIMEOUT_S = 3.0
# After an orderly end: until node 0 has closed its side. A run that follows at once must not find it there.
_PARTING_TIMEOUT_S = 15.0

_log = logging.getLogger("twinfer.nodes")


async def follow(config: EngineConfig, *, worker_module: str = WORKER_MODULE) -> None:
    """Run this node's ranks until node 0 ends; returns where it did so in an orderly way.

    Raises ConfigError where the nodes cannot go together, StoppedError after SIGINT or SIGTERM, WorkerError where anything fails.
    """
    config.validate()
    failure: TwinferError | None = None
    stopped_by: signal.Signals | None = None

    async def watch_signals(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        nonlocal stopped_by
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                stopped_by = stopped_by or signal.Signals(number)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals)
        try:
            await _follow(config, worker_module)
        except TwinferError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if stopped_by is not None:
        raise StoppedError(128 + stopped_by)
    if failure is not None:
        raise failure


async def _follow(config: EngineConfig, worker_module: str) -> None:
    nodes = config.nodes
    assert nodes is not None
    assert nodes.node > 0
    _log.info("node %d of %d: waits for node 0 at %s, port %d", nodes.node, nodes.num_nodes, nodes.host, nodes.port)
    async with open_link(nodes, NodeCommand, config.supervision.start_timeout_s) as link:
        follower = _Follower(config, link)
        orderly = False
        try:
            follower.spawn(worker_module)
            await follower.run()
            orderly = True
        finally:
            await follower.stop_workers(graceful=orderly)
        with trio.move_on_after(_PARTING_TIMEOUT_S), contextlib.suppress(NodeLostError, WorkerError):
            while True:
                await link.receive()
    _log.info("node %d: node 0 has ended", nodes.node)


class _Follower:
    def __init__(self, config: EngineConfig, link: NodeLink[NodeReply, NodeCommand]) -> None:
        assert config.nodes is not None
        self._nodes = config.nodes
        self._configs = [worker for worker in config.workers if config.nodes.node_of(worker.rank, len(config.workers)) == config.nodes.node]
        self._supervision = config.supervision
        self._link = link
        self._workers: dict[int, Worker] = {}
        self._decoder: msgspec.msgpack.Decoder[WorkerCommand] = msgspec.msgpack.Decoder(WorkerCommand)
        self._missed_beats = 0
        self._goodbye: Goodbye | None = None
        self._failure: TwinferError | None = None

    def spawn(self, module: str) -> None:
        for config in self._configs:
            config = msgspec.structs.replace(config, rendezvous=self._nodes.rendezvous, interface=self._link.interface)
            self._workers[config.rank] = Worker(config, self._supervision, module)
        _log.info("node %d: runs %s", self._nodes.node, ", ".join(worker.name for worker in self._workers.values()))

    async def run(self) -> None:
        """Until node 0 says goodbye. Raises TwinferError where it has a reason for that, or where something fails here."""
        try:
            async with trio.open_nursery() as nursery:
                for task in self._tasks():
                    nursery.start_soon(self._until_failure, task, nursery.cancel_scope)
        finally:
            if self._failure is None and self._goodbye is None:  # cancelled
                self._link.post(0, NodeFailed(None, "internal", "was stopped by its operator"))
                await self._await_goodbye()
        if self._goodbye is None:
            assert self._failure is not None
            await self._explain(self._failure)
        if self._goodbye is not None:
            self._link.post(0, Goodbye())
        if self._failure is not None:
            raise self._failure
        if self._goodbye is not None and self._goodbye.reason is not None:
            raise WorkerError("node-0", f"ended: {self._goodbye.reason}")

    async def stop_workers(self, *, graceful: bool) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for worker in self._workers.values():
                    nursery.start_soon(partial(worker.stop, graceful=graceful))

    def _tasks(self) -> list[Callable[[], Awaitable[Any]]]:
        tasks: list[Callable[[], Awaitable[Any]]] = [self._receive, self._link.run_writer, self._watch_node_0]
        for worker in self._workers.values():
            tasks += [partial(self._forward, worker), worker.run_writer, worker.run_heartbeat]
        return tasks

    async def _until_failure(self, task: Callable[[], Awaitable[Any]], scope: trio.CancelScope) -> None:
        """Run a part of ``run``; its failure, or the goodbye that ``_receive`` returns with, ends all of them."""
        try:
            await task()
        except NodeLostError as lost:
            self._failure = self._failure or WorkerError("node-0", str(lost))
        except TwinferError as error:
            self._failure = self._failure or error
        if self._failure is not None or self._goodbye is not None:
            scope.cancel()

    async def _receive(self) -> None:
        while self._goodbye is None:
            _, message = await self._link.receive()
            self._missed_beats = 0
            match message:
                case Commands(entries=entries):
                    for rank, data in entries:
                        self._command(rank, data)
                case Beat():
                    self._link.post(0, message)
                case Goodbye():
                    self._goodbye = message
                case _:
                    assert_never(message)

    def _command(self, rank: int, data: bytes) -> None:
        worker = self._workers.get(rank)
        try:
            command = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise WorkerError("node-0", f"sent garbage: {error}") from None
        if worker is None:
            raise WorkerError("node-0", f"sent a command for rank {rank}, which is not here")
        worker.post(Start(worker.config) if isinstance(command, Start) else command)

    async def _forward(self, worker: Worker) -> None:
        while True:
            reply = await worker.receive()
            assert not isinstance(reply, Failed)
            if isinstance(reply, Ready):
                _log.info("node %d: %s is ready, after %.1f s", self._nodes.node, worker.name, reply.load_s)
            self._link.post(0, Reply(worker.config.rank, reply))

    async def _watch_node_0(self) -> None:
        """Missed beats are counted, not the clock read: a suspended machine has missed one, however long it slept."""
        while self._missed_beats * self._supervision.heartbeat_interval_s < self._supervision.heartbeat_timeout_s:
            self._missed_beats += 1
            await trio.sleep(self._supervision.heartbeat_interval_s)
        raise WorkerError("node-0", f"gave no sign of life for heartbeat_timeout_s = {self._supervision.heartbeat_timeout_s:g}")

    async def _await_goodbye(self) -> None:
        """For a moment, when ``_receive`` has ended. Node 0 has then heard what was posted: the end of a connection may drop it."""
        with trio.CancelScope(shield=True), contextlib.suppress(NodeLostError, WorkerError), trio.move_on_after(_VERDICT_TIMEOUT_S):
            while self._goodbye is None:
                _, message = await self._link.receive()
                self._goodbye = message if isinstance(message, Goodbye) else None

    async def _explain(self, failure: TwinferError) -> None:
        """Tell node 0 what failed here, and hear whether that was only the consequence of something else."""
        if isinstance(failure, WorkerError) and failure.worker == "node-0":
            return
        workers = list(self._workers.values())
        failure = self._failure = await WorkerGroup(workers, ()).blame(failure)
        name = failure.worker if isinstance(failure, WorkerError) else None
        fault: Literal["config", "internal", "peer"] = "config" if isinstance(failure, ConfigError) else "internal"
        if any(worker.let_down for worker in workers if worker.name == name):
            fault = "peer"
        text = str(failure).removeprefix(f"{name}: ")
        self._link.post(0, NodeFailed(name, fault, text))
        await self._await_goodbye()
        if self._goodbye is not None and self._goodbye.reason is not None and text not in self._goodbye.reason:
            _log.error("node %d: node 0 says: %s", self._nodes.node, self._goodbye.reason)
