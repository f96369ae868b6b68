"""Each importer against sums made by hand, and against files that are not what they seem."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.analysis import summarise
from calibration.errors import TraceError
from calibration.importers import import_trace
from calibration.rules import load_rules
from calibration.trace import KernelTable, Origin
from engine.core.specs import COMPONENTS
from tests.calibration.trace_files import (
    BUSY_S,
    COUNTS,
    CSV,
    GAP_S,
    OVERLAP_S,
    SECONDS,
    SPAN_S,
    UNCLASSIFIED,
    event,
    gpu_events,
    write_kineto,
    write_nsys,
)

RULES = load_rules()


def read(path: Path) -> KernelTable:
    return import_trace([path], RULES)


def write_csv(path: Path, text: str = CSV) -> Path:
    path.write_text(text)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "trace.json": write_kineto,
    "trace.json.gz": write_kineto,
    "trace.sqlite": write_nsys,
    "trace.csv": write_csv,
}


@pytest.mark.parametrize("name", WRITERS)
def test_known_sums(tmp_path: Path, name: str) -> None:
    table = read(WRITERS[name](tmp_path / name))
    summary = summarise(table)
    assert (summary.num_kernels, summary.num_steps, len(summary.streams)) == (4, 1, 2)
    assert summary.span_s == pytest.approx(SPAN_S)
    assert summary.busy_s == pytest.approx(BUSY_S)
    assert summary.gap_s == pytest.approx(GAP_S)
    assert summary.overlap_s == pytest.approx(OVERLAP_S)
    assert summary.launch_gap_s == pytest.approx(GAP_S)
    assert summary.step_gap_s == 0
    assert {name: time.seconds for name, time in summary.by_component.items()} == pytest.approx(SECONDS)
    assert {name: time.count for name, time in summary.by_component.items()} == COUNTS
    assert summary.unclassified_share == pytest.approx(UNCLASSIFIED)
    assert summary.unclassified_kernels == pytest.approx({"mystery": 20e-6})
    assert set(table.step[table.in_step]) == {3}
    assert table.in_step.all()


def test_range_wins_over_name_and_shapes_come_from_the_operator(tmp_path: Path) -> None:
    table = read(write_kineto(tmp_path / "t.json"))
    first = {table.kernel_names[code]: row for row, code in enumerate(table.kernel)}
    gemm, norm, dense = (next(row for name, row in first.items() if part in name) for part in ("deep_gemm", "custom_norm", "nvjet"))
    assert table.shape_names[table.shapes[gemm]] == "[[2, 3], [4, 3], []]"
    assert table.shape_names[table.shapes[norm]] == ""
    assert [Origin(table.origin[row]) for row in (gemm, norm, dense)] == [Origin.RANGE, Origin.RANGE, Origin.RULE]
    assert table.start_s[gemm] == 0
    assert table.sources[0].device == "Test GPU"


def test_kernels_of_a_graph_take_the_range_on_their_stream(tmp_path: Path) -> None:
    events = [
        event("gpu_user_annotation", "ProfilerStep#1", 1000, 100, 7, device=0, stream=7),
        event("gpu_user_annotation", "router", 1000, 40, 7, device=0, stream=7),
        event("kernel", "mystery", 1010, 10, 7, device=0, stream=7, correlation=99),
        event("kernel", "mystery", 1050, 10, 7, device=0, stream=7, correlation=99),
    ]
    table = read(write_kineto(tmp_path / "t.json", events))
    assert [COMPONENTS[code] for code in table.component] == ["router", "other"]
    assert list(table.step) == [1, 1]


def test_nsys_processes_are_ranks_and_share_no_correlations(tmp_path: Path) -> None:
    """A second process, late to the all-reduce by 30 us, with correlation numbers of the first one's kernels."""
    path = write_nsys(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
        database.execute("DELETE FROM NVTX_EVENTS")
        database.execute("INSERT INTO StringIds VALUES (50, 'ncclDevKernel_AllReduce_Sum_bf16_RING_LL')")
        for process, start, label in ((5, 1000, "draft"), (6, 1030, "lm_head")):
            owner, thread = 0x1000000 * process, 0x1000000 * process + 77
            row = (start * 1000, 1_100_000, process - 5, owner)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, 7, 90, ?, 50, 50)", row)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1200000, 1210000, ?, 1, 7, 91, ?, 0, 0)", row[2:])
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (50, 60, ?, 91, 0)", (thread,))
            database.execute("INSERT INTO NVTX_EVENTS VALUES (0, 900, 59, ?, NULL, ?)", (label, thread))
    database.close()
    summary = summarise(read(path))
    assert [rank.rank for rank in summary.ranks] == [0, 1]
    assert [rank.peer_wait_s for rank in summary.ranks] == pytest.approx([30e-6, 0])
    assert {name: time.count for name, time in summary.by_component.items()} == {"all_reduce": 2, "draft": 1, "lm_head": 1}


def test_cpu_operators_and_what_their_ranges_leave(tmp_path: Path) -> None:
    """A range of 100 us: an operator of 30 (with another inside), an inner range of 20, an operator of 10;
    another inner range, of 5, begins with the outer one."""
    events = [
        event("user_annotation", "twinfer.step#0", 0, 200),
        event("user_annotation", "router", 10, 5),
        event("user_annotation", "projection", 10, 100),
        event("cpu_op", "aten::linear", 20, 30, extra={"External id": 1, "Input Dims": [[8, 4]]}),
        event("cpu_op", "aten::addmm", 25, 20, extra={"External id": 2}),
        event("user_annotation", "norm", 60, 20),
        event("cpu_op", "aten::copy_", 90, 10, extra={"External id": 3}),
        event("cpu_op", "aten::argmax", 150, 5, extra={"External id": 4}),
    ]
    table = read(write_kineto(tmp_path / "t.json", events))
    found = {name: time.seconds for name, time in summarise(table).by_component.items()}
    assert found == pytest.approx({"projection": 75e-6, "router": 5e-6, "norm": 20e-6, "sampler": 5e-6})
    names = [table.kernel_names[code] for code in table.kernel]
    assert "aten::addmm" not in names
    assert table.shape_names[table.shapes[names.index("aten::linear")]] == "[[8, 4]]"


@pytest.mark.parametrize("tail", [False, True])
def test_ranks_come_from_the_trace_and_clocks_are_aligned(tmp_path: Path, tail: bool) -> None:
    paths = [
        write_kineto(tmp_path / f"r{rank}.json", distributedInfo={"rank": rank, "world_size": 4}, baseTimeNanoseconds=base, tail=tail)
        for rank, base in ((2, 10**18), (3, 10**18 + 50_000))
    ]
    table = import_trace(paths, RULES)
    assert table.ranks == (2, 3)
    assert table.span_s == pytest.approx(SPAN_S + 50e-6)
    assert table.start_s[table.rank == 3].min() == pytest.approx(50e-6)
    with pytest.raises(TraceError, match="both of rank 2"):
        import_trace([paths[0], paths[0]], RULES)


def broken(tmp_path: Path, case: str) -> Path:
    """A file of each kind that must be refused."""
    path = tmp_path / "t.json"
    numbers: dict[str, dict[str, Any]] = {
        "negative duration": {"dur": -1}, "infinite": {"ts": 1e400}, "huge": {"ts": 1e30}, "text": {"ts": "12"}, "true": {"dur": True},
        "too far apart": {"ts": 1e14},
    }  # fmt: skip
    if case in numbers:
        text = json.dumps({"traceEvents": [*gpu_events(), {**event("kernel", "k", 1, 1, stream=7), **numbers[case]}]})
        path.write_text(text.replace("Infinity", "1e400"))
    elif case == "nan":
        path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 1}]}')
    elif case == "truncated gz":
        path = tmp_path / "t.json.gz"
        whole = write_kineto(path).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif case == "garbage gz":
        path = tmp_path / "t.json.gz"
        path.write_bytes(b"\x1f\x8b\x08\x00" + b"garbage" * 20)
    elif case == "truncated":
        write_kineto(path)
        path.write_bytes(path.read_bytes()[:-200])
    elif case == "two documents":
        path.write_text('{"traceEvents": []} {"traceEvents": []}')
    elif case == "text after a brace":
        path.write_text("{ this is no json")
    elif case == "empty":
        path.write_text("")
    elif case == "other json":
        path.write_text('{"hello": [1, 2, 3]}')
    elif case == "no events":
        path.write_text('{"traceEvents": []}')
    elif case == "events of another kind":
        path.write_text('{"traceEvents": [1, 2]}')
    elif case == "browser trace":
        path.write_text('[{"ph": "B", "cat": "v8", "name": "run", "ts": 1}, {"ph": "E", "cat": "v8", "name": "run", "ts": 2}]')
    elif case == "foreign binary":
        path.write_bytes(b"\x00\x01\x02\x03" * 100)
    elif case == "bad rank":
        write_kineto(path, distributedInfo={"rank": -5})
    elif case == "missing":
        return tmp_path / "nothing.json"
    elif case == "folder":
        return tmp_path
    elif case == "foreign sqlite":
        with sqlite3.connect(tmp_path / "t.sqlite") as database:
            database.execute("CREATE TABLE bookmarks (url TEXT)")
        database.close()
        return tmp_path / "t.sqlite"
    elif case == "sqlite without kernels":
        return write_nsys(tmp_path / "t.sqlite", drop="CUPTI_ACTIVITY_KIND_KERNEL")
    elif case == "truncated sqlite":
        path = write_nsys(tmp_path / "t.sqlite")
        path.write_bytes(path.read_bytes()[:3000])
    elif case == "sqlite with a view for its kernels":
        path = write_nsys(tmp_path / "t.sqlite", drop="CUPTI_ACTIVITY_KIND_KERNEL")
        with sqlite3.connect(path) as database:
            endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i + 1 AS end FROM n"
            database.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
        database.close()
    elif case in ("sqlite with text for a time", "sqlite that ends before it starts"):
        path = write_nsys(tmp_path / "t.sqlite")
        value = "'soon'" if "text" in case else "1"
        with sqlite3.connect(path) as database:
            database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = {value} WHERE streamId = 9")
        database.close()
    else:
        lines = CSV.splitlines()
        edits = {
            "csv without kernel": CSV.replace("kernel,", "name,", 1),
            "csv with two units": CSV.replace("duration_us", "start_ms"),
            "csv with nan": CSV.replace("1100,50", "1100,nan"),
            "csv with a negative duration": CSV.replace("1100,50", "1100,-50"),
            "csv with a long exponent": CSV.replace("1100,50", "1100,1e999999999"),
            "csv with an unknown component": CSV.replace(",norm,", ",normal,"),
            "csv with a short line": "\n".join([*lines, "k,7"]),
            "csv with no rows": lines[0],
            "csv of another encoding": "",
        }
        path = write_csv(tmp_path / "t.csv", edits[case])
        if case == "csv of another encoding":
            path.write_bytes(CSV.replace("vendor", "vénd").encode("latin-1"))
    return path


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("negative duration", "dur is '-1'"), ("infinite", "ts is '1E+400'"), ("huge", "ts is '1E+30'"), ("text", "ts is '12'"),
        ("true", "dur is 'True'"),
        ("too far apart", "are the units right"), ("nan", "broken or truncated after 0 events"),
        ("truncated gz", "broken or truncated"), ("garbage gz", "broken or truncated"), ("truncated", "broken or truncated"),
        ("two documents", "broken or truncated"), ("text after a brace", "broken or truncated"), ("empty", "is empty"),
        ("other json", "no GPU kernel, no CPU operator"), ("no events", "has 0 events"), ("events of another kind", "not an object"),
        ("browser trace", "has 2 events, but no GPU kernel"), ("foreign binary", "none of the formats"), ("bad rank", "--rank"),
        ("missing", "No such file"), ("folder", "is a folder without trace.rank"), ("foreign sqlite", "not an nsys export"),
        ("sqlite without kernels", "no table CUPTI_ACTIVITY_KIND_KERNEL"), ("truncated sqlite", "broken SQLite"),
        ("sqlite with a view for its kernels", "no table CUPTI_ACTIVITY_KIND_KERNEL"),
        ("sqlite with text for a time", "needed: an integer"),
        ("sqlite that ends before it starts", "before it starts"), ("csv without kernel", "known, once each"),
        ("csv with two units", "are one thing"), ("csv with nan", "line 3, duration_us: 'nan'"),
        ("csv with a negative duration", "line 3: the kernel lasts"), ("csv with a long exponent", "no number of seconds"),
        ("csv with an unknown component", "component 'normal'"), ("csv with a short line", "more or fewer fields"),
        ("csv with no rows", "no rows"), ("csv of another encoding", "UTF-8"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, case: str, says: str) -> None:
    path = broken(tmp_path, case)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert says in str(caught.value)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_large_trace_streams(tmp_path: Path) -> None:
    """The parser's memory does not grow with the file: after the first events, what is kept is the table's columns."""
    import tracemalloc

    path = tmp_path / "large.json.gz"
    filler = {"External id": 1, "grid": [1, 2, 3], "note": "x" * 900}
    one = json.dumps(event("python_function", "f", 1, 1, extra=filler)) + ","
    count = 20_000
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        for _ in range(count // 1000):
            file.write(one * 1000)
        file.write(json.dumps(event("kernel", "nvjet", 5, 1, stream=7)) + "]}")
    assert count * len(one) > 20_000_000
    tracemalloc.start()
    try:
        table = read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 1
    assert peak_bytes < 6_000_000


def test_one_endless_event_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.importers.kineto.MAX_EVENT_BYTES", 1 << 20)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "' + "x" * (3 << 20) + '"}]}')
    with pytest.raises(TraceError, match="1 MiB without an event"):
        read(path)


def test_absolute_nanoseconds_in_csv_keep_their_digits(tmp_path: Path) -> None:
    base = 1_796_081_906_217_817_832
    text = f"kernel,start_ns,end_ns\na,{base},{base + 7}\nb,{base + 9},{base + 10}\n"
    table = read(write_csv(tmp_path / "t.csv", text))
    np.testing.assert_allclose(table.start_s, [0, 9e-9], atol=1e-15)
    np.testing.assert_allclose(table.duration_s, [7e-9, 1e-9], atol=1e-15)
