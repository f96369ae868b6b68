"""Small traces with sums that can be checked by hand."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

# What the GPU traces below hold, by hand: stream 7 runs 1000-1100 (projection), 1100-1150 (norm), 1300-1320 (nothing says what), stream 9
# 1120-1220 (a dense product, by its name). All in microseconds, all of step 3.
SPAN_S, BUSY_S, GAP_S, OVERLAP_S = 320e-6, 240e-6, 80e-6, 30e-6
SECONDS = {"projection": 200e-6, "norm": 50e-6, "other": 20e-6}
COUNTS = {"projection": 2, "norm": 1, "other": 1}
UNCLASSIFIED = 20 / 270


def event(
    category: str, name: str, ts: float, dur: float, tid: int = 1, extra: Mapping[str, Any] = MappingProxyType({}), **arguments: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": {**extra, **arguments}}


def gpu_events() -> list[dict[str, Any]]:
    def kernel(name: str, ts: float, dur: float, stream: int, correlation: int) -> dict[str, Any]:
        return event(
            "kernel", name, ts, dur, stream, device=0, stream=stream, correlation=correlation, extra={"External id": correlation + 10}
        )

    return [
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "args": {"name": "python"}},
        # Out of order on purpose: the profiler does not sort.
        kernel("mystery", 1300, 20, 7, 4),
        kernel("void vendor::custom_norm_v2(int)", 1100, 50, 7, 2),
        event("user_annotation", "norm", 200, 50),
        event("user_annotation", "ProfilerStep#3", 0, 900),
        event("user_annotation", "projection", 100, 200),
        event("user_annotation", "somebody else's range", 0, 900),
        kernel("void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u>(...)", 1000, 100, 7, 1),
        kernel("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", 1120, 100, 9, 3),
        event("cpu_op", "aten::linear", 140, 20, extra={"External id": 11, "Input Dims": [[2, 3], [4, 3], []]}),
        *(event("cuda_runtime", "cudaLaunchKernel", ts, 5, correlation=number) for number, ts in ((1, 150), (2, 210), (3, 400), (4, 500))),
        {"ph": "i", "name": "Iteration Start", "ts": 0, "s": "g"},
    ]


def write_kineto(path: Path, events: list[Any] | None = None, *, tail: bool = False, **head: Any) -> Path:
    """A Chrome trace; ``tail`` puts the metadata behind the events, as older profilers do."""
    metadata = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Test GPU"}], **head}
    listed = {"traceEvents": gpu_events() if events is None else events}
    text = json.dumps({**listed, **metadata} if tail else {**metadata, **listed})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_nsys(path: Path, *, drop: str | None = None) -> Path:
    """The same kernels as an nsys export; ``drop`` leaves a table away."""
    process, thread = 0x1000000 * 5, 0x1000000 * 5 + 77
    strings = ["mystery", "vendor_norm", "void deep_gemm::sm90_fp8_gemm", "nvjet_tst", "norm"]
    kernels = [(1300, 1320, 7, 4, 0), (1100, 1150, 7, 2, 1), (1000, 1100, 7, 1, 2), (1120, 1220, 9, 3, 3)]
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(strings))
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, contextId INT, streamId INT, "
            "correlationId INT, globalPid INT, demangledName INT, shortName INT)"
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, ?, ?, ?, ?, ?)",
            [(start * 1000, end * 1000, stream, number, process, name, name) for start, end, stream, number, name in kernels],
        )
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT)")
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 0)",
            [(ts * 1000, ts * 1000 + 5000, thread, number) for number, ts in ((1, 150), (2, 210), (3, 400), (4, 500))],
        )
        database.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT)")
        database.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)",
            [
                (0, 900_000, 59, "twinfer.step#3", None, thread), (100_000, 300_000, 59, "projection", None, thread),
                (200_000, 250_000, 59, None, 4, thread), (0, None, 34, "a mark", None, thread),
                (0, 900_000, 59, "draft", None, thread + 1),
            ],
        )  # fmt: skip
        if drop:
            database.execute(f"DROP TABLE {drop}")
    database.close()
    return path


CSV = """kernel,stream,step,start_us,duration_us,component,shapes
"void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u>(...)",7,3,1000,100,projection,"[[2, 3]]"
vendor norm,7,3,1100,50,norm,
mystery,7,3,1300,20,,
nvjet_tst,9,3,1120,100,,
"""
