"""A request's stream by itself: whatever the steps bring, the pieces add up to the text that the tokens spell."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.actors.stream import Output, RequestStream, Sample
from engine.core.errors import CapacityError, WorkerError
from engine.detokenize import ByteDecoder, StopMatcher
from tests.test_tokenizer import naive_cut

TEXT = "ab é🦊b"


def drain(stream: RequestStream) -> list[Output]:
    outputs = list(stream._buffer)
    stream._buffer.clear()
    return outputs


def make(data: list[bytes], stops: list[str], *, min_tokens: int = 0, include_stop: bool = False, bound: int = 1000) -> RequestStream:
    sample = Sample(5, 0, ByteDecoder(lambda token: data[token]), StopMatcher(stops, include_stop=include_stop), min_tokens)
    return RequestStream([sample], 3, 1, bound)


@given(
    chunks=st.lists(st.binary(max_size=3) | st.text(alphabet=TEXT, max_size=3).map(str.encode), max_size=20),
    stops=st.lists(st.text(alphabet=TEXT, min_size=1, max_size=4), max_size=3),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    include_stop=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_pieces_add_up(chunks: list[bytes], stops: list[str], steps: list[int], include_stop: bool) -> None:
    text = b"".join(chunks).decode("utf-8", errors="replace")
    want, stop = naive_cut(text, stops, include_stop=include_stop)
    stream = make(chunks, stops, include_stop=include_stop)
    position = 0
    for size in steps * (len(chunks) + 1):
        tokens = list(range(position, min(position + size, len(chunks))))
        position += len(tokens)
        stream.push(5, tokens, (), "length" if position >= len(chunks) else None)
        if stream.ended:
            break
    outputs = drain(stream)
    assert "".join(output.text for output in outputs) == want
    assert all(output.text for output in outputs[:-1])
    assert outputs[-1].finish_reason == ("length" if stop is None else "stop")
    assert outputs[-1].stop_reason == stop
    ids = [token for output in outputs for token in output.token_ids]
    assert ids == list(range(len(ids)))
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == len(ids)
    # No token behind the one that completed the stop string is reported.
    if stop is not None:
        assert len(ids) == len(chunks) or naive_cut(b"".join(chunks[: len(ids)]).decode("utf-8", "replace"), stops)[1] is not None
        if len(ids) > 1:
            assert naive_cut(b"".join(chunks[: len(ids) - 1]).decode("utf-8", "ignore"), stops)[1] is None


def test_stop_string_and_min_tokens() -> None:
    stream = make([b"a", b"b"], ["b"], min_tokens=3)
    assert not stream.push(5, [0, 1, 1], (), None)
    assert stream.push(5, [1], (), None)
    outputs = drain(stream)
    assert "".join(output.text for output in outputs) == "abb"
    assert outputs[-1].stop_reason == "b"


def test_silent_end_token() -> None:
    stream = make([b"a", b"</s>"], [])
    stream.push(5, [0, 1], (), "stop", None, last_is_silent=True)
    assert [(output.text, output.token_ids, output.finish_reason) for output in drain(stream)] == [("a", (0, 1), "stop")]


def test_nothing_follows_an_end() -> None:
    stream = make([b"a"], ["a"])
    assert stream.push(5, [0, 0], (), None)
    assert not stream.push(5, [0], (), None)
    assert not stream.push(5, [0], (), "length")
    stream.fail(WorkerError("w", "died"))  # too late to matter
    assert len(drain(stream)) == 1


async def test_reader_wakes_and_leaves() -> None:
    stream = make([b"a"], [])
    seen: list[str] = []

    async def read() -> None:
        async for output in stream:
            seen.append(output.text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        stream.push(5, [0], (), None)
        await trio.testing.wait_all_tasks_blocked()
        assert seen == ["a"]
        nursery.cancel_scope.cancel()
    assert stream.close() == [5]
    assert stream.close() == []
    stream.push(5, [0], (), "length")
    assert drain(stream) == []


async def test_buffered_pieces_come_before_the_error() -> None:
    stream = make([b"a"], [], bound=2)
    stream.push(5, [0], (), None)
    stream.fail(WorkerError("worker-3", "died"))
    assert (await stream.__anext__()).text == "a"
    with pytest.raises(WorkerError, match="worker-3"):
        await stream.__anext__()
    slow = make([b"a"], [], bound=2)
    for _ in range(5):
        slow.push(5, [0], (), None)
    assert slow.ended
    assert isinstance(slow._error, CapacityError)
    assert len(drain(slow)) == 2


async def test_read_hands_over_everything_that_waits() -> None:
    samples = [
        Sample(id_, index, ByteDecoder(lambda token: b"ab"[token : token + 1]), StopMatcher([]), 0) for index, id_ in enumerate((5, 6))
    ]
    stream = RequestStream(samples, 3, 1, 10)
    for token in (0, 1):
        for sample in samples:
            stream.push(sample.id, [token], (), None)
    assert [(output.index, output.text) for output in await stream.read()] == [(0, "a"), (1, "a"), (0, "b"), (1, "b")]
    for sample in samples:
        stream.push(sample.id, [0], (), "length")
    assert [output.finish_reason for output in await stream.read()] == ["length", "length"]
    assert await stream.read() == []


async def test_read_raises_after_what_came_before_the_error() -> None:
    stream = make([b"a"], [])
    stream.push(5, [0], (), None)
    stream.fail(WorkerError("worker-0", "died"))
    assert [output.text for output in await stream.read()] == ["a"]
    with pytest.raises(WorkerError):
        await stream.read()
