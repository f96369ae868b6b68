"""A calibration on disk, the closed loop, predictions, what to measure next, the report: all but the measuring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import twinfer
from calibration import store
from calibration.cost_model import CalibratedCost, ModelFit, ProbeFactors
from calibration.features import table_of_plans
from calibration.next_points import suggestions
from calibration.predict import Question, predict_point
from calibration.probe import Probe, factors, mean_probe, ratios, run_probe
from calibration.shapes import MARGIN, MAX_CACHED_TOKENS, cache_for, shapes
from calibration.steady import Load, closed_loop, reduced
from dashboards.calibration_report import calibration_report
from engine.core.acceptance import acceptance_probabilities
from engine.core.errors import ConfigError, DomainError, OutputError
from engine.core.layout import Layout, parse_layout
from engine.core.specs import ModelSpec
from engine.model.files import read_model_files
from tests.calibration import synthetic
from tests.disk import REASON, full_disk

PROBE = Probe(1e-3, 2e-3, 3e-3)
# One that every field of a real one has, under a name that no release knows.
_COMPONENT = {"columns": [], "coefficients": [], "held_out_median": 0.0, "held_out_p90": 0.0, "share": 0.0}
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return synthetic.tiny()


@pytest.fixture(scope="module")
def fit(spec: ModelSpec) -> ModelFit:
    return synthetic.assembled(spec)[0]


@pytest.fixture(scope="module")
def written(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fit, held_out = synthetic.assembled(spec)
    path = tmp_path_factory.mktemp("calibration") / "machine.cal"
    store.save(path, store.new_calibration((fit,), PROBE), held_out, ["tiny-v41"] * len(held_out))
    return path


def rewritten(
    source: Path, target: Path, edit: Edit | None = None, members: Sequence[str] = ("calibration.json", "points.parquet")
) -> Path:
    """A copy whose JSON was edited by hand."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in members:
            data = archive.read(name) if name in archive.namelist() else b"{}"
            if name == "calibration.json" and edit is not None:
                values = json.loads(data)
                edit(values)
                data = json.dumps(values).encode()
            copy.writestr(name, data)
    return target


# --- the file -------------------------------------------------------------------------------------------------------------------


def test_a_calibration_comes_back_as_it_was(written: Path, fit: ModelFit) -> None:
    found = store.load(written)
    assert found.model("tiny-v41", fit.model_hash) == fit
    assert found.probe == PROBE
    assert found.machine == store.this_machine()
    held_out, models = store.load_held_out(written)
    assert set(models) == {"tiny-v41"}
    assert {"step", "rank", "projection"} <= {entry.component for entry in held_out}


def test_nothing_is_left_beside_a_written_file(written: Path) -> None:
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def _set(**values: object) -> Edit:
    return lambda document: document.update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set(kind="shopping list"), "'shopping list'.*calibrate anew"),
        (_set(schema_version=99), "schema 99"),
        (_set(schema_version=2), "schema 2"),
        (_set(made="yesterday"), "was changed since it was written"),
        (_set(points_sha256="0" * 64), "was changed since it was written"),
        (_set(models="all"), "Expected `array`"),
        (lambda document: document.pop("probe"), "missing required field `probe`"),
        (lambda document: document["models"][0]["ranks"][0]["components"].update(magic=_COMPONENT), "unknown components magic"),
    ],
)
def test_a_changed_file_is_refused(written: Path, tmp_path: Path, edit: Edit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store.load(rewritten(written, tmp_path / "changed.cal", edit))


def test_what_is_no_calibration_is_refused(written: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.cal"
    text.write_text("no archive")
    cut = tmp_path / "cut.cal"
    cut.write_bytes(written.read_bytes()[:-200])
    damaged = tmp_path / "damaged.cal"
    archive = written.read_bytes()
    damaged.write_bytes(archive[:60] + bytes(byte ^ 0x55 for byte in archive[60:300]) + archive[300:])
    for path in (text, cut, damaged, rewritten(written, tmp_path / "one.cal", members=("calibration.json",)), tmp_path / "absent.cal"):
        with pytest.raises(ConfigError, match=path.name):
            store.load(path)
    with pytest.raises(ConfigError, match="other files"):
        store.load(rewritten(written, tmp_path / "more.cal", members=("calibration.json", "points.parquet", "evil.py")))


def test_another_model_of_the_same_name_is_refused(written: Path) -> None:
    calibration = store.load(written)
    with pytest.raises(DomainError, match="shapes differ"):
        calibration.model("tiny-v41", "0" * 64)
    with pytest.raises(DomainError, match="it has tiny-v41"):
        calibration.model("v41-100m")


# --- the probe ------------------------------------------------------------------------------------------------------------------


def test_probe_factors_are_ratios_with_a_dead_band() -> None:
    found = factors(PROBE, Probe(2e-3, 2.02e-3, 1.5e-3))
    assert found == ProbeFactors(2.0, 1.0, 0.5)
    assert factors(PROBE, Probe(1.0, 2e-3, 3e-3)).compute == 20.0
    assert ratios(PROBE, Probe(2e-3, 2.02e-3, 1.5e-3)).memory == pytest.approx(1.01)


def test_the_mean_of_probes_leaves_the_longest_out() -> None:
    assert mean_probe([PROBE, Probe(3e-3, 2e-3, 3e-3)]) == Probe(2e-3, 2e-3, 3e-3)
    assert mean_probe([*[PROBE] * 19, Probe(9.0, 2e-3, 3e-3)]) == PROBE


def test_the_probe_says_that_others_are_at_work(caplog: pytest.LogCaptureFixture) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(0.2)
        run_probe()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert re.search(r"other programs take \d\.\d of this machine's \d+ cores", caplog.text)


def test_the_probe_measures_something_on_every_core() -> None:
    cores = os.sched_getaffinity(0)
    probe = run_probe()
    assert min(probe.compute_s, probe.memory_s, probe.host_s) > 0
    assert os.sched_getaffinity(0) == cores


# --- shapes and the closed loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-v41", "qwen3-moe-100m"])
def test_shapes_cover_the_range_and_fit_the_cache(model: str) -> None:
    spec = read_model_files(model).spec
    found = shapes(spec, 80, max_batch=32, max_context=1000, max_tokens=2048, draft_tokens=0)
    assert len(found) == len(set(found)) >= 70
    decodes = [shape for shape in found if shape.kind == "decode"]
    assert {1, 32} <= {len(shape.items) for shape in decodes}
    assert max(computed for shape in decodes for computed, _ in shape.items) == 1000
    assert {shape.kind for shape in found} == {"decode", "prefill", "mixed"}
    cache = cache_for(spec, found, 0)
    for shape in found:
        assert shape.cached_tokens <= MAX_CACHED_TOKENS
        assert shape.num_tokens <= cache.max_batched_tokens
        assert len(shape.items) <= cache.max_running
    assert found == shapes(spec, 80, max_batch=32, max_context=1000, max_tokens=2048, draft_tokens=0)


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_longest_shape_has_room_to_advance_in(drafts: int) -> None:
    spec = synthetic.tiny()
    found = shapes(spec, 80, max_batch=2, max_context=1 << 20, max_tokens=2048, draft_tokens=drafts)
    longest = max(computed + new for shape in found for computed, new in shape.items)
    assert longest + MARGIN == spec.max_positions


def test_drafts_are_part_of_the_shapes() -> None:
    found = shapes(synthetic.tiny(), 40, max_batch=8, max_context=200, max_tokens=512, draft_tokens=3)
    decodes = [shape for shape in found if shape.kind == "decode"]
    assert decodes
    assert all(new == 4 for shape in decodes for _, new in shape.items)
    assert decodes[0].plan().ranks[0].items[0].num_draft_tokens == 3


def test_a_decode_loop_keeps_its_batch_and_counts_its_tokens() -> None:
    loop = closed_loop(Load(6, 50, 40))
    sizes = [len(plan.ranks[0].items) for plan in loop.plans]
    assert max(sizes) == 6
    assert np.median(sizes) == 6
    contexts = [item.num_computed_tokens for plan in loop.plans for item in plan.ranks[0].items if item.num_new_tokens == 1]
    assert min(contexts) >= 40
    assert max(contexts) < 90
    assert 5.0 < loop.tokens_per_step <= 6.0


def test_a_loop_of_one_new_token_computes_prompts() -> None:
    loop = closed_loop(Load(4, 100, 1))
    assert all(item.num_new_tokens > 1 for plan in loop.plans for item in plan.ranks[0].items)


def test_drafts_are_accepted_as_often_as_asked() -> None:
    loop = closed_loop(Load(8, 40, 60, draft_tokens=3, acceptance=acceptance_probabilities(1.5, 3), has_sequence_state=True))
    decodes = [len(plan.ranks[0].items) for plan in loop.plans if all(item.num_draft_tokens == 3 for item in plan.ranks[0].items)]
    assert decodes
    assert 2.2 * 6.5 < loop.tokens_per_step < 2.6 * 8


def test_all_ranks_of_a_loop_are_busy() -> None:
    loop = closed_loop(Load(4, 30, 20, num_ranks=2))
    assert np.median([min(len(rank.items) for rank in plan.ranks) for plan in loop.plans]) >= 3


def test_first_batches_are_full_decodes() -> None:
    loop = closed_loop(Load(5, 64, 32, method="first-batches"))
    assert len(loop.plans) == 9
    assert all(len(plan.ranks[0].items) == 5 for plan in loop.plans)


def test_a_large_loop_is_made_smaller_by_whole_ranks() -> None:
    small, stands_for = reduced(Load(128, 8192, 1024, num_ranks=64))
    assert small.num_ranks * stands_for == 64
    assert small.num_ranks < 64
    assert reduced(Load(4, 64, 16, num_ranks=2)) == (Load(4, 64, 16, num_ranks=2), 1)


# --- predictions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp1dp1ep1", "tp2dp1ep1", "tp1dp2ep2"])
def test_a_point_is_the_median_of_the_loops_prices(fit: ModelFit, spec: ModelSpec, layout: str) -> None:
    question = Question(spec, context=100, new_tokens=16)
    deployment = parse_layout(layout)
    point = predict_point(fit, question, deployment, 5)
    unit = deployment.decode.unit
    table = table_of_plans(closed_loop(question.load(5, unit.dp)).plans, spec)
    priced = CalibratedCost(fit, spec, unit).price_table(table)
    assert point["step_s"] == pytest.approx(np.median(priced.step_s))
    assert point["step_mean_s"] == pytest.approx(np.mean(priced.step_s))
    assert sum(part["seconds"] for part in point["components"].values()) == pytest.approx(point["step_s"])
    assert point["lo_s"] < point["step_s"] < point["hi_s"]
    assert point["usd_per_million_tokens"] is None
    assert point["tokens_per_s_per_gpu"] * unit.num_gpus == pytest.approx(point["tokens_per_s_per_user"] * 5 * unit.dp)


def test_more_ranks_than_cores_are_an_extrapolation(fit: ModelFit, spec: ModelSpec) -> None:
    question = Question(spec, context=60, new_tokens=8)
    two, four = (predict_point(fit, question, parse_layout(f"tp1dp{ranks}ep{ranks}"), 4) for ranks in (2, 4))
    assert not two["extrapolated"]
    assert four["extrapolated"]
    assert "4 ranks as if each had a core of its own" in four["note"]
    assert four["hi_s"] / four["lo_s"] > two["hi_s"] / two["lo_s"]


def test_memory_is_told_apart_and_adds_up(fit: ModelFit, spec: ModelSpec) -> None:
    def memory(**options: Any) -> dict[str, int]:
        question = Question(spec, context=100, new_tokens=16, memory_bytes=1 << 30, **options)
        return dict(predict_point(fit, question, parse_layout("tp1dp1ep1"), 5)["memory_bytes"])

    found, host = memory(), memory(engram="host")
    assert sum(found.values()) == 1 << 30
    assert found["engram"] > 0
    assert found["draft"] > 0
    assert host["engram"] == 0
    assert host["weights"] == found["weights"]
    assert predict_point(fit, Question(spec, context=100, new_tokens=16), parse_layout("tp1dp1ep1"), 5)["fits"] is None


def test_what_lies_outside_is_the_first_to_be_measured(fit: ModelFit, spec: ModelSpec) -> None:
    far = suggestions(fit, spec, [parse_layout("tp1dp1ep1")], [4], 3000, 4)
    assert "context" in far[0]["reason"]
    assert "--max-context 3004" in far[0]["command"]
    whole = suggestions(fit, spec, [parse_layout("tp1dp2ep2")], [4], 60, 8)
    assert any("no whole step" in one["reason"] for one in whole)
    assert all(0 <= one["gain"] <= 1 for one in (*far, *whole))


# --- commands -------------------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = twinfer.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("others", "is_said"), [(0, False), (3, True)])
def test_predict_says_where_the_cores_are_others(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], others: int, is_said: bool
) -> None:
    here = store.load(written).machine
    monkeypatch.setattr(store, "this_machine", lambda: msgspec.structs.replace(here, num_cores=here.num_cores + others))
    code, _, err = run(
        capsys, "predict", "--model", "tiny-v41", "--calibration", str(written), "--layout", "tp1dp1ep1", "--batch-sizes", "2", "--no-probe"
    )
    assert code == 0
    assert (f"calibrated on {here.num_cores} cores; this process may use {here.num_cores + 3}" in err) == is_said


def test_predict_prints_the_points_of_the_contract(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "predict", "--model", "tiny-v41", "--calibration", str(written), "--layout", "tp1dp1ep1,tp1dp2ep2",
        "--batch-sizes", "2,8", "--context", "64", "--new-tokens", "8", "--no-probe", "--json",
    )  # fmt: skip
    assert code == 0
    points = json.loads(out)["points"]
    assert [(one["layout"], one["batch"]) for one in points] == [("tp1dp1ep1", 2), ("tp1dp1ep1", 8), ("tp1dp2ep2", 2), ("tp1dp2ep2", 8)]
    wanted = {
        *("layout", "batch", "context", "new_tokens", "step_s", "lo_s", "hi_s", "components", "extrapolated", "memory_bytes", "fits"),
        *("tokens_per_s_per_gpu", "tokens_per_s_per_user", "usd_per_million_tokens", "joules_per_token", "note", "barrier_wait_s"),
        "step_mean_s",
    }
    assert all(set(one) == wanted for one in points)
    assert {part["provenance"] for one in points for part in one["components"].values()} <= {"measured", "interpolated", "scaled"}
    assert not points[0]["note"]


def test_the_probe_is_run_unless_switched_off(written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibration.probe.run_probe", lambda: Probe(2e-3, 2e-3, 3e-3))
    arguments = ("predict", "--model", "tiny-v41", "--calibration", str(written), "--layout", "tp1dp1ep1", "--batch-sizes", "2", "--json")
    probed, plain = (json.loads(run(capsys, *arguments, *more)[1])["points"][0] for more in ((), ("--no-probe",)))
    assert "compute x2.00" in probed["note"]
    assert probed["step_s"] > plain["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "0"), "--batch-sizes is '0'"),
        (("--layout", "tp3dp1ep1"), "num_attention_heads"),
        (("--layout", "P1x(tp1dp1ep1)+D1x(tp1dp2ep2)"), "one kind of replica"),
        (("--acceptance", "1.0"), "--acceptance: acceptance is 1; needed: a mean from 0 to the draft tokens = 0"),
        (("--draft-tokens", "3"), "calibrated with 0 draft tokens"),
        (("--context", "0"), "--context is 0"),
        (("--context", "4090"), "--context 4090 and --new-tokens 32 exceed the 4096 tokens a request may have"),
        (("--expert-balance", "zipf:-1"), "--expert-balance is 'zipf:-1'"),
        (("--expert-balance", "measured:/nowhere/at/all"), "no such file"),
        (("--model", "v41-100m"), "is not in the calibration"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    written: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    base = ("predict", "--model", "tiny-v41", "--calibration", str(written), "--layout", "tp1dp1ep1", "--batch-sizes", "2", "--no-probe")
    code, out, err = run(capsys, *base, *arguments)
    assert code == 2
    assert message in err
    assert not out


def test_a_system_of_the_catalogue_is_refused_for_now(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "predict", "--model", "tiny-v41", "--system", "gb300", "--layout", "tp1dp1ep1", "--batch-sizes", "2")
    assert code == 2
    assert "gb300" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out is missing"),
        (("--out", "x.cal", "--budget", "1"), "needed: 20 to 3600"),
        (("--out", "x.cal", "--budget", "0"), "of a model is 0 s; needed: 20 to 3600"),
        (("--out", "no_folder/x.cal"), "--out no_folder/x.cal cannot be written: its folder does not exist"),
        (("--out", "."), "--out . cannot be written: it is a folder"),
        (("--out", "x.cal", "--from", "aic:gb300/sglang"), "--from needs --model once"),
        (("--out", "x.cal", "--draft-tokens", "9"), "drafts at most 5"),
        (("report",), "needs the calibration and the page"),
        (("next",), "needs the calibration and --model"),
        (("export", "x.cal"), "needs the calibration and the table"),
    ],
)
def test_calibrate_refuses_before_it_measures(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, "calibrate", *arguments)
    assert code == 2
    assert message in err


def test_next_says_what_to_run(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "calibrate", "next", str(written), "--model", "tiny-v41", "--layout", "tp1dp2ep2", "--batch-sizes", "4", "--json"
    )
    assert code == 0
    assert any("bench steps tiny-v41 --layout tp1dp2ep2" in one["command"] for one in json.loads(out)["suggestions"])


def test_the_report_is_one_file_without_a_network(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert run(capsys, "calibrate", "report", str(written), "--out", str(page))[0] == 0
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert "Errors held out, by component" in text
    assert text.count('class="chart"') == 6
    assert 'src="http' not in text


@pytest.mark.parametrize("action", ["report", "export"])
def test_a_full_disk_leaves_what_was_there(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    out = tmp_path / "old.html"
    out.write_text("what was there")
    with full_disk(1000):
        code, printed, err = run(capsys, "calibrate", action, str(written), "--out", str(out))
    assert (code, printed) == (1, "")
    assert err == f"twinfer calibrate: --out {out} cannot be written: {REASON}\n"
    assert out.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [out]


def test_a_calibration_that_cannot_be_written_leaves_the_last_one(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "machine.cal"
    path.write_bytes(written.read_bytes())
    with pytest.raises(OutputError, match=f"--out {path} cannot be written: {REASON}"), full_disk(1000):
        store.save(path, store.load(written), *store.load_held_out(written))
    assert path.read_bytes() == written.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_no_calibration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; needed: the file that twinfer calibrate wrote"):
        store.load(tmp_path)


def test_the_report_escapes_what_it_is_given() -> None:
    machine = {"cpu": "<b>x", "num_cores": 2, "torch": "2", "python": "3", "system": "L"}
    summary = {"made": "2026-01-01T00:00:00", "machine": machine, "models": []}
    text = calibration_report(summary, [])
    assert "&lt;b&gt;x" in text
    assert "none was held out" in text


def test_layouts_of_one_rank_need_no_collectives(fit: ModelFit, spec: ModelSpec) -> None:
    CalibratedCost(msgspec.structs.replace(fit, collectives=()), spec, Layout())
