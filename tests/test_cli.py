"""The command line: exit codes, one clear line for what is wrong, JSON that parses, and the logits command against the fixtures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import twinfer

FIXTURES = Path(__file__).parent / "fixtures"
ENGRAM = str(FIXTURES / "v41_engram")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = twinfer.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("command", [[], ["generate"], ["bench"], ["model"], ["nonsense"], ["generate", "m", "--no-such-flag"]])
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        twinfer.main(command)
    assert caught.value.code == 2
    assert "usage: twinfer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["--help"], ["generate", "--help"], ["logits", "--help"], ["model", "show", "--help"], ["check", "--help"]]
)
def test_help_is_printed(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        twinfer.main(command)
    assert caught.value.code == 0
    assert "usage: twinfer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "no-such-model", "--prompt", "x"], ["no-such-model", "tiny-v41", "smollm2-135m"]),
        (["generate", ENGRAM], ["--prompt"]),
        (["generate", ENGRAM, "--prompt", "x", "--temperature", "-1"], ["--temperature", "'-1'", "0 to 100"]),
        (["generate", ENGRAM, "--prompt", "x", "--layout", "tp1dp3ep2"], ["ep 2 does not divide"]),
        (["generate", ENGRAM, "--prompt", "x", "--layout", "2x(tp1dp1)"], ["2x(tp1dp1ep1)", "this release runs one replica"]),
        (["generate", ENGRAM, "--prompt", "x", "--redundant-experts", "2"], ["redundant_experts is 2", "no experts to spread"]),
        (["generate", ENGRAM, "--prompts-file", "/no/such/file"], ["/no/such/file"]),
        (["check", ENGRAM, "--block-size", "3"], ["--block-size is 3", "multiple of 2"]),
        (["check", ENGRAM, "--context-length", "5000"], ["5000", "4096"]),
        (["check", ENGRAM, "--draft-tokens", "1"], ["--draft-tokens is 1", "at most 0"]),
        (["check", ENGRAM, "--device", "tpu"], ["--device", "'tpu'"]),
        (["check", ENGRAM, "--max-total-tokens", "5"], ["--max-total-tokens is 5", "128"]),
        (["bench", "steps", ENGRAM, "--batch-sizes", "1,x"], ["--batch-sizes", "1,x"]),
        (["bench", "steps", ENGRAM, "--context", "0"], ["--context is 0"]),
        (["generate", ENGRAM, "--prompt", "x", "--max-tokens", "9" * 400], ["--max-tokens", "1 to 16777216"]),
        (["generate", ENGRAM, "--prompt", "x", "--top-p", "0"], ["--top-p"]),
        (["generate", ENGRAM, "--prompt", "x", "--n", "0"], ["n is 0", "1 to 128"]),
        (["generate", ENGRAM, "--prompts-file", "/dev/zero"], ["/dev/zero", "longer than"]),
        (["check", ENGRAM, "--config", "/dev/zero"], ["/dev/zero", "longer than"]),
        (["bench", "steps", ENGRAM, "--batch-sizes", "9" * 5000], ["--batch-sizes"]),
        (["bench", "steps", ENGRAM, "--context", "100000"], ["--context 100000", "4096"]),
        (["logits", ENGRAM, "--inputs", "x", "--out", "/dev/full"], ["/dev/full", "not a regular file"]),
        (["logits", ENGRAM, "--inputs", "x", "--out", "/no/such/folder/o"], ["/no/such/folder"]),
        (["logits", ENGRAM, "--inputs", "x", "--out", "o", "--device", "foo"], ["--device", "'foo'"]),
        (["model", "get", "nothing"], ["nothing", "smollm2-135m"]),
    ],
)
def test_what_cannot_work_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    for part in parts:
        assert part in err


def test_an_error_is_json_too_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "no-such-model", "--json")
    assert code == 2
    assert json.loads(out)["error"]["type"] == "ConfigError"


def test_print_config_shows_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_BLOCK_SIZE", "64")
    shown = run_json(capsys, "generate", "any", "--print-config", "--max-running-requests", "3")
    assert shown["block_size"] == {"value": 64, "origin": "environment TWINFER_BLOCK_SIZE"}
    assert shown["max_running_requests"] == {"value": 3, "origin": "command line"}
    assert shown["temperature"]["origin"] == "default"


def test_prompts_files_are_checked_line_by_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    long = "9" * 5000
    cases = (
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2"), ("nonsense\n", "line 1"), ("\n", "no prompt"), (f'{{"prompt": {long}}}', "line 1"),
        ('{"prompt": "a", "n": "x"}', "n is 'x'"),
        ('{"prompt": "a", "n": null}', "n is None"), ('{"prompt": "a", "nonsense": 1}', "nonsense"),
        ('{"prompt": "a", "temperature": ' + "9" * 400 + "}", "--temperature"),
    )  # fmt: skip
    for text, part in cases:
        file.write_text(text)
        code, _, err = run(capsys, "generate", ENGRAM, "--prompts-file", str(file))
        assert code == 2
        assert part in err


def test_one_config_file_serves_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("max-tokens = 10\nblock-size = 64\n")
    assert run_json(capsys, "check", ENGRAM, "--config", str(config))["non_default"]["block_size"] == 64


@pytest.mark.parametrize(
    ("key", "value", "nested"),
    [("bos_token_id", 99999, False), ("eos_token_id", 99999, False), ("engram_pad_token_id", 99999, True), ("rms_norm_eps", 10**400, True)],
)
def test_numbers_of_a_model_folder_are_bounded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, value: int, nested: bool
) -> None:
    config = json.loads((Path(ENGRAM) / "config.json").read_text())
    (config["text_config"] if nested else config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run(capsys, "check", str(tmp_path))
    assert code == 2
    assert key in err
    assert len(err) < 600


def test_closed_or_full_standard_streams_are_no_traceback() -> None:
    command = f"{sys.executable} -m twinfer"
    for asked, redirection, code in (
        *((f"check {ENGRAM}", redirection, code) for redirection, code in ((">/dev/full", 1), (">&-", 0), ("2>&-", 0), ("<&-", 0))),
        ("predict --help", ">/dev/full", 1),
    ):
        done = subprocess.run(
            ["sh", "-c", f"{command} {asked} {redirection}"], capture_output=True, text=True, cwd=FIXTURES.parents[1], check=False
        )
        assert done.returncode == code, (redirection, done.stderr)
        assert "Traceback" not in done.stderr
        if redirection == ">/dev/full":
            assert done.stderr == "twinfer: standard output cannot be written: No space left on device\n"


def test_check_and_show_agree_on_memory(capsys: pytest.CaptureFixture[str]) -> None:
    check = run_json(capsys, "check", ENGRAM, "--max-total-tokens", "4096")
    show = run_json(capsys, "model", "show", ENGRAM, "--max-total-tokens", "4096")
    assert check["kv_tokens"] == 4096
    assert check["memory_bytes"]["weights"] == show["memory_bytes"]["weights"]
    assert check["memory_bytes"]["kv"] == show["memory_bytes"]["kv"] + show["memory_bytes"]["kv_fixed"]
    assert show["parameters"] == sum(show["parameters_by_group"].values())
    listed = {model["name"]: model["preset"] for model in run_json(capsys, "model", "list")["models"]}
    assert listed == {"tiny-v41": False, "smollm2-135m": False, "v41-100m": True, "qwen3-moe-100m": True}


@pytest.mark.parametrize("way", [[], ["--chunk", "5"], ["--decode-from", "3"], ["--block-size", "8"]])
def test_logits_match_the_fixture_and_continue_greedily(capsys: pytest.CaptureFixture[str], tmp_path: Path, way: list[str]) -> None:
    folder = FIXTURES / "v41_ragged_greedy"
    out = tmp_path / "out.safetensors"
    arguments = ["--inputs", str(folder / "inputs.safetensors"), "--out", str(out), "--cache-rounding", "off", "--greedy", "16"]
    run_json(capsys, "logits", str(folder), *arguments, *way)
    ours, expected = load_file(out), load_file(folder / "expected.safetensors")
    assert (ours["logits"] - expected["logits"]).abs().max() <= 1e-3
    assert torch.equal(ours["logits"].argmax(-1), expected["logits"].argmax(-1))
    assert torch.equal(ours["cu_seqlens"], expected["cu_seqlens"])
    assert torch.equal(ours["greedy.ids"], expected["greedy.ids"])


def test_logits_inputs_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ids, lengths = torch.zeros((2, 4), dtype=torch.int64), torch.tensor([4, 2])
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"input_ids": ids}, "lengths is missing"),
        ({"input_ids": ids, "lengths": torch.tensor([5, 1])}, "lengths [5, 1]"),
        ({"input_ids": ids, "lengths": torch.tensor([0, 1])}, "lengths [0, 1]"),
        ({"input_ids": ids.float(), "lengths": lengths}, "integers"),
        ({"input_ids": ids[0], "lengths": lengths}, "[B, Lmax]"),
        ({"input_ids": ids + 256, "lengths": lengths}, "outside 0..255"),
    ]
    file = tmp_path / "in.safetensors"
    for tensors, part in cases:
        save_file(tensors, file)
        code, _, err = run(capsys, "logits", ENGRAM, "--inputs", str(file), "--out", str(tmp_path / "out.safetensors"))
        assert code == 2
        assert part in err
    file.write_bytes(b"\xff" * 20)
    code, _, err = run(capsys, "logits", ENGRAM, "--inputs", str(file), "--out", str(tmp_path / "out.safetensors"))
    assert code == 2
    assert "not a readable safetensors file" in err
    assert not (tmp_path / "out.safetensors").exists()
