"""The parent's side of the link process, through which the nodes of a replica talk."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Generic

import msgspec
import trio

from engine.actors.channel import TrioChannel
from engine.actors.config import NodesConfig
from engine.actors.ipc import ChannelClosedError, FrameError, In, Out
from engine.actors.link_main import LINK_FRAME_BYTES
from engine.actors.messages import Arrived, LinkCommand, LinkReply, Lost, Meet, Met, NotMet, Post
from engine.actors.network import interface_of, local_address
from engine.actors.process import describe_exit, open_pidfd, spawn_module, wait_exit
from engine.core.errors import ConfigError, WorkerError

LINK_MODULE = "engine.actors.link_main"
# How long the link process gets to send what was posted last, and to end.
_CLOSE_TIMEOUT_S = 2.0
# The link process bounds the wait for the other nodes by itself; this much later it counts as hung.
_MEET_GRACE_S = 15.0


class NodeLostError(Exception):
    """Nothing comes from ``node`` any more."""

    def __init__(self, node: int, message: str) -> None:
        super().__init__(message)
        self.node = node


class NodeLink(Generic[Out, In]):
    """Messages to and from other nodes. One task receives, one is in ``run_writer``, any number of them post."""

    def __init__(self, nodes: NodesConfig, incoming: Any) -> None:
        """Spawn at once, as a Worker does."""
        self.nodes = nodes
        self.interface: str | None = None  # of this machine, towards the others; known once they have met
        self._name = f"node-{nodes.node}"
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn_module(LINK_MODULE, {"link-fd": theirs.fileno()})
            except OSError as error:
                ours.close()
                raise WorkerError(self._name, f"its link process could not be started: {error}") from error
        self._ours = ours
        self._channel: TrioChannel[LinkCommand, LinkReply] = TrioChannel(ours, LinkReply, LINK_FRAME_BYTES)
        self._pidfd = open_pidfd(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def meet(self, timeout_s: float) -> None:
        """Wait for the other nodes. Raises ConfigError where they cannot go together, WorkerError where some do not come."""
        nodes = self.nodes
        find = partial(local_address, nodes.host, nodes.port, is_own=nodes.node == 0)  # may ask a name server
        address = await trio.to_thread.run_sync(find, abandon_on_cancel=True)
        self.interface = interface_of(address)
        meet = Meet(nodes.node, nodes.num_nodes, nodes.host, nodes.port, address, nodes.facts, timeout_s)
        with trio.move_on_after(timeout_s + _MEET_GRACE_S):
            try:
                await self._channel.send(meet)
                reply = await self._channel.receive()
            except (ChannelClosedError, FrameError) as error:
                raise await self._died(error) from None
            match reply:
                case Met():
                    return
                case NotMet(fault="config", message=message):
                    raise ConfigError(message)
                case NotMet(message=message):
                    worker, _, text = message.partition(": ")
                    raise WorkerError(worker, text)
                case _:
                    raise WorkerError(self._name, f"its link process answered Meet with {type(reply).__name__}")
        raise WorkerError(self._name, f"its link process did not answer within {timeout_s + _MEET_GRACE_S:g} s")

    def post(self, node: int, message: Out) -> None:
        """Send without waiting. Where the node is gone that is learnt by receiving."""
        with contextlib.suppress(ChannelClosedError):
            self._channel.post(Post(node, self._encoder.encode(message)))

    async def receive(self) -> tuple[int, In]:
        """(node, message). Raises NodeLostError for one node, WorkerError where the link itself is broken."""
        try:
            reply = await self._channel.receive()
        except (ChannelClosedError, trio.ClosedResourceError, FrameError) as error:
            raise await self._died(error) from None
        match reply:
            case Arrived(node=node, payload=payload):
                try:
                    return node, self._decoder.decode(payload)
                except msgspec.DecodeError as error:
                    raise NodeLostError(node, f"sent garbage: {error}") from None
            case Lost(node=node, message=message):
                raise NodeLostError(node, f"the connection is lost: {message}")
            case _:
                raise WorkerError(self._name, f"its link process sent {type(reply).__name__}")

    async def run_writer(self) -> None:
        await self._channel.run_writer()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Let what was posted leave, then end the process. Bounded; runs to its end under cancellation."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(_CLOSE_TIMEOUT_S), contextlib.suppress(OSError, ChannelClosedError):
                await self._channel.drain()
                self._ours.shutdown(socket.SHUT_WR)
                await wait_exit(self._process, self._pidfd)
            self.kill()
            with trio.move_on_after(_CLOSE_TIMEOUT_S):
                await wait_exit(self._process, self._pidfd)
            self._channel.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    async def _died(self, error: Exception) -> WorkerError:
        if isinstance(error, FrameError):
            return WorkerError(self._name, f"its link process sent garbage: {error}")
        with trio.move_on_after(_CLOSE_TIMEOUT_S):
            return WorkerError(self._name, f"its link process {describe_exit(await wait_exit(self._process, self._pidfd))}")
        return WorkerError(self._name, "its link process closed the channel without exiting")


@contextlib.asynccontextmanager
async def open_link(nodes: NodesConfig, incoming: Any, timeout_s: float) -> AsyncIterator[NodeLink[Any, Any]]:
    """A link to nodes that have met."""
    link: NodeLink[Any, Any] = NodeLink(nodes, incoming)
    try:
        try:
            await link.meet(timeout_s)
        except BaseException:
            link.kill()  # it waits for others, and has nothing to send
            raise
        yield link
    finally:
        await link.close()
