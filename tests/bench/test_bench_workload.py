"""What is sent and when: traces, schedules, lengths, prompts. All of it a function of the seed."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bench.prompts import WORDS, PromptMaker, single_token_words
from engine.bench.sse import MAX_EVENT_BYTES, EventParser, EventTooLongError
from engine.bench.traces import read_trace
from engine.bench.workload import Lengths, Work, WorkloadSettings, make_workload
from engine.core.errors import ConfigError

SEEDS = st.integers(0, 2**63 - 1)


def works(count: int | None = None, **values: Any) -> list[Work]:
    return list(make_workload(WorkloadSettings(num_prompts=count, **values)))


# -- schedules ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_the_same_seed_is_the_same_load_byte_for_byte(seed: int) -> None:
    values: dict[str, Any] = {
        "seed": seed,
        "request_rate_per_s": 7.0,
        "burstiness": 0.5,
        "input_tokens": Lengths(1, 90),
        "cancellation_rate": 0.3,
    }

    def bytes_of() -> bytes:
        load = works(30, **values)
        maker = PromptMaker("words", seed)
        return msgspec.json.encode([(work, maker.make(work)) for work in load])

    assert bytes_of() == bytes_of()
    other = works(30, **values | {"seed": seed + 1})
    assert [work.arrival_s for work in other] != [work.arrival_s for work in works(30, **values)]


@pytest.mark.parametrize(("burstiness", "low", "high"), [(1.0, 0.9, 1.1), (0.25, 1.7, 2.3), (100.0, 0.08, 0.12)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, low: float, high: float) -> None:
    arrivals_s = [work.arrival_s or 0.0 for work in works(4000, request_rate_per_s=20.0, burstiness=burstiness, seed=3)]
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(arrivals_s)]
    assert statistics.fmean(gaps_s) == pytest.approx(1 / 20, rel=0.1)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert low < statistics.stdev(gaps_s) / statistics.fmean(gaps_s) < high


def test_arrivals_do_not_move_when_something_else_changes() -> None:
    base = works(20, request_rate_per_s=5.0)
    other = works(20, request_rate_per_s=5.0, input_tokens=Lengths(1, 500), cancellation_rate=0.5)
    assert [work.arrival_s for work in base] == [work.arrival_s for work in other]
    assert sum(work.cancel_after_s is not None for work in other) > 0
    assert all(work.arrival_s is None for work in works(3))
    assert [work.arrival_s for work in works(3, request_rate_per_s=float("inf"))] == [0.0, 0.0, 0.0]


def test_lengths() -> None:
    ranged = works(300, input_tokens=Lengths(3, 5), output_tokens=Lengths(9, 9))
    assert {work.input_tokens for work in ranged} == {3, 4, 5}
    assert {work.output_tokens for work in ranged} == {9}
    normal = [work.input_tokens or 0 for work in works(2000, input_tokens=Lengths(100, 100, 10.0))]
    assert statistics.fmean(normal) == pytest.approx(100, abs=2)
    assert statistics.stdev(normal) == pytest.approx(10, abs=1)
    assert min(work.input_tokens or 0 for work in works(500, input_tokens=Lengths(1, 1, 50.0))) == 1


# -- traces -------------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def row(ms: int, tokens: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


def test_a_mooncake_trace_replays_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(1000, 1100, [0, 1, 2]), row(1500, 1030, [0, 1, 7]), row(4000, 3, []))
    load = works(dataset=path, trace_speed=2.0)
    assert [work.arrival_s for work in load] == [0.0, 0.25, 1.5]
    assert [work.input_tokens for work in load] == [1100, 1030, 3]
    maker = PromptMaker("words", 0)
    first, second = (str(maker.make(work)).split() for work in load[:2])
    assert len(first) == 1100
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    # A rate of one's own replaces the trace's times.
    assert works(dataset=path, request_rate_per_s=float("inf"))[1].arrival_s == 0.0
    assert len(works(2, dataset=path)) == 2


def test_a_block_cut_short_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 40, [9]), row(0, 512, [9]))
    maker = PromptMaker("ids", 5)
    short, whole = (maker.make(work) for work in works(dataset=path))
    assert whole[:40] == short
    assert len(whole) == 512


def test_an_azure_trace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.5000000,374,44",
        "2023-11-17 00:00:00.7500000,1,0",
    )
    load = works(dataset=path)
    assert [work.arrival_s for work in load] == [0.0, 1.25]
    assert [(work.input_tokens, work.output_tokens) for work in load] == [(374, 44), (1, 1)]


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "b"}]
    path = write(tmp_path / "t.jsonl", {"prompt": "a", "output_length": 3}, '"plain"', {"messages": messages})
    load = works(dataset=path)
    maker = PromptMaker("words", 0)
    assert [maker.make(work) for work in load] == ["a", "plain", messages]
    assert [work.output_tokens for work in load] == [3, 128, 128]
    assert all(work.arrival_s is None for work in load)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["{"], ["line 1", "not JSON"]),
        ([row(0, 5, []), row(0, -1, [])], ["line 2", "input_length", "-1"]),
        ([row(0, 5, []), "", row(0, 1, [], True)], ["line 3", "output_length", "True"]),
        ([row(5, 5, []), row(4, 5, [])], ["line 2", "sort"]),
        ([row(0, 512, [1, 2])], ["2 hash_ids", "512"]),
        ([{"timestamp": None, "input_length": 1, "output_length": 1}], ["timestamp"]),
        ([{"input": 1}], ["line 1", "input_length"]),
        ([[1]], ["line 1"]),
        (["TIMESTAMP,Context,Generated"], ["header", "ContextTokens"]),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"], ["line 2", "yesterday"]),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"], ["line 2", "2 fields"]),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1,99999999999"], ["GeneratedTokens", "99999999999"]),
        ([""], ["no request"]),
    ],
)
def test_a_trace_that_is_wrong_names_its_line(tmp_path: Path, lines: list[object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        list(read_trace(write(tmp_path / "t.jsonl", *lines)))
    for part in parts:
        assert part in str(caught.value)


def test_a_trace_that_cannot_be_read() -> None:
    for path in ("/no/such/file", "/dev/zero", "/"):
        with pytest.raises(ConfigError, match=path):
            list(read_trace(path))


# -- prompts ------------------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    maker = PromptMaker("words", 1)
    prompts = [str(maker.make(work)).split() for work in works(5, prefix_tokens=8, input_tokens=Lengths(20, 20))]
    assert all(len(prompt) == 28 for prompt in prompts)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 5


async def test_words_are_those_that_the_server_counts_as_one_token() -> None:
    asked: list[str] = []

    async def count(text: str) -> int:
        asked.append(text)
        return sum(2 if word in ("which", "would") else 1 for word in text.split())

    words = await single_token_words(count)
    assert set(WORDS) - set(words) == {"which", "would"}

    async def one_each(text: str) -> int:
        return len(text.split())

    assert await single_token_words(one_each) == WORDS


# -- events -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.text("aé\u2028 :", max_size=5), min_size=1, max_size=3), max_size=4), st.sampled_from(["\n", "\r\n"]), st.data()
)
def test_events_are_the_same_however_the_reads_are_cut(events: list[list[str]], end: str, data: st.DataObject) -> None:
    text = "".join("".join(f"data: {line}{end}" for line in lines) + f": ping{end}id: 1{end}{end}" for lines in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser = EventParser()
    found = [event for low, high in itertools.pairwise([0, *cuts, len(text)]) for event in parser.push(text[low:high])]
    assert found == ["\n".join(lines).encode() for lines in events]


def test_an_event_that_does_not_end_is_refused() -> None:
    for piece in (b"x" * (1 << 20), b"data: " + b"x" * (1 << 20) + b"\n"):
        parser = EventParser()
        for _ in range(MAX_EVENT_BYTES // (1 << 20) - 1):
            assert parser.push(piece) == []
        with pytest.raises(EventTooLongError):
            parser.push(piece * 2)
