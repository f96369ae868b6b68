"""Workloads from files: each format against what its lines say, and whatever is broken against one clear line."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.errors import ConfigError
from engine.core.events import Admitted, Arrived, Event, Finished, Rejected, StepPlanned, TokensEmitted, encode_lines
from tests.twin.workload.workload_support import digest, serve, write_lines
from twin.workload.spec import WorkloadSpec, make_workload
from twin.workload.types import SimRequest

KEY_TOKENS = 6  # a text of another key may begin with this many equal tokens, less one


def arrivals(path: str, **values: Any) -> list[SimRequest]:
    return list(make_workload(WorkloadSpec(workload=path, **values)).arrivals())


def row(ms: float, tokens: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


# -- Mooncake -----------------------------------------------------------------------------------------------------------------


def common_prefix(first: SimRequest, second: SimRequest) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first.prompt, second.prompt, strict=False)))


@st.composite
def traces(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows whose hash ids walk down a random tree: an id names what came before it too, as hashes of prefixes do."""
    source = random.Random(draw(st.integers(0, 2**32)))
    paths: list[list[int]] = [[]]
    rows = []
    new_ids = itertools.count()
    for index in range(draw(st.integers(2, 8))):
        shared = source.choice(paths)
        ids = shared[: source.randint(0, len(shared))] + list(itertools.islice(new_ids, source.randint(0, 2)))
        paths.append(ids)
        tokens = 512 * len(ids) - source.randint(0, 511) if ids else source.randint(1, 600)
        if ids and source.random() < 0.3:
            tokens = 512 * len(ids) + source.randint(0, 300)  # an end that the ids say nothing of
        rows.append(row(100 * index, max(tokens, 1), ids))
    return rows


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces())
def test_equal_hash_ids_are_equal_tokens_and_others_are_not(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    found = arrivals(write_lines(tmp_path / "t.jsonl", *rows))
    assert [len(request.prompt) for request in found] == [entry["input_length"] for entry in rows]
    for (first, one), (second, other) in itertools.combinations(zip(found, rows, strict=True), 2):
        pairs = zip(one["hash_ids"], other["hash_ids"], strict=False)
        num_blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        wanted = min(512 * num_blocks, len(first.prompt), len(second.prompt))
        assert wanted <= common_prefix(first, second) < wanted + KEY_TOKENS


def test_a_mooncake_trace_replays_its_times_and_lengths(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", row(1000, 1100, [0, 1, 2], 7), row(1500.5, 1030, [0, 1, 7]), "", row(4000, 3, [], 0))
    found = arrivals(path)
    assert [request.arrival_s for request in found] == [0.0, 0.5005, 3.0]
    assert [request.output_tokens for request in found] == [7, 5, 1]
    assert [request.index for request in found] == [0, 1, 2]
    assert all(request.cancel_after_s is None for request in found)
    assert [request.arrival_s for request in arrivals(path, time_scale=0.5)] == [0.0, 0.25025, 1.5]
    assert arrivals(path, requests=2) == found[:2]
    assert digest(arrivals(path, seed=1)) != digest(found)
    timed = arrivals(path, request_rate=4.0, arrival="constant")
    assert [request.arrival_s for request in timed] == [0.0, 0.25, 0.5]
    assert [request.prompt for request in timed] == [request.prompt for request in found]
    closed = serve(make_workload(WorkloadSpec(workload=path, concurrency=1)))
    assert closed.peak == 1
    assert {request.index: request.prompt for request in closed.requests} == {request.index: request.prompt for request in found}


def test_a_trace_and_the_context(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", row(0, 600, [1, 2]), row(0, 700, [1, 3], 50))
    with pytest.raises(ConfigError, match="request 2 of the file: 700 prompt tokens and 50"):
        arrivals(path, max_context=749)
    cut = arrivals(path, max_context=650, over_context="clip")
    assert [(len(request.prompt), request.output_tokens) for request in cut] == [(600, 5), (600, 50)]
    assert cut[1].prompt == arrivals(path)[1].prompt[:600]
    assert [request.max_tokens for request in arrivals(path, max_tokens=9)] == [9, 9]
    assert [request.output_tokens for request in arrivals(path, max_tokens=9)] == [5, 9]


def test_a_trace_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", *(row(index, 20_000, [index * 40 + block for block in range(39)]) for index in range(200)))
    tracemalloc.start()
    try:
        workload = make_workload(WorkloadSpec(workload=path))
        kept_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        assert kept_bytes < 1 << 20  # 200 * 39 block ids and some numbers a request
        assert sum(len(request.prompt) for request in workload.arrivals()) == 200 * 20_000  # 16 MB of tokens
        assert tracemalloc.get_traced_memory()[1] < kept_bytes + (1 << 20)
    finally:
        tracemalloc.stop()


# -- Azure, lengths -----------------------------------------------------------------------------------------------------------


def test_an_azure_trace(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "t.csv",
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-02-28 23:59:59.5000000,374,44",
        "2024-03-01 00:00:00.7500000,12,0",
        "2024-03-01 03:00:00.750000+03:00,13,1",
    )
    found = arrivals(path)
    assert [request.arrival_s for request in found] == pytest.approx([0.0, 86401.25, 86401.25])  # 2024 has a 29th of February
    assert [(len(request.prompt), request.output_tokens) for request in found] == [(374, 44), (12, 1), (13, 1)]


def test_a_table_of_lengths_is_drawn_from(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "l.csv", "input_tokens,output_tokens", "10,1", "200,30")
    found = arrivals(path, request_rate=5.0, requests=400, prefix=5)
    assert {(len(request.prompt), request.output_tokens) for request in found} == {(15, 1), (205, 30)}
    assert len(serve(make_workload(WorkloadSpec(workload=path, concurrency=2, turns=2, requests=9))).requests) == 9


# -- our own traffic ----------------------------------------------------------------------------------------------------------


def ended(request: int, arrived_s: float, ended_s: float, prompt: int, output: int, **values: Any) -> list[Event]:
    cached, reason, parent = values.get("cached", 0), values.get("reason", "length"), values.get("parent")
    return [
        Arrived(arrived_s, request, prompt, parent),
        Admitted(arrived_s + 0.1, request, 0, prompt, cached, "fork" if parent is not None else "prefix" if cached else "cold"),
        StepPlanned(arrived_s + 0.1, 1, 1, 1, 1, 0),
        TokensEmitted(arrived_s + 0.2, request, (5,)),
        Finished(ended_s, request, reason, prompt, output),
    ]


def test_an_event_log_replays_what_arrived_and_ended(tmp_path: Path) -> None:
    log = [
        *ended(1, 100.0, 103.0, 40, 9),
        *ended(2, 99.5, 104.0, 50, 3, cached=32, reason="stop"),
        Rejected(100.0, 3, "queue_full", "no"),
        Arrived(105.0, 4, 10),  # never ended
        *ended(5, 106.0, 107.5, 60, 2, cached=40, reason="abort"),
        *ended(6, 108.0, 109.0, 30, 2),
        *ended(7, 108.0, 109.0, 30, 4, parent=6),
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode_lines(log))
    found = arrivals(str(path))
    assert [request.arrival_s for request in found] == [0.0, 0.5, 6.5, 8.5, 8.5]
    assert [(len(request.prompt), request.output_tokens) for request in found] == [(50, 3), (40, 9), (60, 2), (30, 2), (30, 4)]
    assert [request.cancel_after_s for request in found] == [None, None, 1.5, None, None]
    assert found[0].prompt[:32] == found[2].prompt[:32]  # what the cache had
    assert found[3].prompt == found[4].prompt  # samples of one request
    assert common_prefix(found[0], found[1]) < KEY_TOKENS
    assert arrivals(str(path), requests=2) == found[:2]


# -- broken, foreign, mangled -------------------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
CLIENT = {"rate": 1.0, "input_tokens": 5, "output_tokens": 5}
NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([], ["no request in it"]),
        (["", "  "], ["no request in it"]),
        (["hello"], ["line 1", "'hello'", "Mooncake"]),
        (["a,b,c", "1,2,3"], ["line 1", "a,b,c"]),
        (["{"], ["line 1", "not JSON"]),
        ([NESTED], ["line 1", "not JSON"]),
        (['{"type": "arrived", "x": ' + NESTED], ["line 1"]),
        ([{"a": 1}], ["line 1", "clients"]),
        ([{"prompt": "hi"}], ["line 1", "tokenizer"]),
        ([[1, 2]], ["line 1"]),
        ([row(0, 5, []), row(0, -1, [])], ["line 2", "input_length", "-1"]),
        ([row(0, 5, []), row(0, 1 << 25, [])], ["line 2", "input_length", "16777216"]),
        ([row(0, 5, []), "", row(0, 1, [], True)], ["line 3", "output_length", "True"]),
        ([row(5, 5, []), row(4, 5, [])], ["line 2", "sort"]),
        ([row(0, 512, [1, 2])], ["2 hash_ids", "512"]),
        ([row(0, 512, [2**63])], ["hash_ids"]),
        ([row(1e300, 5, [])], ["timestamp"]),
        (['{"timestamp": NaN, "input_length": 5, "output_length": 5}'], ["timestamp", "nan"]),
        ([row(0, 5, []), {"prompt": "hi"}], ["text among"]),
        ([row(0, 5, []), '{"timestamp": 5, "input_le'], ["line 2", "not JSON"]),
        (["TIMESTAMP,Context,Generated"], ["header", "ContextTokens"]),
        ([HEADER], ["no request in it"]),
        ([HEADER, "yesterday,1,1"], ["line 2", "yesterday"]),
        ([HEADER, "2023-02-29 18:15:46,1,1"], ["line 2", "2023-02-29"]),
        ([HEADER, "2023-11-16 18:15:46,1"], ["line 2", "2 fields"]),
        ([HEADER, "2023-11-16 18:15:46,1,99999999999"], ["GeneratedTokens", "99999999999"]),
        (["input_tokens,output_tokens"], ["no lengths"]),
        (["input_tokens,output_tokens", "5"], ["line 2", "1 fields"]),
        (["input_tokens,output_tokens", "5,x"], ["line 2", "output_tokens"]),
        ([{"type": "planned"}], ["no request in it has arrived and ended"]),
        ([{"type": "arrived", "now_s": 1, "request": 1}], ["line 1", "num_prompt_tokens"]),
        ([{"type": "arrived", "now_s": 1e13, "request": 1, "num_prompt_tokens": 1}], ["line 1", "now_s"]),
        ([{"type": "arrived", "now_s": 1, "request": 1, "num_prompt_tokens": -4}], ["line 1", "num_prompt_tokens", "-4"]),
        ([{"step": 1, "plan": {}, "seconds": 1.0}], ["--record-trace", "event log"]),
        ([CLIENT, {"rate": 1.0}], ["line 2", "input_tokens"]),
        ([CLIENT, [1]], ["line 2", "a client"]),
        ([{**CLIENT, "rate": 0}], ["send nothing"]),
        ([{**CLIENT, "rate": -1}], ["rate is -1"]),
        ([{**CLIENT, "rate": True}], ["rate is True"]),
        ([{**CLIENT, "rate": [[1, 1]]}], ["ascend from 0"]),
        ([{**CLIENT, "rate": [[0, 1], [0, 2]]}], ["ascend from 0"]),
        ([{**CLIENT, "rate": []}], ["pairs"]),
        ([{**CLIENT, "cv": 1e9}], ["cv is 1000000000.0"]),
        ([{**CLIENT, "speed": 3}], ["unknown field 'speed'"]),
        ([{**CLIENT, "prefix_tokens": 0.5}], ["prefix_tokens"]),
        ([{**CLIENT, "input_tokens": [5, 4]}], ["input_tokens", "low end"]),
        ([{**CLIENT, "input_tokens": True}], ["input_tokens is True"]),
        ([{**CLIENT, "output_tokens": {"mean": 0, "cv": 1}}], ["output_tokens's mean"]),
        ([{**CLIENT, "output_tokens": {"values": [1, 2], "weights": [1]}}], ["2 values and 1 weights"]),
        ([{**CLIENT, "output_tokens": {"values": [1], "weights": [0]}}], ["all 0"]),
        ([{**CLIENT, "output_tokens": {"values": [0], "weights": [1]}}], ["output_tokens is 0"]),
        ([{**CLIENT, "output_tokens": {"mean": 5}}], ["needed: N, [LOW, HIGH]"]),
    ],
)
def test_a_file_that_is_wrong_says_where_and_what(tmp_path: Path, lines: list[object], parts: list[str]) -> None:
    path = write_lines(tmp_path / "t", *lines)
    with pytest.raises(ConfigError) as caught:
        arrivals(path)
    for part in (path, *parts):
        assert part in str(caught.value) or (part == path and "clients of the file" in str(caught.value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_no_file_or_has_no_end(tmp_path: Path) -> None:
    (tmp_path / "steps.rank0.jsonl").write_text("{}")
    (tmp_path / "binary").write_bytes(b"{\xff\xfe")
    for path, part in (("/no/such", "no such file"), ("/dev/zero", "longer than"), (str(tmp_path), "--record-trace"), ("a\0b", "no name")):
        with pytest.raises(ConfigError, match=part):
            arrivals(path)
    with pytest.raises(ConfigError, match="not UTF-8"):
        arrivals(str(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("lines", "values", "said"),
    [
        ([row(0, 5, [])], {"turns": 2}, "--turns 2 has no effect with --workload"),
        ([row(0, 5, [])], {"isl": "7"}, "--isl 7"),
        ([row(0, 5, [])], {"prefix": 7}, "--prefix 7"),
        ([row(0, 5, [])], {"arrival": "constant"}, "--arrival constant"),
        ([row(0, 5, [])], {"think_time": 1.0}, "--think-time 1.0"),
        ([row(0, 5, [])], {"time_scale": 2.0, "concurrency": 2}, "--time-scale 2.0"),
        (["input_tokens,output_tokens", "5,5"], {}, "no arrivals"),
        (["input_tokens,output_tokens", "5,5"], {"request_rate": 1.0, "osl": "9"}, "--osl 9"),
        ([CLIENT], {"concurrency": 2}, "--concurrency cannot"),
        ([CLIENT], {"request_rate": 5.0, "ramp_to": 7.0}, "--ramp-to 7.0"),
    ],
)
def test_options_that_a_file_leaves_no_room_for(tmp_path: Path, lines: list[object], values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arrivals(write_lines(tmp_path / "t", *lines), **values)
    assert said in str(caught.value)


def _valid() -> list[bytes]:
    mooncake = [row(0, 600, [1, 2]), row(7.5, 1025, [1, 3, 4], 9)]
    clients = [{**CLIENT, "cv": 0.5, "rate": [[0, 2.0], [5, 0]]}, {**CLIENT, "output_tokens": {"values": [1, 2], "weights": [1, 3.5]}}]
    as_lines = [b"".join(json.dumps(entry).encode() + b"\n" for entry in entries) for entries in (mooncake, clients)]
    azure = f"{HEADER}\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n".encode()
    return [*as_lines, azure, encode_lines([*ended(1, 1.0, 2.0, 8, 2), *ended(2, 1.5, 4.0, 9, 3, cached=4, reason="abort")])]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(_valid()), st.data())
def test_a_mangled_file_is_a_workload_or_one_clear_line(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 12)))
        tokens = [b"-1", b"1e400", b"null", b"9" * 30, b"[", b"{", b'"', b",", b"\n", b"\r", b"\x00", b"\xff", b"\\ud800", b"NaN", b"true"]
        content = content[:start] + data.draw(st.sampled_from(tokens) | st.binary(max_size=4) | st.just(b"")) + content[end:]
    path = tmp_path / "mangled"
    path.write_bytes(content)
    try:
        found = arrivals(str(path), requests=20, max_context=1 << 20, over_context="clip")
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 700
        message.encode()
        return
    assert found
    assert all(later.arrival_s >= earlier.arrival_s >= 0 for earlier, later in itertools.pairwise(found))
    assert all(request.output_tokens >= 1 and len(request.prompt) >= 1 for request in found)
