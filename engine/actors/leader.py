"""Node 0's view of the other nodes: their ranks as workers like its own, and a beat that says who is still there."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn, assert_never

import msgspec
import trio

from engine.actors.config import EngineConfig, SupervisionConfig, WorkerConfig
from engine.actors.ipc import MAX_FRAME_BYTES
from engine.actors.link import NodeLink, NodeLostError, open_link
from engine.actors.messages import Beat, Commands, Goodbye, NodeCommand, NodeFailed, NodeReply, Reply, WorkerCommand, WorkerReply
from engine.actors.worker import RankWorker
from engine.core.errors import ConfigError, TwinferError, WorkerError

# Commands of one node travel together, up to this much: beyond it they are large enough to go apart.
_BATCH_BYTES = 1 << 20
# How long a node may take to answer a Goodbye. It does so before it stops its workers.
_GOODBYE_TIMEOUT_S = 1.0

_log = logging.getLogger("twinfer.nodes")


class RemoteWorker(RankWorker):
    """A rank of another node. That node's parent watches the process; here its word, or its silence, counts."""

    def __init__(self, config: WorkerConfig, supervision: SupervisionConfig, node: RemoteNode) -> None:
        super().__init__(config, supervision)
        self.node = node
        # Bounded by the protocol: a worker has at most two results under way. Loading messages are read at once.
        self._sender, self._inbox = trio.open_memory_channel[WorkerReply](math.inf)

    @property
    def heartbeat_age_s(self) -> float:
        return self.node.silence_s

    def queue(self, command: WorkerCommand) -> None:
        self.node.queue(self, command)

    async def flush(self) -> None:
        if self.node.failure is not None:
            raise self.node.failure
        self.node.flush()

    async def receive(self) -> WorkerReply:
        try:
            return await self._inbox.receive()
        except trio.EndOfChannel:
            assert self.node.failure is not None
            raise self.node.failure from None

    async def run_heartbeat(self) -> NoReturn:
        await self.node.failed.wait()
        assert self.node.failure is not None
        raise self.node.failure

    async def stop(self, *, graceful: bool) -> None:
        """The node stops its workers when it hears the Goodbye."""

    def kill(self) -> None:
        self.node.kill()

    def hanging(self, consequence: TwinferError) -> WorkerError:
        return WorkerError(self.name, f"hangs or is too slow (node {self.node.number}); hence {consequence}")

    def killed_by_others(self) -> WorkerError | None:
        return None  # its node says so, and ``receive`` raises it

    def arrived(self, reply: WorkerReply) -> None:
        self._sender.send_nowait(reply)

    def node_failed(self, *, let_down: bool) -> None:
        """What arrived before is still read."""
        self.let_down = let_down
        self._sender.close()

    def _give_up(self, reason: str) -> TwinferError:
        error = WorkerError(self.name, f"{reason} (node {self.node.number}); given up")
        return self.node.fail(error)


class RemoteNode:
    """One other node: what goes there, and when it was last heard."""

    def __init__(self, number: int, link: NodeLink[NodeCommand, NodeReply]) -> None:
        self.number = number
        self.workers: dict[int, RemoteWorker] = {}
        self.failure: TwinferError | None = None
        self.failed = trio.Event()
        self.parted = trio.Event()  # it has answered the Goodbye, or cannot
        self._link = link
        self._encoder = msgspec.msgpack.Encoder()
        self._entries: list[tuple[int, bytes]] = []
        self._entries_bytes = 0
        self._heard_s = trio.current_time()
        self._missed_beats = 0

    @property
    def silence_s(self) -> float:
        return trio.current_time() - self._heard_s

    def queue(self, worker: RemoteWorker, command: WorkerCommand) -> None:
        encoded = self._encoder.encode(command)
        if len(encoded) > MAX_FRAME_BYTES:
            raise self.fail(WorkerError(worker.name, f"{type(command).__name__} takes {len(encoded)} bytes; at most {MAX_FRAME_BYTES} fit"))
        if self._entries_bytes + len(encoded) > _BATCH_BYTES:
            self.flush()
        self._entries.append((worker.config.rank, encoded))
        self._entries_bytes += len(encoded)

    def flush(self) -> None:
        if self._entries:
            self._link.post(self.number, Commands(tuple(self._entries)))
            self._entries, self._entries_bytes = [], 0

    def beat(self, number: int, supervision: SupervisionConfig) -> None:
        """Once per interval. Missed ones are counted, not the clock read: a suspended machine has missed one, however long it slept."""
        if self.failure is not None:
            return
        if self._missed_beats * supervision.heartbeat_interval_s >= supervision.heartbeat_timeout_s:
            self.fail(
                WorkerError(f"node-{self.number}", f"gave no sign of life for heartbeat_timeout_s = {supervision.heartbeat_timeout_s:g}")
            )
            return
        self._missed_beats += 1
        self._link.post(self.number, Beat(number))

    def arrived(self, message: NodeReply) -> None:
        self._heard_s, self._missed_beats = trio.current_time(), 0
        match message:
            case Reply(rank=rank, reply=reply):
                if rank not in self.workers:
                    self.fail(WorkerError(f"node-{self.number}", f"sent a result of rank {rank}, which is not there"))
                elif self.failure is None:
                    self.workers[rank].arrived(reply)
            case Beat():
                pass
            case Goodbye():
                self.parted.set()
            case NodeFailed(fault="config", message=text):
                self.fail(ConfigError(f"node {self.number}: {text}"))
            case NodeFailed(worker=name, fault=fault, message=text):
                where = f"node-{self.number}" if name is None else name
                self.fail(WorkerError(where, text if name is None else f"{text} (node {self.number})"), let_down=fault == "peer")
            case _:
                assert_never(message)

    def fail(self, error: TwinferError, *, let_down: bool = False) -> TwinferError:
        """The node is of no use; the first reason stays."""
        if self.failure is None:
            self.failure = error
            for worker in self.workers.values():
                worker.node_failed(let_down=let_down)
            self.failed.set()
        return self.failure

    def kill(self) -> None:
        """Cut the connection: the other nodes end themselves."""
        self._link.kill()


class Leader:
    """All other nodes."""

    def __init__(self, config: EngineConfig, link: NodeLink[NodeCommand, NodeReply]) -> None:
        assert config.nodes is not None
        self._link = link
        self._supervision = config.supervision
        self._nodes = {number: RemoteNode(number, link) for number in range(1, config.nodes.num_nodes)}
        self.rendezvous = config.nodes.rendezvous
        self.interface = link.interface
        self.reason: str | None = "node 0 has stopped"  # why the replica ends; None for an orderly end
        self.workers: dict[int, RemoteWorker] = {}
        for worker in config.workers:
            number = config.nodes.node_of(worker.rank, len(config.workers))
            if number:
                node = self._nodes[number]
                node.workers[worker.rank] = self.workers[worker.rank] = RemoteWorker(worker, config.supervision, node)

    async def run(self) -> None:
        """Receive and beat. Failures reach those who wait for a worker of the node."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._link.run_writer)
            nursery.start_soon(self._beat)
            while True:
                try:
                    number, message = await self._link.receive()
                except NodeLostError as lost:
                    self._nodes[lost.node].parted.set()
                    self._nodes[lost.node].fail(WorkerError(f"node-{lost.node}", str(lost)))
                except WorkerError as error:
                    for node in self._nodes.values():
                        node.parted.set()
                        node.fail(error)
                    nursery.cancel_scope.cancel()
                    return
                else:
                    self._nodes[number].arrived(message)

    async def say_goodbye(self) -> None:
        """Tell the nodes that are still there, and wait for a moment until they have heard it."""
        with trio.CancelScope(shield=True), trio.move_on_after(_GOODBYE_TIMEOUT_S):
            for node in self._nodes.values():
                self._link.post(node.number, Goodbye(self.reason))
            for node in self._nodes.values():
                if not node.failed.is_set():
                    await node.parted.wait()

    async def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            for node in self._nodes.values():
                node.beat(number, self._supervision)
            await trio.sleep(self._supervision.heartbeat_interval_s)


@contextlib.asynccontextmanager
async def open_leader(config: EngineConfig) -> AsyncIterator[Leader | None]:
    """Meet the other nodes and stay in touch with them; None where there are none.

    Raises ConfigError where they cannot go together, WorkerError where some do not come.
    """
    nodes = config.nodes
    if nodes is None:
        yield None
        return
    _log.info("node 0 of %d: waits for the others at %s, port %d", nodes.num_nodes, nodes.host, nodes.port)
    link: NodeLink[Any, Any]
    async with open_link(nodes, NodeReply, config.supervision.start_timeout_s) as link:
        _log.info("node 0: all %d nodes are here", nodes.num_nodes)
        leader = Leader(config, link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.run)
            try:
                yield leader
            finally:
                await leader.say_goodbye()
                nursery.cancel_scope.cancel()
