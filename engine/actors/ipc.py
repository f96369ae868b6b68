"""Frames between processes: a little-endian uint32 length, then one msgpack message of a closed union.

The framing is sans-IO (``FrameReader``); ``SyncChannel`` is the worker's side of a socket, ``TrioChannel`` the parent's. Both
sides decode into a declared union, so a frame can become a known message or an error and nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, Generic, TypeVar, cast

import msgspec
import trio

# The largest legal messages: a prompt of a million ids is 5 MB; the block tables of 1024 sequences that all start in one step,
# 8192 blocks each, are 40 MB. Anything longer is garbage or a bug, and must not be allocated.
MAX_FRAME_BYTES = 64 << 20
# One read takes what an ordinary message needs; frames are mostly below 1 KiB.
READ_BYTES = 64 << 10

_HEADER = struct.Struct("<I")
# An empty frame decodes to nothing, so zero is no legal length either.
_MIN_FRAME_BYTES = 1

Out = TypeVar("Out")
In = TypeVar("In")


class FrameError(Exception):
    """The bytes are no frame of this protocol, or the message is too large for one."""


class ChannelClosedError(Exception):
    """The other side has closed the channel, or died."""


class FrameReader:
    """Cuts a byte stream into payloads. Holds at most one frame and one read."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The next complete payload, None until more bytes arrive. Raises FrameError as soon as a length is illegal."""
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(buffer)
        if not _MIN_FRAME_BYTES <= length <= self._max_frame_bytes:
            raise FrameError(f"a frame of {length} bytes; allowed: {_MIN_FRAME_BYTES} to {self._max_frame_bytes}")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[_HEADER.size : end])
        del buffer[:end]
        return payload


class _Codec(Generic[Out, In]):
    """Messages of two unions to frames and back."""

    def __init__(self, incoming: Any, max_frame_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._max_frame_bytes = max_frame_bytes
        self._scratch = bytearray(_HEADER.size)

    def encode(self, message: Out) -> bytearray:
        """The frame of ``message``; the returned buffer is overwritten by the next call."""
        scratch = self._scratch
        self._encoder.encode_into(message, scratch, _HEADER.size)
        length = len(scratch) - _HEADER.size
        if length > self._max_frame_bytes:
            self._scratch = bytearray(_HEADER.size)
            raise FrameError(f"{type(message).__name__} takes {length} bytes; at most {self._max_frame_bytes} fit a frame")
        _HEADER.pack_into(scratch, 0, length)
        return scratch

    def decode(self, payload: bytes) -> In:
        try:
            return cast(In, self._decoder.decode(payload))
        except msgspec.DecodeError as error:  # ValidationError is one
            raise FrameError(f"a frame that is no message of this channel: {error}") from None


class SyncChannel(Generic[Out, In]):
    """The blocking side, for a worker's threads: one thread per channel."""

    def __init__(self, sock: socket.socket, incoming: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._codec: _Codec[Out, In] = _Codec(incoming, max_frame_bytes)
        self._reader = FrameReader(max_frame_bytes)

    def send(self, message: Out) -> None:
        """Raises ChannelClosedError where nobody listens any more."""
        try:
            self._sock.sendall(self._codec.encode(message))
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self) -> In:
        """Block until a message is here. Raises ChannelClosedError at the end of the stream, FrameError on garbage."""
        while True:
            payload = self._reader.next_payload()
            if payload is not None:
                return self._codec.decode(payload)
            try:
                data = self._sock.recv(READ_BYTES)
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            if not data:
                raise ChannelClosedError("end of stream")
            self._reader.feed(data)

    def close(self) -> None:
        self._sock.close()


class TrioChannel(Generic[Out, In]):
    """The parent's side. One task uses it at a time; cancellation never tears a frame: what was begun is finished by the next send."""

    def __init__(self, sock: socket.socket, incoming: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._codec: _Codec[Out, In] = _Codec(incoming, max_frame_bytes)
        self._reader = FrameReader(max_frame_bytes)
        self._max_frame_bytes = max_frame_bytes
        self._outbox = bytearray()
        self._closed_reason: str | None = None

    def queue(self, message: Out) -> None:
        """Add a message to the outbox without sending: it leaves with the next ``send`` in one system call."""
        self._outbox += self._codec.encode(message)

    async def send(self, message: Out) -> None:
        """Send a message after everything queued. Usually a single non-blocking system call and no checkpoint, for latency's sake."""
        self._outbox += self._codec.encode(message)
        self._write_some()
        if self._outbox:
            await self._flush()

    async def receive(self) -> In:
        """The next message. Always a checkpoint, so that a worker that is never slower than us starves no other task."""
        suspended = False
        while True:
            payload = self._reader.next_payload()
            if payload is not None:
                if not suspended:
                    await trio.lowlevel.checkpoint()
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
        bound_bytes = 2 * (self._max_frame_bytes + _HEADER.size)
        with contextlib.suppress(trio.ClosedResourceError):
            while self._closed_reason is None and self._reader.pending_bytes < bound_bytes:
                await trio.lowlevel.wait_readable(self._sock)
                self._read_some()
