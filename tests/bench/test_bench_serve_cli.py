"""``twinfer bench serve`` from the command line to the files it leaves, against a server of scripts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

import dashboards.report
import twinfer
from tests.bench.fake_server import (
    Answer,
    Handler,
    chat_chunk,
    plain,
    role_chunk,
    stream,
    threaded_server,
    usage,
)
from tests.disk import REASON, full_disk


def words(text: str) -> int:
    return len(text.split())


def answer(path: str, body: dict[str, Any]) -> Answer:
    """A model whose tokens are words, and which says as many as it was asked for."""
    if path == "/tokenize":
        return plain(200, {"count": words(body["prompt"]), "tokens": []})
    if path == "/v1/completions":
        count = body["max_tokens"]
        prompt = body["prompt"]
        size = len(prompt) if isinstance(prompt, list) else words(prompt)
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": " w", "finish_reason": None}]} for _ in range(count)]
        last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        return stream(*chunks, last, {"choices": [], "usage": usage(size, count)})
    count = body.get("max_completion_tokens", 3)
    size = words(body["messages"][0]["content"])
    chunks = [chat_chunk(" w", usage=usage(size, index + 1)) for index in range(count)]
    return stream(
        role_chunk(), *chunks, chat_chunk(finish="length", usage=usage(size, count)), {"choices": [], "usage": usage(size, count)}
    )


def without_tokenize(path: str, body: dict[str, Any]) -> Answer:
    return plain(404, {"error": {"message": "no such route"}}) if path == "/tokenize" else answer(path, body)


def run(capsys: pytest.CaptureFixture[str], handler: Handler, *arguments: str) -> tuple[int, dict[str, Any], str, Any]:
    with threaded_server(handler) as server:
        code = twinfer.main(["bench", "serve", "--base-url", server.url, "--json", *arguments])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err, server


def test_a_closed_loop(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _, server = run(
        capsys, answer, "--num-prompts", "20", "--concurrency", "4", "--isl", "30:60", "--osl", "6", "--ignore-eos", "--temperature", "0.5",
        "--extra-body", '{"top_k": 5}', "--warmup-requests", "3", "--api-key", "secret",
    )  # fmt: skip
    assert code == 0
    assert (result["requests"], result["finished"], result["failed"]) == (20, 20, 0)
    assert result["model"] == "fake-model"
    assert result["loop"] == "closed"
    assert result["prompts_from"] == "tokenize"
    assert result["output_tokens"] == 120
    assert result["unique_prompts"] == 20
    assert result["itl_s"]["count"] == 100
    assert 30 <= result["prompt_tokens_per_request"]["p50"] <= 60
    assert result["schedule_slip_s"]["count"] == 0
    assert set(result["ttft_s"]) >= {"mean", "p50", "p90", "p99"}
    # At most one connection a place, kept alive; the warm-up is sent and not counted.
    assert server.peak <= 4
    assert server.num_connections <= 4
    assert len(server.requests) == 23
    assert server.headers["authorization"] == "Bearer secret"
    path, body = server.requests[-1]
    assert path == "/v1/chat/completions"
    assert (body["max_completion_tokens"], body["ignore_eos"], body["temperature"], body["top_k"]) == (6, True, 0.5, 5)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert len({request["messages"][0]["content"] for _, request in server.requests}) == 23


def test_a_closed_loop_keeps_its_places_taken(capsys: pytest.CaptureFixture[str]) -> None:
    gate = trio.Event()
    arrived = 0

    def held(path: str, body: dict[str, Any]) -> Answer:
        """Nobody is answered before four are there."""
        nonlocal arrived
        if path == "/tokenize":
            return answer(path, body)
        arrived += 1
        if arrived == 4:
            gate.set()
        return [gate, *answer(path, body)]

    code, result, _, server = run(capsys, held, "--num-prompts", "6", "--concurrency", "4", "--isl", "3", "--osl", "1", "--timeout", "20")
    assert (code, server.peak, result["concurrency"]["peak"]) == (0, 4, 4.0)


def test_an_open_loop_sends_on_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _, _ = run(
        capsys, answer, "--num-prompts", "20", "--request-rate", "200", "--burstiness", "2", "--isl", "5", "--osl", "2"
    )
    assert code == 0
    assert result["loop"] == "open"
    assert result["schedule_slip_s"]["count"] == 20
    assert result["schedule_slip_s"]["p50"] >= 0


def test_all_at_once_with_a_cap(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _, server = run(
        capsys, answer, "--num-prompts", "12", "--request-rate", "inf", "--max-concurrency", "3", "--isl", "5", "--osl", "2"
    )
    assert code == 0
    assert server.peak <= 3
    assert result["workload"]["request_rate_per_s"] == "inf"


def test_completions_get_token_ids_where_nobody_counts(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _, server = run(
        capsys, without_tokenize, "--endpoint", "completions", "--num-prompts", "3", "--isl", "17", "--osl", "4", "--prefix-tokens", "6"
    )
    assert code == 0
    assert result["prompts_from"] == "ids"
    prompts = [body["prompt"] for _, body in server.requests]
    assert all(len(prompt) == 23 for prompt in prompts)
    assert prompts[0][:6] == prompts[1][:6] != prompts[1][6:12]
    assert result["prompt_tokens"] == 69
    assert result["token_counts_from"] == {"usage": 3}


def test_chat_gets_words_where_nobody_counts(capsys: pytest.CaptureFixture[str]) -> None:
    _, result, _, _ = run(capsys, without_tokenize, "--num-prompts", "2", "--isl", "9", "--osl", "1")
    assert result["prompts_from"] == "words"
    assert result["prompt_tokens_per_request"]["mean"] == 9


def test_a_trace_replayed_and_in_a_closed_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 50 * index, "input_length": 600, "output_length": 2 + index, "hash_ids": [0, index + 1]} for index in range(4)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    _, result, _, server = run(capsys, answer, "--dataset", str(trace), "--trace-speed", "5")
    assert result["loop"] == "open"
    assert result["output_tokens"] == 2 + 3 + 4 + 5
    texts = [body["messages"][0]["content"].split() for _, body in server.requests]
    assert all(len(text) == 600 for text in texts)
    assert len({tuple(text[:512]) for text in texts}) == 1
    _, result, _, server = run(capsys, answer, "--dataset", str(trace), "--max-concurrency", "1")
    assert result["loop"] == "closed"
    assert server.peak == 1


def test_the_duration_ends_the_sending(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _, _ = run(capsys, answer, "--duration", "0.2", "--isl", "3", "--osl", "1")
    assert code == 0
    assert result["finished"] == result["requests"] > 1


def test_cancellations_are_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def slow(path: str, body: dict[str, Any]) -> Answer:
        whole = list(answer(path, body))
        return whole if path == "/tokenize" else [*whole[:3], 30.0, *whole[3:]]

    code, result, err, _ = run(
        capsys, slow, "--num-prompts", "4", "--isl", "3", "--osl", "3", "--request-cancellation-rate", "100",
        "--request-cancellation-delay", "0.05",
    )  # fmt: skip
    assert code == 0
    assert (result["cancelled"], result["failed"], result["finished"]) == (4, 0, 0)
    assert "none of the 4 requests finished: 0 failed, 4 were cancelled" in err
    assert result["e2e_s"]["count"] == 0


def failing(status: int, every: int) -> Handler:
    count = 0

    def handler(path: str, body: dict[str, Any]) -> Answer:
        nonlocal count
        if path == "/tokenize":
            return answer(path, body)
        count += 1
        return plain(status, {"error": {"message": "on purpose"}}) if count % every == 0 else answer(path, body)

    return handler


@pytest.mark.parametrize(
    ("handler", "arguments", "code"),
    [
        (failing(429, 2), [], 0),  # the load's: said, but no fault
        (failing(429, 1), [], 1),  # nothing was served
        (failing(500, 2), [], 1),
        (answer, ["--goodput", "ttft:60000", "--strict-slo"], 0),
        (answer, ["--goodput", "ttft:0.0001", "tpot:60000", "--strict-slo", "50"], 3),
        (answer, ["--goodput", "ttft:0.0001"], 0),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], handler: Handler, arguments: list[str], code: int) -> None:
    found, result, _, _ = run(capsys, handler, "--num-prompts", "4", "--isl", "3", "--osl", "2", *arguments)
    assert found == code
    assert result["failed"] == sum(result["errors"].values())
    if result["failed"]:
        assert "on purpose" in result["error_examples"][0]


def test_a_warm_up_of_nothing_but_errors_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, err, server = run(capsys, failing(500, 1), "--num-prompts", "50", "--warmup-requests", "2")
    assert code == 1
    assert "all 2 warm-up requests failed" in err
    assert result["error"]["type"] == "TwinferError"
    assert len(server.requests) == 2


def test_a_table_for_people_and_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "new" / "run.json"
    with threaded_server(failing(500, 3)) as server:
        arguments = ["--num-prompts", "6", "--isl", "3", "--osl", "4", "--goodput", "ttft:1000,e2e:9000", "--output", str(output)]
        code = twinfer.main(["bench", "serve", "--base-url", f"{server.url}/v1/", *arguments])
    captured = capsys.readouterr()
    assert code == 1
    assert "6 requests: 4 finished, 2 failed" in captured.out
    assert "TTFT, ms" in captured.out
    assert "warning: 2 of 6 requests failed (http_500 2)" in captured.err
    table = json.loads(output.read_text())
    rows = [json.loads(line) for line in (tmp_path / "new" / "run.requests.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows].count("http_500") == table["failed"] == 2
    assert sum(row["output_tokens"] for row in rows) == table["output_tokens"] == 16
    assert all(len(row["itl_s"]) == 3 for row in rows if row["outcome"] == "length")
    page = (tmp_path / "new" / "run.html").read_text()
    assert "2 failed" in page
    # The files alone make the same report again.
    assert dashboards.report.serve_report(table, rows) == page


def test_the_files_are_named_by_the_page_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = ("--num-prompts", "1", "--isl", "3", "--osl", "2", "--output")
    assert run(capsys, answer, *few, str(tmp_path / "x.html"))[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.json", "x.requests.jsonl"]
    page = (tmp_path / "x.html").read_text()
    with full_disk(10_000):  # the summary and the requests fit
        code, _, err, _ = run(capsys, answer, *few, str(tmp_path / "x.html"))
    assert code == 1
    assert f"--output {tmp_path / 'x.html'} cannot be written: {REASON}" in err
    assert (tmp_path / "x.html").read_text() == page
    assert len(list(tmp_path.iterdir())) == 3
    # A folder that has such a name stays one.
    (tmp_path / "old.html").mkdir()
    assert run(capsys, answer, *few, str(tmp_path / "old.html"))[0] == 0
    assert (tmp_path / "old.html" / "report.html").is_file()


def test_without_the_drawing_library_the_rest_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> None:
        raise ImportError("No module named 'plotly'")

    monkeypatch.setattr(dashboards.report, "write_serve_report", absent)
    code, _, err, _ = run(capsys, answer, "--num-prompts", "1", "--isl", "3", "--osl", "2", "--output", str(tmp_path))
    assert code == 0
    assert "twinfer[dashboards]" in err
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--request-rate", "0"], ["--request-rate", "'0'", "inf"]),
        (["--request-rate", "nan"], ["--request-rate"]),
        (["--burstiness", "-1"], ["--burstiness", "0.01"]),
        (["--isl", "9:3"], ["--isl", "9:3", "above"]),
        (["--isl", "0"], ["--isl", "1 to"]),
        (["--isl", "3:9", "--isl-stddev", "2"], ["--isl", "stddev"]),
        (["--osl", "9" * 99], ["--osl"]),
        (["--max-concurrency", "0"], ["--max-concurrency", "1 to 65536"]),
        (["--goodput", "ttft"], ["--goodput", "milliseconds"]),
        (["--goodput", "speed:3"], ["speed:3", "ttft, tpot, itl or e2e"]),
        (["--goodput", "ttft:-5"], ["ttft:-5"]),
        (["--strict-slo"], ["--strict-slo", "--goodput"]),
        (["--strict-slo", "120", "--goodput", "ttft:3"], ["--strict-slo", "120"]),
        (["--extra-body", "[1]"], ["--extra-body", "object"]),
        (["--extra-body", "{"], ["--extra-body", "JSON"]),
        (["--extra-body", '{"n": 2}'], ["--extra-body", "n"]),
        (["--base-url", "ftp://x"], ["--base-url", "ftp://x"]),
        (["--base-url", "http://"], ["--base-url"]),
        (["--base-url", "http://x:99999999"], ["--base-url"]),
        (["--api-key-file", "/no/such/file"], ["/no/such/file"]),
        (["--api-key", "clé"], ["API key"]),
        (["--dataset", "x", "--isl", "3"], ["--isl", "--dataset"]),
        (["--output", "/dev/null/x"], ["--output", "/dev/null/x"]),
        (["--output", "x.csv"], ["--output x.csv names a file; needed: a folder", "FILE.json or FILE.html"]),
        (["--request-cancellation-rate", "101"], ["--request-cancellation-rate", "0 to 100"]),
        (["--timeout", "nan"], ["--timeout"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_request(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    code = twinfer.main(["bench", "serve", *arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    for part in parts:
        assert part in captured.err


def test_an_interrupted_run_prints_no_figures() -> None:
    arrived = threading.Event()

    def held(path: str, body: dict[str, Any]) -> Answer:
        if path == "/tokenize":
            return answer(path, body)
        arrived.set()
        return [trio.Event()]

    with threaded_server(held) as server:
        command = [sys.executable, "-m", "twinfer", "bench", "serve", "--base-url", server.url, "--json"]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert arrived.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_no_server_and_no_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert twinfer.main(["bench", "serve", "--base-url", "127.0.0.1:9"]) == 1
    assert "is the server running?" in capsys.readouterr().err
    with threaded_server(answer) as server:
        assert twinfer.main(["bench", "serve", "--base-url", server.url, "--dataset", "/no/such/file"]) == 2
    assert "/no/such/file" in capsys.readouterr().err


def test_messages_need_the_chat_route(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"messages": [{"role": "user", "content": "a b"}]}')
    code, result, _, _ = run(capsys, answer, "--dataset", str(dataset))
    assert (code, result["prompt_tokens"]) == (0, 2)
    code, result, err, _ = run(capsys, answer, "--dataset", str(dataset), "--endpoint", "completions")
    assert code == 2
    assert "use --endpoint chat" in err
