"""``twinfer serve`` as a command: what it says when it starts, what it refuses before it does, how its process ends."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import twinfer
from engine.api import server
from engine.api.config import ApiConfig
from engine.api.info import ServerInfo
from engine.api.summary import summary, warnings
from engine.cli import logs
from engine.cli.progress import LoadProgress, Progress
from engine.cli.serve import print_facts
from engine.config import ENGINE_OPTIONS, SERVE_OPTIONS
from tests.api.conftest import ROOT, LiveServer, start_server

KEY = "a-key-of-the-test"
PROMPT = "a prompt that no log may hold"


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """The command sets up the process's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


# -- a whole process ----------------------------------------------------------------------------------------------------------


def test_a_server_says_one_thing_everywhere(live_server: LiveServer) -> None:
    """The summary, ``--json``, /server_info and /v1/models."""
    facts, text = live_server.facts, live_server.log.read_text()
    info = httpx.get(f"{live_server.base_url}/server_info").json()
    models = httpx.get(f"{live_server.base_url}/v1/models").json()["data"]
    known = {field.name for field in msgspec.structs.fields(ServerInfo)}
    assert {key: info[key] for key in known} == {key: facts[key] for key in known}
    assert (models[0]["id"], models[0]["max_model_len"]) == ("tiny-v41", info["context_length"])
    assert httpx.get(f"{live_server.base_url}/health").status_code == 200
    assert facts["port"] == httpx.URL(live_server.base_url).port != 0
    for quoted in (
        f"twinfer {info['version']} serves tiny-v41 over HTTP at {live_server.base_url}",
        f"{info['kv_tokens']:,} tokens in blocks of {info['block_size']}",
        f"{info['full_length_requests']} at the full length of {info['context_length']:,} tokens",
        "layout tp1dp1ep1, float32 on cpu",
        "port=0",
        f"ready in {info['ready_s']:.1f} s",
        "/v1/models",
        f"format {info['chat_format']}",
    ):
        assert quoted in text
    assert "loading: 100 %" in text
    assert "warming up: 100 %" in text
    assert info["full_length_requests"] == info["kv_tokens"] // info["context_length"]
    assert info["warm_up_s"] > 0


def test_warm_up_counts_for_nobody(live_server: LiveServer) -> None:
    """Not in the metrics, and nothing of it can be hit."""
    text = httpx.get(f"{live_server.base_url}/metrics").text
    assert text
    stats = httpx.get(f"{live_server.base_url}/server_info").json()["stats"]["core"]
    assert stats["steps_total"] > 0
    assert stats["num_running"] == 0


def test_json_log_keys_and_interrupt(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# of the test\n{KEY}\n")
    environment = {"TWINFER_API_KEY": "another-key", "TWINFER_LOG_FORMAT": "json"}
    arguments = (
        "--api-key-file",
        str(keys),
        "--no-warm-up",
        "--log-requests",
        "--served-model-name",
        "one,two",
        "--served-model-name",
        "3",
    )
    live = start_server(tmp_path / "log", *arguments, environment=environment)
    try:
        client = httpx.Client(base_url=live.base_url, headers={"authorization": f"Bearer {KEY}"})
        assert client.post("/tokenize", json={"prompt": PROMPT}).status_code == 200
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["one", "two", "3"]
        assert httpx.get(f"{live.base_url}/v1/models").status_code == 401
        assert httpx.get(f"{live.base_url}/v1/models", headers={"authorization": "Bearer another-key"}).status_code == 200
        info = client.get("/server_info").json()
        assert (info["num_api_keys"], info["warm_up_s"] < 0.1) == (2, True)
    finally:
        code = live.stop(signal.SIGINT)
    assert code == 130
    text = live.log.read_text()
    entries = [json.loads(line) for line in text.splitlines()]  # every line is JSON
    assert all({"ts", "level", "logger", "message"} <= set(entry) for entry in entries)
    ready = next(entry for entry in entries if entry["message"] == "ready")["fields"]
    assert ready == live.facts
    assert ready["non_default"]["api_key"] == "(hidden)"
    requests = [entry["fields"] for entry in entries if entry["logger"] == "twinfer.access"]
    assert [(entry["method"], entry["path"], entry["status"]) for entry in requests] == [
        ("POST", "/tokenize", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/v1/models", 200),
        ("GET", "/server_info", 200),
    ]
    key_ids = [entry["key_id"] for entry in requests]
    assert key_ids[2] is None
    assert key_ids[0] == key_ids[1] != key_ids[3]
    assert not any(secret in text + json.dumps([live.facts, info]) for secret in (KEY, "another-key", PROMPT))


# -- what is refused before anything is loaded --------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = twinfer.main(["serve", *arguments])
    return code, capsys.readouterr().err


def test_an_address_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio.run", lambda *_: pytest.fail("the engine was started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, text = run(capsys, "--port", str(port))
    assert code == 2
    assert (
        text
        == f"twinfer serve: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port (0 takes a free one)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--port", "65536"), "0 to 65535"),
        (("--host", "no such host"), "--host no such host"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("--api-key", "short"), "5 characters; needed: 8 to 512"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--served-model-name", "a\nb"), "printable"),
        (("--ssl-keyfile", "key.pem"), "--ssl-certfile"),
        (("--ssl-certfile", "/nowhere/cert.pem"), "--ssl-certfile /nowhere/cert.pem"),
        (("--request-timeout", "nan"), "--request-timeout"),
        (("--metrics-compat", "other"), "vllm"),
        (("tiny-v41", "--model", "other"), "two models"),
        (("/nowhere/model",), "/nowhere/model"),
        (("--tpot-slo", "40"), "--tpot-slo needs --calibration"),
        (("--calibration-correction",), "--calibration-correction needs --calibration"),
        (("--calibration", "/nowhere.cal"), "/nowhere.cal"),
    ],
)
def test_what_cannot_work_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str) -> None:
    code, text = run(capsys, *arguments, *(() if "--port" in arguments else ("--port", "0")))
    assert code == 2
    last = text.splitlines()[-1]
    assert last.startswith("twinfer serve: ")
    assert reason in last
    assert "short" not in text


def test_errors_are_json_where_the_log_is(capsys: pytest.CaptureFixture[str]) -> None:
    code = twinfer.main(["serve", "--log-format", "json", "--json", "--api-key", "short"])
    output = capsys.readouterr()
    assert code == 2
    entries = [json.loads(line) for line in output.err.splitlines()]
    assert [entry["level"] for entry in entries] == ["warning", "error"]
    assert "visible" in entries[0]["message"]
    assert json.loads(output.out)["error"]["message"] == entries[1]["message"]


def test_print_config_hides_keys_and_tells_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_PORT", "1234")
    assert twinfer.main(["serve", "--api-key", KEY, "--print-config", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["port"] == {"value": 1234, "origin": "environment TWINFER_PORT"}
    assert values["api_key"] == {"value": "(hidden)", "origin": "command line"}
    assert twinfer.main(["serve", "--api-key", KEY, "--print-config"]) == 0
    assert KEY not in capsys.readouterr().out


def test_no_option_has_two_meanings() -> None:
    flags = [flag for option in (*ENGINE_OPTIONS, *SERVE_OPTIONS) for flag in (f"--{option.name}", *option.aliases)]
    assert len(set(flags)) == len(flags)


# -- its parts ----------------------------------------------------------------------------------------------------------------


def an_info(**changes: Any) -> ServerInfo:
    values: dict[str, Any] = {field.name: 1 for field in msgspec.structs.fields(ServerInfo)}
    values |= {"served_names": ("m",), "model": "m", "chat_format": None, "non_default": {}, "sampling_defaults": {"temperature": 1.0}}
    return ServerInfo(**(values | changes))


def test_a_server_open_to_everybody_says_so_loudly() -> None:
    open_to_all, local, keyed = ApiConfig(host="0.0.0.0"), ApiConfig(), ApiConfig(host="0.0.0.0", ssl_certfile="c")
    assert "EVERYBODY" in summary(an_info(num_api_keys=0), open_to_all, "http://x", ["/a"])
    assert "--api-key-file" in warnings(an_info(num_api_keys=0), open_to_all)[0]
    assert warnings(an_info(num_api_keys=0), local) == []
    assert "unencrypted" in warnings(an_info(), open_to_all)[0]
    assert warnings(an_info(), keyed) == []


def test_progress_without_a_terminal_is_a_line_a_quarter(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "twinfer.serve")
    with Progress(enabled=True) as progress:
        loading = LoadProgress(progress, num_workers=2)
        for done in range(101):
            loading("one", done, 100)
        for done in range(101):
            loading("two", done, 100)
        progress.update("warming up", 0, 0)
        progress.update("warming up", 3, 3)
    assert [record.message for record in caplog.records] == [
        "loading: 25 %", "loading: 50 %", "loading: 75 %", "loading: 100 %", "warming up: 100 %",
    ]  # fmt: skip
    caplog.clear()
    with Progress(enabled=False) as silent:
        silent.update("loading", 1, 1)
    assert not caplog.records
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(enabled=True) as bar:
        bar.update("loading", 1, 2)
    assert not caplog.records


def test_a_log_line_in_json() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, "%s\n%s", ("two", "lines"), None)
    record.fields = {"n": 1}
    entry = json.loads(logs.JsonFormatter().format(record))
    assert entry.pop("ts").endswith("Z")
    assert entry == {"level": "warning", "logger": "a.b", "message": "two\nlines", "fields": {"n": 1}}


def test_the_limit_on_open_files_bounds_the_connections(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits = [256, 1024]

    def setrlimit(_: int, values: tuple[int, int]) -> None:
        limits[:] = values

    monkeypatch.setattr("engine.api.server.resource.getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr("engine.api.server.resource.setrlimit", setrlimit)
    assert server.connection_limit(100) == 100
    assert limits == [256, 1024]
    assert server.connection_limit(4096) == 1024 - server.RESERVED_FILES
    assert limits == [1024, 1024]
    assert "ulimit -n" in caplog.text


def test_ipv6() -> None:
    with server.bind("::1", 0) as bound:
        assert server.base_url(bound, ApiConfig(host="::1")) == f"http://[::1]:{bound.getsockname()[1]}"


def test_a_standard_output_that_takes_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr("sys.stdout", full)
    print_facts({"url": "http://127.0.0.1:1"})
    print("and later output goes nowhere")
    assert "cannot be written to stdout: No space left on device" in caplog.text
    with contextlib.suppress(OSError):
        full.close()


def test_standard_files_that_were_closed_are_there_for_child_processes_too() -> None:
    """A file of number 2 that a child does not have is the first one it opens: a socket, say."""
    child = "import os; [os.fstat(number) for number in range(3)]"
    run_child = f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    code = f"import subprocess, sys, twinfer; twinfer._open_standard_streams(); {run_child}"
    assert subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code], cwd=ROOT, check=False).returncode == 0
