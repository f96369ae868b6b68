"""The parent's side of a socket to a worker: the frames of ipc.py, without blocking."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Generic

import trio

from engine.actors.ipc import HEADER, MAX_FRAME_BYTES, READ_BYTES, ChannelClosedError, Codec, FrameReader, In, Out


class TrioChannel(Generic[Out, In]):
    """The parent's side. One task uses it at a time; cancellation never tears a frame: what was begun is finished by the next send.

    Or one task receives, another is in ``run_writer``, and any number of them ``post``.
    """

    def __init__(self, sock: socket.socket, incoming: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._codec: Codec[Out, In] = Codec(incoming, max_frame_bytes)
        self._reader = FrameReader(max_frame_bytes)
        self._max_frame_bytes = max_frame_bytes
        self._outbox = bytearray()
        self._outbox_waits = trio.Event()
        self._closed_reason: str | None = None

    def queue(self, message: Out) -> None:
        """Add a message to the outbox without sending: it leaves with the next ``send`` in one system call."""
        self._outbox += self._codec.encode(message)

    async def send(self, message: Out) -> None:
        """Send a message after everything queued. Usually a single non-blocking system call and no checkpoint, for latency's sake."""
        self._outbox += self._codec.encode(message)
        await self.flush()

    async def flush(self) -> None:
        """Send everything queued."""
        self._write_some()
        if self._outbox:
            await self._flush()

    def post(self, message: Out) -> None:
        """Send without ever waiting: what the socket does not take now leaves in ``run_writer``. The caller bounds how much that is."""
        self._outbox += self._codec.encode(message)
        self._write_some()
        if self._outbox:
            self._outbox_waits.set()

    async def run_writer(self) -> None:
        """Write what was posted, until cancelled or the channel is closed. Whoever receives notices the latter."""
        with contextlib.suppress(ChannelClosedError, trio.ClosedResourceError):
            while True:
                await self._outbox_waits.wait()
                await self.drain()
                self._outbox_waits = trio.Event()

    async def drain(self) -> None:
        """Write what was posted. Raises ChannelClosedError where nobody takes it."""
        while self._outbox:
            await trio.lowlevel.wait_writable(self._sock)
            self._write_some()

    async def receive(self) -> In:
        """The next message. Always a checkpoint, so that a worker that is never slower than us starves no other task; a message that
        was taken is not lost to a cancellation.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        suspended = False
        while True:
            payload = self._reader.next_payload()
            if payload is not None:
                if not suspended:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                return self._codec.decode(payload)
            if self._closed_reason is not None:
                raise ChannelClosedError(self._closed_reason)
            if not self._read_some():
                await trio.lowlevel.wait_readable(self._sock)
                suspended = True

    def receive_nowait(self) -> In | None:
        """What has already arrived, None where nothing has. Never waits, so it may run beside a task that does."""
        while True:
            payload = self._reader.next_payload()
            if payload is not None:
                return self._codec.decode(payload)
            if self._closed_reason is not None:
                raise ChannelClosedError(self._closed_reason)
            if not self._read_some():
                return None

    def close(self) -> None:
        """Idempotent; wakes a task that waits on the socket with an error."""
        self._closed_reason = self._closed_reason or "closed here"
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def _write_some(self) -> None:
        try:
            while self._outbox:
                sent = self._sock.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            self._outbox.clear()
            raise ChannelClosedError(str(error)) from None

    def _read_some(self) -> bool:
        """Read once; false where nothing is there now. The end of the stream is remembered behind the frames before it."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._closed_reason = str(error)
            return True
        if data:
            self._reader.feed(data)
        else:
            self._closed_reason = "end of stream"
        return True

    async def _flush(self) -> None:
        """Write the rest of the outbox while reading.

        Both directions can be full at once (a long prompt down, a large result up); a side that only writes would deadlock.
        """
        failure: ChannelClosedError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_while_flushing)
            try:
                while self._outbox:
                    await trio.lowlevel.wait_writable(self._sock)
                    self._write_some()
            except (ChannelClosedError, trio.ClosedResourceError) as error:
                failure = ChannelClosedError(str(error))
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _read_while_flushing(self) -> None:
        # Two frames: the worker has at most two results under way, and cannot send a third before it has read our message.
        bound_bytes = 2 * (self._max_frame_bytes + HEADER.size)
        with contextlib.suppress(trio.ClosedResourceError):
            while self._closed_reason is None and self._reader.pending_bytes < bound_bytes:
                await trio.lowlevel.wait_readable(self._sock)
                self._read_some()
