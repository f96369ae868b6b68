"""demo: against an engine whose true step times are known. What it runs is faked; what it predicts, writes down and draws is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import twinfer
from calibration import store
from calibration.cost_model import CalibratedCost
from calibration.features import table_of_plans
from calibration.probe import Probe
from calibration.steady import Load, closed_loop
from dashboards.demo_report import demo_report
from engine.cli.step_bench import StepLoad
from engine.cli.step_runs import StepRun
from engine.core.layout import parse_layout
from tests.calibration.synthetic import tiny, true_fit
from tests.disk import full_disk
from twin.ledger import Ledger, Prediction

SLOWER = 1.2
ARGUMENTS = ("demo", "--batch-sizes", "1,4", "--context", "64", "--new-tokens", "12", "--layout", "tp1dp1ep1,tp1dp2ep2")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.zip"
    store.save(path, store.new_calibration((true_fit(tiny()),), Probe(1.0, 1.0, 1.0)), [], [])
    return path


class FakeEngine:
    """``bench steps`` on the calibrated machine, so many times as slow. Notes what was in the ledger when a run began."""

    def __init__(self, ledger: Path, factor: float = SLOWER) -> None:
        self.ledger, self.factor = ledger, factor
        self.sessions: list[tuple[str, list[int], int]] = []

    def __call__(self, _model: str, layout: str, loads: Sequence[tuple[int, int, int]], **_options: Any) -> list[StepRun]:
        predictions = [entry for entry in Ledger(self.ledger).entries() if isinstance(entry, Prediction)]
        self.sessions.append((layout, [load[0] for load in loads], len(predictions)))
        spec, unit = tiny(), parse_layout(layout).decode.unit
        cost, runs = CalibratedCost(true_fit(spec), spec, unit), []
        for batch, context, new_tokens in loads:
            plans = closed_loop(Load(batch, context, new_tokens, unit.dp, has_sequence_state=spec.has_sequence_state)).plans
            steps_s = [float(one) * self.factor for one in cost.price_table(table_of_plans(plans, spec)).step_s]
            runs.append(StepRun(StepLoad(batch, context, new_tokens), plans, steps_s, steps_s))
        return runs


def demo(
    calibration: Path, out: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str]:
    monkeypatch.setattr("twin.speed.run_probe", lambda: Probe(1.0, 1.0, 1.0))
    monkeypatch.setattr(twinfer, "_run_steps", engine)
    code = twinfer.main([*ARGUMENTS, "--calibration", str(calibration), "--out", str(out), *more])
    return code, capsys.readouterr().out


def test_every_point_is_predicted_before_it_is_run_and_compared_after(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    engine = FakeEngine(out / "ledger.jsonl")
    code, text = demo(calibration, out, engine, monkeypatch, capsys, "--json")
    assert code == 0
    found = json.loads(text)
    assert [(row["layout"], row["batch"]) for row in found["points"]] == [
        (layout, batch) for layout in ("tp1dp1ep1", "tp1dp2ep2") for batch in (1, 4)
    ]
    for row in found["points"]:
        for one in (row, row["again"]):
            assert one["error"] == pytest.approx(1 / SLOWER - 1.0)
            assert one["inside"] is False
            assert one["predicted"]["lo_s"] < one["predicted"]["step_s"] < one["predicted"]["hi_s"] < one["measured"]["step_s"]
        assert row["repetition"] == 0.0
    assert found["median_error"] == pytest.approx(1 - 1 / SLOWER)
    assert (found["runs"], found["inside"]) == (8, 0)
    assert engine.sessions == [(layout, [1, 4], 2 * number) for number, layout in enumerate(("tp1dp1ep1", "tp1dp2ep2") * 2, start=1)]
    pairs = Ledger(out / "ledger.jsonl").pairs()
    assert len(pairs) == 8
    for pair in pairs:
        assert len(pair.measurements) == 1
        assert pair.prediction.time <= pair.measurements[0].time
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "0 of 8 measurements are inside the predicted interval" in page
    assert "https://" not in page.split("<script>")[0]


def test_the_table_is_what_a_person_reads(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = demo(calibration, tmp_path, FakeEngine(tmp_path / "ledger.jsonl", 1.0), monkeypatch, capsys)
    assert code == 0
    lines = text.splitlines()
    assert len(lines) == 7
    assert all("+0.0%" in line and "outside" not in line for line in lines[1:5])
    assert lines[5] == "median error 0.0% of 8 runs, 8 of them inside their interval; two runs of the same differ by 0.0% (median)"


def test_what_does_not_fit_the_budget_is_not_run_and_says_so(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(tmp_path / "ledger.jsonl")
    now_s = [0.0]
    monkeypatch.setattr("twin.demo.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    real_call = FakeEngine.__call__

    def slow(*arguments: Any, **options: Any) -> list[StepRun]:
        now_s[0] += 130.0
        return real_call(engine, *arguments, **options)

    monkeypatch.setattr(twinfer, "_run_steps", slow)
    monkeypatch.setattr("twin.speed.run_probe", lambda: Probe(1.0, 1.0, 1.0))
    now_s[0] = 0.0
    code = twinfer.main([*ARGUMENTS, "--calibration", str(calibration), "--out", str(tmp_path), "--budget", "180", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [layout for layout, _, _ in engine.sessions] == ["tp1dp1ep1", "tp1dp2ep2"]  # no time for a second round
    assert found["points"][0]["again"] is None
    now_s[0] = 0.0
    code = twinfer.main([*ARGUMENTS[:-1], "tp1dp1ep1,tp1dp2ep2,tp2dp1ep1", "--calibration", str(calibration), "--out", str(tmp_path),
                         "--budget", "180", "--json"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert [row["reason"] != "" for row in found["points"]] == [False] * 5 + [True]  # the smallest of each layout is run all the same
    assert found["points"][5]["measured"] is None
    assert demo_report(found).count("not run: the budget was spent") >= 2


def test_a_report_that_cannot_be_written_leaves_the_last_one(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    page.write_text("what was there")
    with full_disk(20_000):  # enough for the ledger
        code, _ = demo(calibration, tmp_path, FakeEngine(tmp_path / "ledger.jsonl"), monkeypatch, capsys)
    assert code == 1
    assert page.read_text() == "what was there"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ledger.jsonl", "report.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "10"), "--budget is 10 s; needed: 180 to 7200"),
        (("--budget", "nan"), "--budget is nan s"),
        (("--context", "0"), "--context is 0"),
        (("--new-tokens", "-1"), "--new-tokens is -1"),
        (("--context", "4090"), "--context 4090 and --new-tokens 32 exceed the 4096 tokens a request may have"),
        (("--batch-sizes", "1,x"), "--batch-sizes is '1,x'"),
        (("--layout", "tp1pp2"), "pipeline parallelism (pp2)"),
        (("--layout", "4x(tp1dp1ep1)"), "4x"),
        (("--calibration", "none.zip"), "none.zip cannot be read"),
        (("--model", "nobody/knows"), "nobody/knows"),
        (("--out", "demo.html"), "--out demo.html names a file; needed: a folder, which will hold calibration, ledger and report"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert twinfer.main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_an_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    """While it calibrates: its measuring processes are gone with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "twinfer", "demo", "--out", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _until(lambda: _group(process.pid, b"calibration.microbench"), 30.0)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert out == b""
    assert err.rstrip().endswith(b"interrupted")
    assert b"Traceback" not in err
    _until(lambda: not _group(process.pid, b""), 10.0)


def _group(session: int, text: bytes) -> list[int]:
    """Living processes of the session whose command line has ``text``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in ("Z", "X") and text in command:
            found.append(int(entry.name))
    return found


def _until(condition: Any, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true"
        time.sleep(0.05)
