"""Measurements of others in, ours out: ``fpm_forward_perf`` and recordings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import twinfer
from calibration import store
from calibration.assemble import RANK
from calibration.cost_model import CalibratedCost
from calibration.errors import TraceError
from calibration.features import table_of_plans, uniform_steps
from calibration.importers.fpm import BALANCED, Forward, read_fpm, sidecar_of, write_fpm
from calibration.probe import Probe
from calibration.storage import file_sha256
from engine.core.errors import DomainError
from engine.core.layout import Layout, parse_layout
from engine.core.specs import ModelSpec
from tests.calibration import synthetic

Row = dict[str, Any]
ROW: Row = {
    "cell_id": "c0", "model_path": "lab/tiny-v41", "system": "gb300", "backend": "vllm", "backend_version": "0.30.0",
    "weight_quantization": "bfloat16", "gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16", "fmha_quant_mode": None,
    "comm_quant_mode": "half", "kv_cache_dtype": "bfloat16", "tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1,
    "moe_backend": "auto", "attention_backend": "auto", "enable_wideep": False, "enable_eplb": False, "workload_kind": "decode",
    "batch_size": 2, "total_prefill_tokens": 0, "total_kv_read_tokens": 512, "partition_policy": "balanced_v1", "latency_ms": 6.0,
}  # fmt: skip


def write_pair(path: Path, rows: list[Row], **sidecar: Any) -> Path:
    """As AIConfigurator's collector writes one."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    metadata = {
        "schema_name": "aic_fpm_forward_perf", "schema_version": 6, "coordinate_system": "iteration_totals_balanced_v1",
        "measurement_policy": "dynamo_native_single_sample_v1", "row_count": len(rows), "parquet_sha256": file_sha256(path),
        "system": "gb300", "backend": "vllm", "backend_version": "0.30.0",
    }  # fmt: skip
    sidecar_of(path).write_text(json.dumps(metadata | sidecar))
    return path


def rows_of(spec: ModelSpec, layout: str, count: int = 60) -> list[Row]:
    """Passes of the synthetic machine: the sum of a rank's components and its collectives, as a whole forward holds them."""
    unit = parse_layout(layout).decode.unit
    cost = CalibratedCost(synthetic.true_fit(spec), spec, unit)
    draw, rows = np.random.default_rng(5), []
    for index in range(count):
        requests, each = int(draw.integers(1, 32)), int(draw.integers(2, 64))
        cached = int(draw.integers(8, 512))
        is_decode = index % 2 == 0
        new, kv = (1, cached) if is_decode else (each, 0)
        values = (np.full((1, unit.dp), float(value)) for value in (requests, kv if is_decode else each, new))
        table = uniform_steps(spec, *values)
        hidden = np.zeros(1)
        seconds = sum(part.max() for part in cost.rank_seconds(table).values())
        seconds += sum(part[0] for part in cost.collective_seconds(table, hidden).values())
        rows.append(
            ROW | {
                "tp": unit.tp, "dp": unit.dp, "moe_tp": unit.expert_tp, "moe_ep": unit.ep,
                "latency_ms": seconds * 1e3 * draw.lognormal(0, 0.01),
                "workload_kind": "decode" if is_decode else "prefill", "batch_size": requests,
                "total_prefill_tokens": 0 if is_decode else requests * each, "total_kv_read_tokens": requests * kv,
            }
        )  # fmt: skip
    return rows


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = twinfer.main(list(arguments))
    return code, capsys.readouterr().err


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return synthetic.tiny()


# --- the table --------------------------------------------------------------------------------------------------------------------


def test_a_pair_of_theirs_is_read(tmp_path: Path) -> None:
    prefill = {"workload_kind": "prefill", "total_prefill_tokens": 300, "total_kv_read_tokens": 40, "latency_ms": 11.0}
    rows = [ROW, ROW | {"latency_ms": 8.0}, ROW | prefill, ROW | {"tp": 2, "moe_tp": 2}]
    one, two = read_fpm(write_pair(tmp_path / "fpm_forward_perf.parquet", rows))
    assert one.identity.layout == Layout()
    assert two.identity.layout == Layout(tp=2)
    # Measured twice: the median, in seconds.
    assert one.forwards == (Forward("decode", 2, 0, 512, 0.007), Forward("prefill", 2, 300, 40, 0.011))
    assert [forward.seconds for forward in two.forwards] == [0.006]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    theirs = read_fpm(write_pair(tmp_path / "theirs.parquet", [ROW, ROW | {"tp": 2, "moe_tp": 2, "latency_ms": 3.5}]))
    write_fpm(tmp_path / "ours.parquet", theirs)
    assert read_fpm(tmp_path / "ours.parquet") == theirs
    assert {path.name for path in tmp_path.iterdir()} == {
        *("theirs.parquet", "theirs.metadata.json"), *("ours.parquet", "ours.metadata.json")
    }  # fmt: skip


def spoil_hash(path: Path) -> None:
    write_pair(path, [ROW | {"batch_size": 3}], parquet_sha256="0" * 64)


def without_sidecar(path: Path) -> None:
    sidecar_of(write_pair(path, [ROW])).unlink()


def no_parquet(path: Path) -> None:
    path.write_bytes(b"PK not a table")
    sidecar_of(path).write_text(sidecar_of(write_pair(path.with_name("other.parquet"), [ROW])).read_text())
    text = json.loads(sidecar_of(path).read_text()) | {"parquet_sha256": file_sha256(path)}
    sidecar_of(path).write_text(json.dumps(text))


def rows(**changes: Any) -> Callable[[Path], None]:
    return lambda path: void(write_pair(path, [ROW, ROW | changes]))


def sidecar(**changes: Any) -> Callable[[Path], None]:
    return lambda path: void(write_pair(path, [ROW], **changes))


def void(_path: Path) -> None:
    """For a lambda that returns nothing."""


def lacking(path: Path) -> None:
    write_pair(path, [{name: value for name, value in ROW.items() if name not in ("moe_backend", "latency_ms")}])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (spoil_hash, "SHA-256 differs"),
        (without_sidecar, r"metadata\.json cannot be read: No such file"),
        (no_parquet, "is no parquet file"),
        (lacking, "lacks the columns moe_backend, latency_ms"),
        (sidecar(schema_version=5), "version 5.*reads aic_fpm_forward_perf version 6"),
        (sidecar(schema_name="shopping"), "'shopping'"),
        (sidecar(row_count=7), "has 1 rows; its sidecar says 7"),
        (rows(latency_ms=float("nan")), "row 1: latency_ms is nan"),
        (rows(latency_ms=0.0), "row 1: latency_ms is 0.0"),
        (rows(latency_ms=4e6), "row 1: latency_ms is 4000000.0"),
        (rows(workload_kind="mixed"), "row 1: workload_kind is 'mixed'"),
        (rows(partition_policy="random_v9"), "row 1: partition_policy is 'random_v9'"),
        (rows(batch_size=0), "row 1: batch_size is 0"),
        (rows(batch_size=None), "row 1: batch_size is None"),
        (rows(total_kv_read_tokens=1), "row 1: decode of 2 requests.*a cached token or more"),
        (rows(workload_kind="prefill", total_prefill_tokens=1), "row 1: prefill of 2 requests.*a token or more"),
        (rows(model_path=None), "row 1: Expected `str`"),
    ],
)
def test_a_pair_at_fault_is_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "fpm_forward_perf.parquet"
    make(path)
    with pytest.raises(TraceError, match=message):
        read_fpm(path)


# --- fitted -----------------------------------------------------------------------------------------------------------------------


def test_forwards_of_a_known_machine_are_predicted(spec: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, unseen = rows_of(spec, "tp1dp1ep1") + rows_of(spec, "tp2dp1ep1"), rows_of(spec, "tp2dp1ep1", 90)[60:]
    table, out = write_pair(tmp_path / "f.parquet", known), tmp_path / "cal"
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", f"fpm:{table}", "--out", str(out))
    assert code == 0, text
    found = store.load(out)
    assert found.probe is None
    assert "gb300, vllm 0.30.0" in found.machine.cpu
    assert run(capsys, "calibrate", "report", str(out), "--out", str(tmp_path / "page.html"))[0] == 0
    assert "gb300, vllm 0.30.0; fitted on measurements made there." in (tmp_path / "page.html").read_text(encoding="utf-8")
    cost = CalibratedCost(found.models[0], spec, Layout(tp=2))
    errors = []
    for row in unseen:
        requests = float(row["batch_size"])
        prefill = row["total_prefill_tokens"] / requests
        shape = (requests, prefill or row["total_kv_read_tokens"] / requests, prefill or 1.0)
        price = cost.price_table(uniform_steps(spec, *(np.full((1, 1), value) for value in shape)))
        errors.append(abs(price.step_s[0] * 1e3 / row["latency_ms"] - 1.0))
        assert price.low_s[0] <= price.step_s[0] <= price.high_s[0]
        assert "no whole step measured" in price.note
    assert np.median(errors) < 0.03
    with pytest.raises(DomainError, match="whole forwards of tp1dp1ep1, tp2dp1ep1; they say nothing of layout tp1dp2ep2"):
        CalibratedCost(found.models[0], spec, Layout(dp=2, ep=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2}, "only replicas without pipeline or context ranks"),
        ({"kv_cache_dtype": "fp8"}, "tp1dp1ep1 of lab/tiny-v41 comes with kv_cache_dtype 'bfloat16' and 'fp8'"),
        ({"batch_size": 3}, "2 forward passes; needed: 10 or more"),
    ],
)
def test_replicas_that_cannot_be_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Row, message: str) -> None:
    table = write_pair(tmp_path / "f.parquet", [ROW, ROW | changes])
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", f"fpm:{table}", "--out", str(tmp_path / "cal"))
    assert code != 0
    assert message in text
    assert not (tmp_path / "cal").exists()


def test_two_models_neither_of_them_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_pair(tmp_path / "f.parquet", [ROW | {"model_path": "lab/one"}, ROW | {"model_path": "lab/two"}])
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", f"fpm:{table}", "--out", str(tmp_path / "cal"))
    assert code != 0
    assert "holds 2 models (lab/one, lab/two), none of them called tiny-v41" in text


def test_measured_forwards_go_out_and_come_back(spec: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, held_out = synthetic.assembled(spec)
    calibration, table, again = tmp_path / "a.cal", tmp_path / "f.parquet", tmp_path / "b.cal"
    store.save(calibration, store.new_calibration((fit,), Probe(1e-3, 2e-3, 3e-3)), held_out, ["tiny-v41"] * len(held_out))
    assert run(capsys, "calibrate", "export", str(calibration), "--out", str(table))[0] == 0
    (passes,) = read_fpm(table)
    assert passes.identity.layout == Layout()
    assert {forward.kind for forward in passes.forwards} == {"prefill", "decode"}
    measured = {entry.measured_s for entry in held_out if entry.component == RANK and entry.layout == "tp1dp1ep1"}
    assert all(any(abs(forward.seconds / one - 1.0) < 1e-9 for one in measured) for forward in passes.forwards)
    assert all(forward.policy == BALANCED for forward in passes.forwards if forward.kind == "prefill")
    assert run(capsys, "calibrate", "--model", "tiny-v41", "--from", f"fpm:{table}", "--out", str(again))[0] == 0
    one, two = (CalibratedCost(store.load(path).models[0], spec, Layout()) for path in (calibration, again))
    steps = uniform_steps(spec, np.array([[2.0], [12.0]]), np.array([[64.0], [200.0]]), np.array([[1.0], [1.0]]))
    forwards = np.sum(list(one.rank_seconds(steps).values()), axis=0)[:, 0]
    assert np.allclose(two.price_table(steps).step_s, forwards, rtol=0.15)


# --- recordings -------------------------------------------------------------------------------------------------------------------


def record(folder: Path, spec: ModelSpec, *, count: int = 60, **environment: Any) -> Path:
    """What the recorder writes in mode ``timers``, of the synthetic machine."""
    folder.mkdir()
    facts = {"model": spec.name, "layout": "tp1dp1ep1", "dtype": "float32", "mode": "timers", "device": "synthetic"} | environment
    (folder / "environment.rank0.json").write_text(json.dumps(facts))
    cost, lines = CalibratedCost(synthetic.true_fit(spec), spec, Layout()), []
    for number, shape in enumerate(synthetic.measured_shapes(spec, count)):
        plan = shape.plan(1)
        parts = cost.rank_seconds(table_of_plans([plan], spec))
        components = {name: float(seconds[0, 0]) for name, seconds in parts.items()}
        line = {"step": number, "rank": 0, "seconds": sum(components.values()) + 1e-4, "components": components, "plan": plan.ranks[0]}
        lines.append(msgspec.json.encode(line))
    (folder / "steps.rank0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def test_a_recording_is_fitted_by_component(spec: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = record(tmp_path / "recording", spec), tmp_path / "cal"
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", str(folder), "--out", str(out))
    assert code == 0, text
    found = store.load(out).models[0]
    steps = uniform_steps(spec, np.array([[3.0], [20.0]]), np.array([[90.0], [300.0]]), np.array([[1.0], [1.0]]))
    mine = CalibratedCost(found, spec, Layout()).rank_seconds(steps)
    truth = CalibratedCost(synthetic.true_fit(spec), spec, Layout()).rank_seconds(steps)
    for name in ("projection", "expert_gemm", "attention.sparse"):
        assert np.allclose(mine[name], truth[name], rtol=0.05), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "profile"}, "recorded in mode 'profile', which slows the steps"),
        ({"layout": "tp1dp2ep2"}, "a recording of layout tp1dp2ep2 cannot be fitted"),
        ({"model": "another"}, "is a recording of another; --model is tiny-v41"),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"count": 4}, "steps; needed: 10 or more"),
    ],
)
def test_recordings_that_cannot_be_fitted(
    spec: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    folder = record(tmp_path / "recording", spec, **options)
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", str(folder), "--out", str(tmp_path / "cal"))
    assert code != 0
    assert message in text
    assert not (tmp_path / "cal").exists()


def test_a_broken_line_is_named(spec: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "recording", spec)
    (folder / "steps.rank0.jsonl").write_text('{"step": 1')
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", str(folder), "--out", str(tmp_path / "cal"))
    assert code != 0
    assert "steps.rank0.jsonl is broken" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("aic:gb300/sglang", "twinfer predict --system"),
        ("kernels.parquet", "needed is the folder of a recording"),
        ("fpm:nowhere.parquet", "nowhere.parquet cannot be read"),
    ],
)
def test_other_sources_are_refused_with_the_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, message: str) -> None:
    code, text = run(capsys, "calibrate", "--model", "tiny-v41", "--from", source, "--out", str(tmp_path / "cal"))
    assert code != 0
    assert message in text
    assert not (tmp_path / "cal").exists()
