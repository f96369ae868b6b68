"""``twinfer trace`` as users call it: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import twinfer
from calibration.importers import aic
from tests.calibration.test_tables import aic_root  # noqa: F401 - a fixture
from tests.calibration.trace_files import BUSY_S, COUNTS, GAP_S, SECONDS, SPAN_S, UNCLASSIFIED, write_kineto
from tests.disk import REASON, full_disk

KEYS = {"num_kernels", "span_s", "busy_s", "gap_s", "by_component", "unclassified_share", "streams"}


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert twinfer.main(["trace", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def check(found: dict[str, Any]) -> None:
    assert set(found) >= KEYS
    assert found["num_kernels"] == 4
    assert [found["span_s"], found["busy_s"], found["gap_s"]] == pytest.approx([SPAN_S, BUSY_S, GAP_S])
    assert {name: time["seconds"] for name, time in found["by_component"].items()} == pytest.approx(SECONDS)
    assert {name: time["count"] for name, time in found["by_component"].items()} == COUNTS
    assert found["unclassified_share"] == pytest.approx(UNCLASSIFIED)
    assert [stream["num_kernels"] for stream in found["streams"]] == [3, 1]
    assert abs(found["replay"]["relative_error"]) < 0.02


def test_import_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write_kineto(tmp_path / "t.json.gz"), tmp_path / "t.parquet"
    check(as_json(capsys, "import", str(trace), "--out", str(out)))
    check(as_json(capsys, "show", str(out)))
    assert twinfer.main(["trace", "show", str(out)]) == 0
    assert "unclassified: 7.4% of the kernels' time" in capsys.readouterr().out


def test_import_without_out_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = write_kineto(tmp_path / "t.json")
    assert twinfer.main(["trace", "import", str(trace)]) == 0
    assert "nothing written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": [', b"\x1f\x8b\x08", b"SQLite format 3\x00 and no more", b"PAR1 and no more"])
def test_a_broken_file_is_one_line_and_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    trace, out = tmp_path / "t.json", tmp_path / "old.parquet"
    trace.write_bytes(content)
    out.write_text("what was there")
    assert twinfer.main(["trace", "import", str(trace), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "t.json" in captured.err
    assert out.read_text() == "what was there"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "arguments",
    [("import", "t.json", "--rank", "-1"), ("record", "tiny-v41", "--out", "d", "--batch-size", "0"), ("import",), ("show", "a", "b")],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    try:
        code = twinfer.main(["trace", *arguments])
    except SystemExit as exit_of_argparse:
        code = int(str(exit_of_argparse.code))
    assert code == 2
    assert capsys.readouterr().out == ""


def test_out_into_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_kineto(tmp_path / "t.json")
    assert twinfer.main(["trace", "import", str(trace), "--out", str(tmp_path / "no" / "t.parquet")]) == 2
    assert "t.parquet cannot be written" in capsys.readouterr().err


def test_points(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, aic_root: Path) -> None:  # noqa: F811
    monkeypatch.setattr(aic, "data_root", lambda: (aic_root, "0.12.0"))
    out = tmp_path / "p.parquet"
    found = as_json(capsys, "import", "aic:gb300/sglang", "--out", str(out))
    assert found["num_points"] == 10
    assert found["ops"]["gemm"]["component"] == "projection"
    assert as_json(capsys, "show", str(out)) == found
    assert twinfer.main(["trace", "import", "aic:gb300/sglang", "x.json"]) == 2
    assert "stands alone" in capsys.readouterr().err


def test_points_without_the_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aic, "_MODULE", "no_such_package_anywhere")
    assert twinfer.main(["trace", "import", "aic:gb300/sglang"]) == 2
    assert "twinfer[silicon]" in capsys.readouterr().err


def test_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rec"
    small = ("--batch-size", "1", "--context", "4", "--new-tokens", "2", "--device", "cpu")
    found = as_json(capsys, "record", "tiny-v41", "--out", str(folder), *small)
    assert found["num_steps"] == 2
    assert {"attention.sparse", "expert_gemm", "indexer", "mhc", "lm_head"} <= set(found["by_component"])
    assert abs(found["replay"]["relative_error"]) < 0.02
    assert found["unclassified_share"] < 0.05
    assert sorted(path.name for path in folder.iterdir()) == [
        "environment.rank0.json", "kernels.parquet", "steps.rank0.jsonl", "trace.rank0.json.gz",
    ]  # fmt: skip
    timed = as_json(capsys, "record", "tiny-v41", "--out", str(tmp_path / "timers"), "--mode", "timers", *small)
    assert timed["num_steps"] == 2
    assert set(timed["by_component"]) == set(found["by_component"])
    # A recording's folder is imported as its traces are; one of timers has none.
    again = as_json(capsys, "import", str(folder))
    assert (again["num_kernels"], again["by_component"]) == (found["num_kernels"], found["by_component"])
    for path in (tmp_path / "timers", tmp_path / "timers" / "steps.rank0.jsonl"):
        assert twinfer.main(["trace", "import", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"twinfer trace: {path} was recorded in mode timers: ")
        assert "`twinfer calibrate --from DIR`" in error
        assert "mode profile" in error
    assert twinfer.main(["trace", "show", str(folder)]) == 2
    assert "is a folder; needed: a table" in capsys.readouterr().err
    assert twinfer.main(["trace", "record", "tiny-v41", "--out", str(folder), *small]) == 2
    assert "already holds a recording" in capsys.readouterr().err


def test_out_is_a_folder_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_kineto(tmp_path / "t.json")
    assert twinfer.main(["trace", "import", str(trace), "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} cannot be written: it is a folder" in capsys.readouterr().err
    assert twinfer.main(["trace", "record", "tiny-v41", "--out", str(tmp_path / "x.parquet")]) == 2
    assert "x.parquet names a file; needed: a folder, which will hold the recording" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [trace]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write_kineto(tmp_path / "t.json"), tmp_path / "old.parquet"
    out.write_text("what was there")
    with full_disk(1000):
        assert twinfer.main(["trace", "import", str(trace), "--out", str(out)]) == 1
    assert capsys.readouterr() == ("", f"twinfer trace: --out {out} cannot be written: {REASON}\n")
    assert out.read_text() == "what was there"
    assert len(list(tmp_path.iterdir())) == 2
