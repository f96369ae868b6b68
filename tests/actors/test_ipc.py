"""Frames: any split gives the same messages; garbage and sizes out of bounds are refused; neither side can be locked up."""

from __future__ import annotations

import os
import socket
import struct
import threading

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.actors.channel import TrioChannel
from engine.actors.ipc import HEADER, MAX_FRAME_BYTES, ChannelClosedError, Codec, FrameError, FrameReader, SyncChannel
from engine.actors.messages import Executed, Forget, Ping, Pong, Register, WorkerCommand, WorkerReply
from engine.core.plan import RankResult
from engine.core.sampling import SamplingParams


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


@given(payloads=st.lists(st.binary(min_size=1, max_size=50), max_size=8), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_any_split_gives_the_same_frames(payloads: list[bytes], sizes: list[int]) -> None:
    data = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader()
    got: list[bytes] = []
    position = 0
    for size in sizes * (len(data) + 1):
        if position >= len(data):
            break
        reader.feed(data[position : position + size])
        position += size
        while (payload := reader.next_payload()) is not None:
            got.append(payload)
    assert got == payloads
    assert reader.pending_bytes == 0


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_illegal_lengths_are_refused_before_the_bytes_arrive(length: int) -> None:
    reader = FrameReader()
    reader.feed(struct.pack("<I", length))
    with pytest.raises(FrameError, match=str(length)):
        reader.next_payload()


def test_a_message_too_large_is_refused_by_its_sender() -> None:
    codec: Codec[WorkerCommand, WorkerReply] = Codec(WorkerReply, max_frame_bytes=100)
    with pytest.raises(FrameError, match="Register"):
        codec.encode(Register(1, tuple(range(200)), SamplingParams(), 0))
    assert len(codec.encode(Forget(1))) > HEADER.size  # and the codec is still of use


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"\x80", b"\x81\xa4type\xa4Evil", b"\x81\xa4type\xa6Forget", b"cos\nsystem\n", os.urandom(64)]
)
def test_garbage_is_no_message(payload: bytes) -> None:
    codec: Codec[WorkerReply, WorkerCommand] = Codec(WorkerCommand, MAX_FRAME_BYTES)
    with pytest.raises(FrameError):
        codec.decode(payload)


def pair() -> tuple[TrioChannel[WorkerCommand, WorkerReply], SyncChannel[WorkerReply, WorkerCommand]]:
    ours, theirs = socket.socketpair()
    return TrioChannel(ours, WorkerReply), SyncChannel(theirs, WorkerCommand)


async def test_round_trip_and_end() -> None:
    parent, worker = pair()
    parent.queue(Forget(1))
    await parent.send(Forget(2))
    assert [await trio.to_thread.run_sync(worker.receive), worker.receive()] == [Forget(1), Forget(2)]
    worker.send(Executed(3, RankResult(), 0.5))
    worker.close()
    assert await parent.receive() == Executed(3, RankResult(), 0.5)  # what was sent before the end is still read
    with pytest.raises(ChannelClosedError):
        await parent.receive()
    with pytest.raises(ChannelClosedError):
        await parent.send(Forget(1))
    parent.close()
    parent.close()


async def test_large_messages_both_ways_do_not_deadlock() -> None:
    parent, worker = pair()
    large = "x" * (3 << 20)

    def serve() -> None:
        # As a worker that is sending a large result while a large prompt comes in.
        from engine.actors.messages import Failed

        worker.send(Failed("internal", "step 1", large, ""))
        assert worker.receive() == Register(1, tuple(range(500_000)), SamplingParams(), 0)
        worker.send(Failed("internal", "step 2", large, ""))

    thread = threading.Thread(target=serve)
    thread.start()
    with trio.fail_after(20):
        await parent.send(Register(1, tuple(range(500_000)), SamplingParams(), 0))
        for _ in range(2):
            reply = await parent.receive()
            assert getattr(reply, "message", "") == large
    thread.join()
    parent.close()
    worker.close()


async def test_cancelled_send_tears_no_frame() -> None:
    parent, worker = pair()
    first = Register(1, tuple(range(300_000)), SamplingParams(), 0)
    with trio.move_on_after(0.02) as scope:
        await parent.send(first)
    assert scope.cancelled_caught  # nobody was reading
    received: list[object] = []
    thread = threading.Thread(target=lambda: received.extend([worker.receive(), worker.receive()]))
    thread.start()
    with trio.fail_after(20):
        await parent.send(Forget(2))
    thread.join()
    assert received == [first, Forget(2)]
    parent.close()
    worker.close()


async def test_a_cancelled_receive_loses_no_message() -> None:
    """Whatever moment the cancellation comes at, the message is read then or next."""
    parent, worker = pair()
    for number in range(20):
        worker.send(Executed(number, RankResult(()), 0.0))
        await trio.lowlevel.wait_readable(parent._sock)
        received: list[object] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def read(into: list[object]) -> None:
                    into.append(await parent.receive())

                nursery.start_soon(read, received)
                for _ in range(number % 4):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        if not received:
            received.append(await parent.receive())
        assert received == [Executed(number, RankResult(()), 0.0)]
    parent.close()
    worker.close()


async def test_close_wakes_a_reader() -> None:
    parent, worker = pair()
    woken = False

    async def read() -> None:
        nonlocal woken
        with pytest.raises((ChannelClosedError, trio.ClosedResourceError)):
            await parent.receive()
        woken = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        parent.close()
    assert woken
    worker.close()


def test_the_wire_holds_no_code() -> None:
    for message in (Ping(1), Pong(1)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message)) == {"type": type(message).__name__, "number": 1}
