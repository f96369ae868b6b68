"""Frames between processes: a little-endian uint32 length, then one msgpack message of a closed union.

The framing is sans-IO (``FrameReader``); ``SyncChannel`` is the worker's side of a socket, ``channel.TrioChannel`` the parent's.
Both sides decode into a declared union, so a frame can become a known message or an error and nothing else. A worker imports
this module and no trio.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Generic, TypeVar, cast

import msgspec

# The largest legal messages: a prompt of a million ids is 5 MB; the block tables of 1024 sequences that all start in one step,
# 8192 blocks each, are 40 MB. Anything longer is garbage or a bug, and must not be allocated.
MAX_FRAME_BYTES = 64 << 20
# One read takes what an ordinary message needs; frames are mostly below 1 KiB.
READ_BYTES = 64 << 10

HEADER = struct.Struct("<I")
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
        if len(buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(buffer)
        if not _MIN_FRAME_BYTES <= length <= self._max_frame_bytes:
            raise FrameError(f"a frame of {length} bytes; allowed: {_MIN_FRAME_BYTES} to {self._max_frame_bytes}")
        end = HEADER.size + length
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return payload


class Codec(Generic[Out, In]):
    """Messages of two unions to frames and back."""

    def __init__(self, incoming: Any, max_frame_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._max_frame_bytes = max_frame_bytes
        self._scratch = bytearray(HEADER.size)

    def encode(self, message: Out) -> bytearray:
        """The frame of ``message``; the returned buffer is overwritten by the next call."""
        scratch = self._scratch
        self._encoder.encode_into(message, scratch, HEADER.size)
        length = len(scratch) - HEADER.size
        if length > self._max_frame_bytes:
            self._scratch = bytearray(HEADER.size)
            raise FrameError(f"{type(message).__name__} takes {length} bytes; at most {self._max_frame_bytes} fit a frame")
        HEADER.pack_into(scratch, 0, length)
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
        self._codec: Codec[Out, In] = Codec(incoming, max_frame_bytes)
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
