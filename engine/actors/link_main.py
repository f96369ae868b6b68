"""The link process: carries messages between the parent of this node and those of the others. ``python -m engine.actors.link_main``.

A process of its own because the parents know no torch, and because what keeps nodes alive for each other must not wait for a worker's
interpreter. It understands nothing of what it carries.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from typing import Literal

from engine.actors.ipc import MAX_FRAME_BYTES, ChannelClosedError, SyncChannel
from engine.actors.messages import Arrived, LinkCommand, LinkReply, Lost, Meet, Met, NotMet, Post
from engine.actors.worker_main import EXIT_FAULT, EXIT_OK, EXIT_ORPHANED, _die_with_parent
from engine.core.errors import ConfigError, TwinferError

# What a message may have beside the largest frame it carries.
LINK_FRAME_BYTES = MAX_FRAME_BYTES + (64 << 10)


class Link:
    """``run`` is its life; the parent ends it by closing the channel, after everything posted has left."""

    def __init__(self, channel: SyncChannel[LinkReply, LinkCommand]) -> None:
        self._channel = channel
        self._answering = threading.Lock()  # one thread per node receives

    def run(self) -> int:
        try:
            command = self._channel.receive()
        except ChannelClosedError:
            return EXIT_ORPHANED
        if not isinstance(command, Meet):
            raise TypeError(f"the first command is {type(command).__name__}, not Meet")
        # Imported here: it takes seconds, in which the parent may change its mind.
        from engine.parallel.wire import Wire

        where = (command.host, command.port, command.address)
        self._wire = Wire(command.node, command.num_nodes, *where, max_message_bytes=LINK_FRAME_BYTES)
        try:
            self._wire.meet(dict(command.facts), command.timeout_s)
        except TwinferError as error:
            fault: Literal["config", "internal"] = "config" if isinstance(error, ConfigError) else "internal"
            self._answer(NotMet(fault, str(error)))
            return EXIT_FAULT
        self._answer(Met())
        for node in range(command.num_nodes) if command.node == 0 else (0,):
            if node != command.node:
                threading.Thread(target=self._receive, args=(node,), name=f"node-{node}", daemon=True).start()
        return self._send()

    def _send(self) -> int:
        while True:
            try:
                command = self._channel.receive()
            except ChannelClosedError:
                return EXIT_OK
            if not isinstance(command, Post):
                raise TypeError(f"{type(command).__name__} came after the start")
            try:
                self._wire.send(command.node, command.payload)
            except ConnectionError as error:
                self._answer(Lost(command.node, str(error)))

    def _receive(self, node: int) -> None:
        try:
            while True:
                self._answer(Arrived(node, self._wire.receive(node)))
        except ConnectionError as error:
            self._answer(Lost(node, str(error)))

    def _answer(self, message: LinkReply) -> None:
        try:
            with self._answering:
                self._channel.send(message)
        except ChannelClosedError:
            os._exit(EXIT_ORPHANED)


def main() -> None:
    """Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="twinfer link process; started by the engine, not by hand")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    _die_with_parent(arguments.parent_pid)
    # Its failures arrive as errors; torch's own lines beside them are long and say less.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    exit_code = Link(SyncChannel(socket.socket(fileno=arguments.link_fd), LinkCommand, LINK_FRAME_BYTES)).run()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
