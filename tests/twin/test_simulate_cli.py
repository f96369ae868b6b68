"""``twinfer simulate``: the contract of its JSON, what it refuses, the same by every way of running it, and what it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import twinfer
from calibration import store
from calibration.probe import Probe
from engine.core.events import Finished, TokensEmitted, decode_lines
from engine.core.metrics import MetricsLog, Slo
from tests.calibration import synthetic
from tests.disk import REASON, full_disk

ROOT = Path(__file__).parents[2]
CONTRACT = {
    *("requests", "finished", "sim_s", "wall_s", "ttft_s", "tpot_s", "itl_s", "e2e_s", "output_tokens_per_s", "goodput"),
    *("prefix_hit_rate", "kv_peak", "preemptions", "gpu_s", "usd", "joules"),
}
GIVEN = ("--step-cost", "0.01,1e-5,1e-8")
SMALL = ("--requests", "30", "--isl", "20:90", "--osl", "2:20")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = twinfer.main(("simulate", "--model", "tiny-v41", *arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def without_wall(found: dict[str, Any]) -> dict[str, Any]:
    points = [{name: value for name, value in point.items() if name != "wall_s"} for point in found.get("points", [])]
    return {**{name: value for name, value in found.items() if name not in ("wall_s", "points")}, "points": points}


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("simulate") / "one.cal"
    fit = synthetic.true_fit(synthetic.tiny())
    store.save(path, store.new_calibration((fit,), Probe(1e-3, 2e-3, 3e-3)), [], [])
    return str(path)


# --- what it says -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [("--request-rate", "20"), ("--concurrency", "3"), ("--request-rate", "inf")])
def test_one_simulation_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str], calibration: str, load: tuple[str, ...]) -> None:
    found = run_json(capsys, "--calibration", calibration, "--no-probe", *SMALL, *load, "--layout", "tp1dp2ep2")
    assert set(found) >= CONTRACT
    assert "points" not in found
    assert (found["requests"], found["finished"], found["num_gpus"]) == (30, 30, 2)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert {"mean", "p50", "p90", "p99"} <= set(found[name])
        assert found[name]["p50"] > 0
    assert found["gpu_s"] == pytest.approx(2 * found["sim_s"])
    assert found["goodput"] is found["usd"] is found["joules"] is None
    assert 0 < found["kv_peak"] <= 1
    assert found["cost"]["source"] == "calibration"
    assert {part["provenance"] for part in found["components"].values()} <= {"measured", "interpolated", "scaled"}
    assert sum(part["seconds"] for part in found["components"].values()) * found["steps"] == pytest.approx(found["busy_s"])
    assert found["low_s"] < found["busy_s"] < found["high_s"]


def test_a_sweep_has_a_point_for_each_layout_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *GIVEN, *SMALL, "--layout", "tp1dp1ep1,2x(tp1dp2ep2)", "--concurrency", "1,4", "--jobs", "1")
    assert [(one["layout"], one["concurrency"], one["num_gpus"]) for one in found["points"]] == [
        ("tp1dp1ep1", 1, 1), ("tp1dp1ep1", 4, 1), ("2x(tp1dp2ep2)", 1, 4), ("2x(tp1dp2ep2)", 4, 4),
    ]  # fmt: skip
    assert all(set(one) >= CONTRACT for one in found["points"])
    single = run_json(capsys, *GIVEN, *SMALL, "--layout", "2x(tp1dp2ep2)", "--concurrency", "4")
    alone = {name: single[name] for name in found["points"][3]}
    assert without_wall(alone) == without_wall(found["points"][3])


def test_limits_money_and_energy(capsys: pytest.CaptureFixture[str]) -> None:
    base = (*GIVEN, *SMALL, "--request-rate", "20", "--usd-per-gpu-hour", "36", "--watts-per-gpu", "700")
    found = run_json(capsys, *base, "--ttft", "1e6", "--goodput", "tpot:1e6")
    assert found["slo"] == {"ttft_s": 1000.0, "tpot_s": 1000.0}
    assert found["goodput_share"] == 1.0
    assert found["goodput"] == pytest.approx(30 / found["sim_s"])
    assert found["usd"] == pytest.approx(found["gpu_s"] / 100)
    assert found["joules"] == pytest.approx(found["gpu_s"] * 700)
    assert run(capsys, *base, "--tpot", "1", "--strict-slo")[0] == 3
    assert run(capsys, *base, "--tpot", "1000", "--strict-slo", "100")[0] == 0
    assert run(capsys, *base, "--tpot", "1")[0] == 0


def test_a_person_reads_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *GIVEN, *SMALL, "--request-rate", "5,10")
    assert code == 0
    assert err == ""
    lines = out.splitlines()
    assert [line.split(",")[0] for line in lines[1:3]] == ["tp1dp1ep1", "tp1dp1ep1"]
    assert "30/30" in lines[1]
    assert lines[3].startswith("all: given step cost: 0.01 s")


def test_a_lonely_request_waits_for_its_own_steps_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: no queue, one step for the prompt and one for each further token, each of base + tokens x rate + cached tokens x rate."""
    found = run_json(capsys, "--step-cost", "0.5,0.001,0.0001", "--requests", "1", "--isl", "64", "--osl", "3", "--request-rate", "1")
    steps_s = [0.5 + tokens * 0.001 + cached * 0.0001 for tokens, cached in ((64, 64), (1, 65), (1, 66))]
    assert found["ttft_s"]["p50"] == pytest.approx(steps_s[0])
    assert found["e2e_s"]["p50"] == pytest.approx(sum(steps_s))
    assert found["tpot_s"]["p50"] == pytest.approx(sum(steps_s[1:]) / 2)


def test_door_and_reply_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    base = (*GIVEN, "--requests", "5", "--isl", "30", "--osl", "4", "--request-rate", "1")
    plain, late = run_json(capsys, *base), run_json(capsys, *base, "--door-ms", "40", "--reply-ms", "2")
    assert late["ttft_s"]["p50"] - plain["ttft_s"]["p50"] == pytest.approx(0.042)
    assert late["tpot_s"]["p50"] == pytest.approx(plain["tpot_s"]["p50"])


def test_accepted_drafts_make_fewer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    base = (*GIVEN, "--requests", "8", "--isl", "30", "--osl", "200", "--concurrency", "8")
    plain = run_json(capsys, *base)
    drafted = run_json(capsys, *base, "--draft-tokens", "3", "--acceptance", "0.9,0.8,0.5")
    assert drafted["acceptance_length"] == pytest.approx(1 + 0.9 + 0.8 + 0.5, rel=0.1)
    assert drafted["steps"] < plain["steps"] / 2


def test_uneven_experts_cost_more(capsys: pytest.CaptureFixture[str], calibration: str) -> None:
    base = ("--calibration", calibration, "--no-probe", *SMALL, "--concurrency", "8", "--layout", "tp1dp2ep2")
    even, uneven = run_json(capsys, *base), run_json(capsys, *base, "--expert-balance", "zipf:1.2")
    assert uneven["components"]["expert_gemm"]["seconds"] > even["components"]["expert_gemm"]["seconds"]


def test_the_policy_that_keeps_a_tpot_is_simulated_too(capsys: pytest.CaptureFixture[str], calibration: str) -> None:
    """Long prompts between decoding requests: their chunks are what others wait for."""
    base = ("--calibration", calibration, "--no-probe", "--requests", "24", "--isl", "800", "--osl", "30", "--request-rate", "2")
    free, kept = run_json(capsys, *base), run_json(capsys, *base, "--tpot-slo", "100")
    assert kept["itl_s"]["p99"] < 0.11 < free["itl_s"]["p99"]
    assert kept["finished"] == free["finished"]


def test_memory_bounds_what_runs_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    base = (*GIVEN, "--requests", "40", "--isl", "100", "--osl", "60", "--request-rate", "inf", "--block-size", "16")
    roomy, tight = run_json(capsys, *base), run_json(capsys, *base, "--max-total-tokens", "640")
    assert tight["kv_blocks"] == 40
    assert tight["kv_peak"] > 0.8 > roomy["kv_peak"]
    assert tight["ttft_s"]["p99"] > 2 * roomy["ttft_s"]["p99"]


# --- the same whatever the way ----------------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_output_and_another_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*GIVEN, *SMALL, "--request-rate", "20", "--layout", "2x(tp1dp2ep2)")
    first, second = (run_json(capsys, *asked, "--seed", "7") for _ in range(2))
    assert without_wall(first) == without_wall(second)
    assert without_wall(run_json(capsys, *asked, "--seed", "8")) != without_wall(first)


def test_processes_answer_as_one_process_does(capsys: pytest.CaptureFixture[str], calibration: str) -> None:
    asked = ("--calibration", calibration, "--no-probe", *SMALL, "--request-rate", "5,inf", "--layout", "tp1dp1ep1")
    one, two = (run_json(capsys, *asked, "--jobs", jobs) for jobs in ("1", "2"))
    assert without_wall(one) == without_wall(two)


def test_ray_answers_by_the_same_function(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's part is played by a stand-in that calls what it is given; that the bytes go there and back is what is tested."""
    calls: list[bytes] = []

    class Task:
        def __init__(self, function: Callable[[bytes], bytes]) -> None:
            self.function = function

        def remote(self, question: bytes) -> bytes:
            calls.append(question)
            return self.function(question)

    stand_in = types.SimpleNamespace(
        is_initialized=lambda: False, init=lambda **_: None, shutdown=lambda: None, remote=Task, get=lambda reference: reference
    )
    asked = (*GIVEN, *SMALL, "--request-rate", "5,10")
    plain = run_json(capsys, *asked, "--jobs", "1")
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    assert without_wall(run_json(capsys, *asked, "--executor", "ray")) == without_wall(plain)
    assert len(calls) == 2


def test_without_ray_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run(capsys, *GIVEN, *SMALL, "--request-rate", "5,10", "--executor", "ray")
    assert code == 2
    assert ".[ray]" in err


def test_an_error_in_a_process_is_what_it_is_in_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [run(capsys, *GIVEN, "--requests", "2", "--request-rate", "1e-6,1", "--osl", "5000", "--jobs", jobs) for jobs in ("1", "2")]
    assert codes[0] == codes[1]


def test_stepping_gives_what_fast_forward_gives(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*GIVEN, "--requests", "20", "--isl", "50:300", "--osl", "100:400", "--concurrency", "4", "--layout", "2x(tp1dp2ep2)")
    assert without_wall(run_json(capsys, *asked)) == without_wall(run_json(capsys, *asked, "--no-fast-forward"))


def test_log_and_report_do_not_depend_on_fast_forward(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = (*GIVEN, "--requests", "12", "--isl", "50:300", "--osl", "100:400", "--concurrency", "4")
    logs, pages = [], []
    for name, more in (("leapt", ()), ("stepped", ("--no-fast-forward",))):
        log, page = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.html"
        run_json(capsys, *asked, *more, "--events", str(log), "--output", str(page))
        logs.append(log.read_bytes())
        blocks = re.findall(r'<script type="application/json" id="point-0-(\d+)-data">(.*?)</script>', page.read_text())
        pages.append({int(order): text for order, text in blocks})
    assert logs[0] == logs[1]
    # All but the share of KV, which is looked at when a plan is made, and in a stretch at its end.
    assert [order for order in pages[0] if pages[0][order] != pages[1][order]] in ([], [6])


# --- what it refuses --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["--request-rate", "--concurrency", "--workload"]),
        (("--request-rate", "0"), ["--request-rate", "'0'"]),
        (("--request-rate", "nan"), ["--request-rate", "'nan'"]),
        (("--request-rate", "-3"), ["--request-rate", "'-3'"]),
        (("--request-rate", "1,,2"), ["--request-rate", "separated by commas"]),
        (("--request-rate", "1,x"), ["--request-rate", "'x'"]),
        (("--request-rate", ",".join("1" * 2000)), ["--request-rate", "1 to 1024 values"]),
        (("--request-rate", "5", "--concurrency", "5"), ["--request-rate", "--concurrency"]),
        (("--concurrency", "0"), ["--concurrency", "'0'"]),
        (("--concurrency", "9" * 400), ["--concurrency"]),
        (("--concurrency", "2.5"), ["--concurrency", "'2.5'"]),
        (("--request-rate", "5", "--requests", "-1"), ["--requests", "'-1'"]),
        (("--request-rate", "5", "--isl", "0"), ["--isl is '0'"]),
        (("--request-rate", "5", "--isl", "nan"), ["--isl is 'nan'"]),
        (("--request-rate", "5", "--osl", "9" * 30), ["--osl"]),
        (("--request-rate", "5", "--seed", "1e99"), ["--seed"]),
        (("--request-rate", "5", "--workload", "t.jsonl", "--isl", "5"), ["--workload t.jsonl and --isl"]),
        (("--request-rate", "5", "--workload", "/no/such/trace"), ["/no/such/trace"]),
        (("--request-rate", "5", "--layout", "tp3dp1ep1"), ["tp3dp1ep1", "num_attention_heads"]),
        (("--request-rate", "5", "--layout", "nonsense"), ["nonsense"]),
        (("--request-rate", "5", "--layout", "P1x(tp1dp1ep1)+D1x(tp1dp2ep2)"), ["prefill/decode split", "not simulated"]),
        (("--request-rate", "5", "--layout", "tp1dp1pp2ep1"), ["pipeline parallelism (pp2)", "not simulated"]),
        (("--request-rate", "5", "--routing", "magic"), ["--routing", "round-robin"]),
        (("--request-rate", "5", "--ttft", "0"), ["--ttft", "'0'"]),
        (("--request-rate", "5", "--tpot", "inf"), ["--tpot", "'inf'"]),
        (("--request-rate", "5", "--ttft", "5", "--goodput", "ttft:5"), ["--ttft and --goodput"]),
        (("--request-rate", "5", "--goodput", "ttft:nan"), ["--goodput is 'ttft:nan'"]),
        (("--request-rate", "5", "--strict-slo"), ["--strict-slo needs limits"]),
        (("--request-rate", "5", "--draft-tokens", "3"), ["--draft-tokens is 3", "--acceptance"]),
        (("--request-rate", "5", "--draft-tokens", "9", "--acceptance", "1"), ["--draft-tokens is 9", "at most 5"]),
        (("--request-rate", "5", "--acceptance", "1"), ["--acceptance is '1'", "--draft-tokens"]),
        (("--request-rate", "5", "--draft-tokens", "2", "--acceptance", "3"), ["--acceptance", "3"]),
        (("--request-rate", "5", "--draft-tokens", "2", "--acceptance", "x"), ["--acceptance is 'x'"]),
        (("--request-rate", "5", "--expert-balance", "zipf:1"), ["--expert-balance zipf:1", "--calibration"]),
        (("--request-rate", "5", "--block-size", "3"), ["--block-size is 3"]),
        (("--request-rate", "5", "--max-total-tokens", "5"), ["--max-total-tokens is 5"]),
        (("--request-rate", "5", "--memory-gib", "0.001"), ["does not fit", "budget"]),
        (("--request-rate", "5", "--jobs", "0"), ["--jobs", "'0'"]),
        (("--request-rate", "5,6", "--events", "e.jsonl"), ["--events e.jsonl", "one simulation"]),
        (("--request-rate", "5", "--events", "/no/such/folder/e.jsonl"), ["--events", "its folder does not exist"]),
        (("--request-rate", "5", "--output", "/"), ["--output /", "it is a folder"]),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], parts: list[str]
) -> None:
    code, out, err = run(capsys, *GIVEN, *arguments)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["--calibration FILE", "--step-cost"]),
        (("--system", "gb300"), ["--system gb300", "not in this release"]),
        (("--system", "gb300", *GIVEN), ["give one of"]),
        (("--step-cost", "nan"), ["--step-cost is 'nan'"]),
        (("--step-cost", "0,0,1"), ["no time"]),
        (("--step-cost", "-1"), ["--step-cost"]),
        (("--step-cost", "1,2,3,4"), ["--step-cost is '1,2,3,4'"]),
        (("--step-cost", "1e300"), ["0 to 1e+06"]),
        (("--calibration", "/no/such.cal"), ["/no/such.cal"]),
    ],
)
def test_step_times_come_from_one_place(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], parts: list[str]) -> None:
    if arguments and arguments[0].startswith("--step-cost"):
        arguments = (f"{arguments[0]}={arguments[1]}", *arguments[2:])
    code, out, err = run(capsys, "--request-rate", "5", *arguments)
    assert (code, out) == (2, "")
    for part in parts:
        assert part in err


def test_nothing_finished_is_said_and_is_a_fault_where_requests_were_refused(capsys: pytest.CaptureFixture[str]) -> None:
    short = (*GIVEN, "--requests", "5", "--osl", "4", "--context-length", "128")
    code, _, err = run(capsys, *short, "--isl", "300", "--request-rate", "5")
    assert code == 1
    assert err.count("\n") == 1
    assert "tp1dp1ep1, 5 req/s: none of the 5 requests finished: 5 were refused" in err
    assert run(capsys, *short, "--isl", "300", "--request-rate", "5", "--json", "--ttft", "5", "--strict-slo")[0] == 1
    code, _, err = run(capsys, *short, "--isl", "300", "--request-rate", "5,6", "--jobs", "1")
    assert (code, err.count("none of the 5 requests finished")) == (1, 2)
    # Clients who leave do what they were asked to.
    code, _, err = run(capsys, *short, "--isl", "9", "--request-rate", "5", "--cancel-share", "1", "--cancel-after", "1e-6")
    assert code == 0
    assert "none of the 5 requests finished: 5 were left by their clients" in err


@pytest.mark.parametrize("flag", ["--events", "--output"])
def test_a_full_disk_leaves_what_was_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    path = tmp_path / "old"
    path.write_text("what was there")
    with full_disk(1000):
        code, out, err = run(capsys, *GIVEN, *SMALL, "--request-rate", "5", flag, str(path))
    assert (code, out) == (1, "")
    assert err == f"twinfer simulate: {flag} {path} cannot be written: {REASON}\n"
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]
    code, _, err = run(capsys, *GIVEN, *SMALL, "--request-rate", "5", flag, "/dev/full")
    assert code == 1
    assert f"{flag} /dev/full cannot be written: No space left" in err


def test_a_calibration_is_asked_only_for_what_it_knows(capsys: pytest.CaptureFixture[str], calibration: str) -> None:
    base = ("--calibration", calibration, "--no-probe", "--request-rate", "5")
    assert "calibrated with 0 draft tokens" in run(capsys, *base, "--draft-tokens", "3", "--acceptance", "1")[2]
    assert "was calibrated in float32" in run(capsys, *base, "--dtype", "bfloat16")[2]
    code = twinfer.main(("simulate", "--model", "v41-100m", *base))
    assert code == 2
    assert "is not in the calibration" in capsys.readouterr().err


def test_the_probe_is_run_unless_switched_off(
    calibration: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twin.speed.run_probe", lambda: Probe(2e-3, 4e-3, 6e-3))
    asked = ("--calibration", calibration, *SMALL, "--request-rate", "5")
    probed, plain = run_json(capsys, *asked), run_json(capsys, *asked, "--no-probe")
    assert probed["cost"]["probe"] == {"compute": 2.0, "memory": 2.0, "host": 2.0}
    assert plain["cost"]["probe"] is None
    assert probed["tpot_s"]["p50"] == pytest.approx(2 * plain["tpot_s"]["p50"], rel=0.05)


# --- what it writes ---------------------------------------------------------------------------------------------------------------


def test_the_event_log_gives_the_figures_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    found = run_json(capsys, *GIVEN, *SMALL, "--request-rate", "20", "--goodput", "ttft:25", "--events", str(path))
    events = list(decode_lines(path.read_bytes()))
    log = MetricsLog()
    log.extend(events)
    summary = log.summary(Slo(ttft_s=0.025))
    assert msgspec.to_builtins(summary.ttft_s) == pytest.approx(found["ttft_s"])
    assert msgspec.to_builtins(summary.itl_s) == pytest.approx(found["itl_s"])
    assert summary.goodput_per_s == pytest.approx(found["goodput"])
    assert 0 < found["goodput_share"] < 1
    assert sum(isinstance(event, Finished) for event in events) == found["finished"]
    assert sum(len(event.tokens) for event in events if isinstance(event, TokensEmitted)) == found["output_tokens"]


def test_a_report_is_written_beside_the_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    asked = (*GIVEN, *SMALL, "--request-rate", "5,20", "--ttft", "30")
    plain, drawn = run_json(capsys, *asked), run_json(capsys, *asked, "--output", str(path))
    assert without_wall(plain) == without_wall(drawn)
    text = path.read_text()
    assert "tp1dp1ep1, 20 req/s" in text
    assert "TTFT over the request rate" in text


def test_options_come_from_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('request-rate = "3,4"\nrequests = 7\nport = 9000\n')
    shown = run_json(capsys, *GIVEN, "--config", str(config), "--print-config")
    assert shown["requests"] == {"value": 7, "origin": f"file {config}"}
    assert len(run_json(capsys, *GIVEN, "--config", str(config))["points"]) == 2


# --- installations ----------------------------------------------------------------------------------------------------------------


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'simpy', 'pyarrow', 'plotly'}"
    code = f"import sys, twinfer; twinfer.build_parser(); assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_a_simulation_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import twinfer; "
        "sys.exit(twinfer.main('simulate --model tiny-v41 --step-cost 0.01 --request-rate 5 --requests 3 --json'.split()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, capture_output=True)
    assert json.loads(done.stdout)["finished"] == 3


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [("simpy", "twin", ()), ("numpy", "twin", ()), ("scipy", "twin", ()), ("plotly", "dashboards", ("--output", "r.html"))],
)
def test_a_missing_library_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str, extra: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = run(capsys, *GIVEN, "--request-rate", "5", *arguments)
    assert code == 2
    assert f"needs {missing}" in err
    assert f".[{extra}]" in err
