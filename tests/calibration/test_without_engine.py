"""What an installation of the calibration extra alone can do: neither torch nor trio is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from calibration import store
from calibration.probe import Probe
from tests.calibration import synthetic
from tests.calibration.trace_files import write_kineto

_ROOT = Path(__file__).resolve().parents[2]
_ABSENT = ("torch", "trio", "tokenizers", "safetensors", "gguf", "jinja2", "hypercorn", "starlette", "prometheus_client", "llguidance",
           "httpx", "tqdm", "deepseek_recipe", "plotly", "simpy")  # fmt: skip
_MAIN = f"import sys; sys.modules.update(dict.fromkeys({_ABSENT!r})); import twinfer; sys.exit(twinfer.main(sys.argv[1:]))"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _MAIN, *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fit, held_out = synthetic.assembled(synthetic.tiny(), count=40)
    path = tmp_path_factory.mktemp("calibration") / "machine.cal"
    store.save(path, store.new_calibration((fit,), Probe(1e-3, 2e-3, 3e-3)), held_out, ["tiny-v41"] * len(held_out))
    return path


def test_steps_are_priced(calibration: Path) -> None:
    found = run(
        *("predict", "--model", "tiny-v41", "--calibration", str(calibration), "--layout", "tp1dp1ep1,tp1dp2ep2"),
        *("--batch-sizes", "1,8", "--context", "64", "--new-tokens", "8", "--json"),
    )
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)["points"]) == 4


def test_traces_are_imported(tmp_path: Path) -> None:
    write_kineto(tmp_path / "trace.json")
    found = run("trace", "import", str(tmp_path / "trace.json"), "--out", str(tmp_path / "kernels.parquet"), "--json")
    assert found.returncode == 0, found.stderr
    assert run("trace", "show", str(tmp_path / "kernels.parquet"), "--json").stdout == found.stdout


@pytest.mark.parametrize("arguments", [("serve", "--port", "1"), ("generate", "tiny-v41", "--prompt", "a"), ("bench", "steps", "tiny-v41")])
def test_the_engine_s_commands_say_what_is_missing(arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert found.returncode == 2
    assert found.stderr.strip().endswith("needs the engine: pip install 'twinfer[engine]' (trio is missing)")


def test_measuring_says_what_is_missing(tmp_path: Path) -> None:
    found = run("calibrate", "--out", str(tmp_path / "x.cal"))
    assert found.returncode == 2
    assert "needs the engine" in found.stderr
    assert "twinfer[engine,calibration]" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_help_is_whole() -> None:
    found = run("--help")
    assert found.returncode == 0, found.stderr
    assert all(name in found.stdout for name in ("generate", "serve", "predict", "calibrate", "trace"))
