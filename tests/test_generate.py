"""``twinfer generate`` on the embedded model through the real actors and a real worker process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROMPT = "And it came to pass"


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twinfer", "generate", "tiny-v41", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run_json(*arguments: str) -> dict[str, Any]:
    process = start(*arguments, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


def worker_of(process: subprocess.Popen[str]) -> int:
    """The pid of the worker process, once it is there."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            if "worker_main" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        time.sleep(0.05)
    raise AssertionError("no worker process appeared")


def wait_for_text(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(1)


def test_one_prompt_prints_the_completion_alone_and_equals_the_batch() -> None:
    process = start("--prompt", PROMPT, "--max-tokens", "24")
    alone, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search(r"[a-z]+ [a-z]+ [a-z]+", alone)
    answer = run_json("--prompt", PROMPT, "--prompt", "The LORD is", "--prompt", PROMPT, "--max-tokens", "24", "--draft-tokens", "2")
    texts = [output["text"] for output in answer["outputs"]]
    assert texts[0] == texts[2] == alone[:-1]
    assert [output["finish_reason"] for output in answer["outputs"]] == ["length"] * 3
    assert answer["output_tokens"] == 72
    assert answer["outputs"][1]["usage"]["completion_tokens"] == 24


def test_samples_stop_strings_logprobs_and_token_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPT, "n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 12},
        {"prompt": PROMPT, "stop": ["king"], "max_tokens": 40, "logprobs": 2},
        {"prompt_token_ids": [0, 300, 301], "max_tokens": 3},
    ]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    outputs = run_json("--prompts-file", str(prompts))["outputs"]
    assert len({output["text"] for output in outputs[:3]}) == 3
    assert [output["seed"] for output in outputs[:3]] == [5, 6, 7]
    assert all(output["usage"]["completion_tokens"] == len(output["token_ids"]) for output in outputs)
    stopped = outputs[3]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == "king"
    assert "king" not in stopped["text"]
    assert all(len(entry[1]) == 2 and entry[0] <= 0 for entry in stopped["logprobs"])
    assert len(outputs[4]["token_ids"]) == 3
    again = run_json("--prompts-file", str(prompts))["outputs"]
    assert [output["text"] for output in again] == [output["text"] for output in outputs]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_worker_ends_the_command_with_an_error_that_names_it(number: signal.Signals) -> None:
    process = start("--prompt", PROMPT, "--max-tokens", "3000", "--ignore-eos", "--heartbeat-timeout", "2")
    worker = worker_of(process)
    wait_for_text(process)
    os.kill(worker, number)
    begin_s = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin_s < 15  # 2 s of heartbeat, the readers' grace, the process's own end; generous for a busy machine
    assert process.returncode == 1
    assert "worker-0" in err
    assert "Traceback" not in err
    assert not Path(f"/proc/{worker}").exists()


def test_an_interrupt_drains_and_a_second_one_stops_at_once() -> None:
    process = start("--prompt", PROMPT, "--max-tokens", "20", "--ignore-eos")
    wait_for_text(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(out) > 20  # drained: the completion was finished
    process = start("--prompt", PROMPT, "--max-tokens", "3500", "--ignore-eos")
    worker = worker_of(process)
    wait_for_text(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not Path(f"/proc/{worker}").exists()


def test_an_interrupted_benchmark_prints_no_points() -> None:
    command = [sys.executable, "-m", "twinfer", "bench", "steps", "tiny-v41", "--batch-sizes", "1", "--new-tokens", "400", "--json"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        arguments = [*command, "--shutdown-timeout", "0.2"]
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        worker_of(process)
        time.sleep(6)  # past the load; where a machine is slower the signal comes during it, which ends the same way
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert "points" not in out
        assert "Traceback" not in err
