"""The ledger: what is promised is on the disk, what is broken is refused, and writers do not get into each other's lines."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.errors import ConfigError, OutputError
from tests.disk import REASON, full_disk
from twin.ledger import Ledger, Prediction, Quantity, Speed, Value, error, is_inside, measured, predict

SPEED = Speed(0.001, 0.002, 0.003, 1.1, 1.0, 0.9)


def prediction(number: int = 0, note: str = "") -> Prediction:
    question: dict[str, Value] = {"model": "tiny-v41", "layout": "tp1dp1ep1", "batch": number}
    return predict("test", question, {"step_s": Quantity(0.01, 0.009, 0.012)}, calibration_sha256="ab" * 32, speed=SPEED, note=note)


def test_entries_come_back_as_they_were_written_and_in_pairs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    one, two = prediction(1), prediction(2, "ümläut, \u2028 and \n")
    ledger.append([one, two])
    result = measured(one, {"step_s": Quantity(0.011, 0.010, 0.013)}, SPEED)
    Ledger(ledger.path).append([result])
    assert ledger.entries() == [one, two, result]
    assert [(pair.prediction, pair.measurements) for pair in ledger.pairs()] == [(one, (result,)), (two, ())]
    lines = ledger.path.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["entry"] for line in lines[:-1]] == ["prediction", "prediction", "measurement"]
    assert lines[-1] == ""
    assert json.loads(lines[0])["time"] <= json.loads(lines[2])["time"]


def test_a_ledger_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "none.jsonl").pairs() == []


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"\n",
        b"null\n",
        b"\xff\xfe\n",
        b'{"entry":"prediction"}\n',
        b'{"entry":"rumour","schema":1}\n',
        b"[" * 5000 + b"\n",
        msgspec.json.encode(prediction()).replace(b'"schema":1', b'"schema":2') + b"\n",
        msgspec.json.encode(prediction()).replace(b"0.012", b"NaN") + b"\n",
        msgspec.json.encode(prediction())[:-2] + b"\n",
    ],
)
def test_a_line_that_is_no_entry_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append([prediction(), prediction()])
    with ledger.path.open("ab") as file:
        file.write(line)
    ledger.append([prediction()])
    with pytest.raises(ConfigError, match="line 3 "):
        ledger.entries()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lost=st.integers(1, 400))
def test_a_torn_last_line_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: int) -> None:
    ledger = Ledger(tmp_path / f"{lost}.jsonl")
    kept, torn, later = prediction(1), prediction(2), prediction(3)
    ledger.path.unlink(missing_ok=True)
    ledger.append([kept, torn])
    os.truncate(ledger.path, ledger.path.stat().st_size - lost)
    with caplog.at_level(logging.WARNING, logger="twinfer.ledger"):
        caplog.clear()
        assert ledger.entries() == [kept]
        assert "line 2 was torn" in caplog.text
        caplog.clear()
        ledger.append([later])
        assert "torn" in caplog.text
    assert ledger.entries() == [kept, later]


def test_a_file_of_one_torn_line_begins_anew(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_bytes(b"x" * 200_000)
    one = prediction()
    ledger.append([one])
    assert ledger.entries() == [one]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_cannot_say_are_refused_before_anything_is_written(tmp_path: Path, value: float) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    bad = predict("test", {}, {"step_s": Quantity(0.01, value, 0.02)}, calibration_sha256="", speed=SPEED)
    with pytest.raises(ConfigError, match="step_s"):
        ledger.append([prediction(), bad])
    assert ledger.entries() == []


def test_what_was_not_predicted_before_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    one = prediction()
    ledger.append([measured(one, {}, SPEED), one])
    with pytest.raises(ConfigError, match="not predicted before it"):
        ledger.pairs()
    twice = Ledger(tmp_path / "twice.jsonl")
    twice.append([one, one])
    with pytest.raises(ConfigError, match="twice"):
        twice.pairs()


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "ledger.jsonl"):
        with pytest.raises(ConfigError, match=r"ledger .* cannot be"):
            Ledger(path).append([prediction()])
    with pytest.raises(ConfigError, match="cannot be read"):
        Ledger(tmp_path).entries()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    one = prediction()
    ledger.append([one])
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:40]))
    with pytest.raises(OutputError, match="the disk took 40"):
        ledger.append([prediction()])
    monkeypatch.undo()
    with pytest.raises(OutputError, match=f"ledger {ledger.path} cannot be written: {REASON}"), full_disk(ledger.path.stat().st_size):
        ledger.append([prediction()])
    assert ledger.path.read_bytes().endswith(b"\n")
    assert ledger.entries() == [one]


def _write_many(path: Path, writer: int, count: int) -> None:
    ledger = Ledger(path)
    for number in range(count):
        one = prediction(number, note=f"{writer}" * (1 + 97 * number % 3000))
        ledger.append([one])
        ledger.append([measured(one, {}, SPEED)])


def test_several_processes_share_a_ledger(tmp_path: Path) -> None:
    path, count = tmp_path / "ledger.jsonl", 25
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, writer, count)) for writer in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(30)
        assert process.exitcode == 0
    pairs = Ledger(path).pairs()
    assert len(pairs) == 3 * count
    assert all(len(pair.measurements) == 1 for pair in pairs)
    for writer in range(3):
        mine = [pair.prediction.question["batch"] for pair in pairs if pair.prediction.note.startswith(str(writer))]
        assert mine == list(range(count))


_KILLED = """
import sys
from pathlib import Path
from tests.twin.test_ledger import prediction
from twin.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
number = 0
while True:
    ledger.append([prediction(number, "x" * 3000)])
    print(number, flush=True)
    number += 1
"""


def test_what_was_promised_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    promised = [process.stdout.readline() for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    promised += process.stdout.readlines()
    process.stdout.close()
    process.wait(10)
    whole = [line for line in promised if line.endswith(b"\n")]
    found = Ledger(path).pairs()
    assert len(found) >= len(whole) >= 20
    assert [pair.prediction.question["batch"] for pair in found] == list(range(len(found)))


def test_errors_and_intervals() -> None:
    expected = Quantity(0.011, 0.009, 0.012)
    assert error(expected, Quantity(0.010, 0, 0)) == pytest.approx(0.1)
    assert error(expected, Quantity(0.0, 0, 0)) is None
    assert [is_inside(expected, Quantity(value, 0, 0)) for value in (0.0089, 0.009, 0.012, 0.0121)] == [False, True, True, False]
