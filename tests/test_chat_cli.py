"""``twinfer chat`` without a terminal: a server of scripts and an engine of scripted workers behind it, lines through a pipe."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import twinfer
from engine.actors.supervisor import open_engine
from engine.api.formats.base import ChatInput, Delta, PlainParser, PreparedChat
from engine.cli.chat_backend import Backend, EngineBackend
from engine.cli.chat_session import ChatSession, Ended, Said
from engine.core.errors import RequestError
from engine.core.sampling import SamplingParams
from engine.tokenizer import Tokenizer
from tests.actors.harness import MODULE, engine_config
from tests.actors.scripted_worker import Script
from tests.bench.fake_server import (
    CUT,
    STREAM_HEAD,
    Answer,
    Handler,
    chat_chunk,
    chunked,
    event,
    plain,
    role_chunk,
    stream,
    threaded_server,
    usage,
)
from tests.test_tokenizer import byte_level_json

ROOT = Path(__file__).parents[1]


def echo(path: str, body: dict[str, Any]) -> Answer:
    """Says back what it was sent last, and how many messages there were."""
    del path
    text = f"{len(body['messages'])}:{body['messages'][-1]['content']}"
    return stream(
        role_chunk(), chat_chunk(text[:2]), chat_chunk(text[2:]), chat_chunk(finish="stop"), {"choices": [], "usage": usage(9, 4, 3)}
    )


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handler: Handler, lines: str, *arguments: str
) -> tuple[int, str, str, list[dict[str, Any]]]:
    """(exit code, stdout, stderr, bodies that the server got)."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with threaded_server(handler) as server:
            code = twinfer.main(["chat", "--base-url", server.url, *arguments])
    finally:
        signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    return code, captured.out, captured.err, [body for _, body in server.requests]


def test_every_line_is_a_message_and_the_answers_alone_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err, bodies = chat(
        capsys,
        monkeypatch,
        echo,
        "hello\n\nline one\\\nline two\n//path\nlast",
        "--system",
        "be brief",
        "--temperature",
        "0.5",
        "--stop",
        "x",
    )
    assert code == 0
    assert out == "2:hello\n4:line one\nline two\n6:/path\n8:last\n"
    assert err == ""
    assert [message["role"] for message in bodies[-1]["messages"]] == ["system", *["user", "assistant"] * 3, "user"]
    assert bodies[0]["messages"][0]["content"] == "be brief"
    assert bodies[1]["messages"][2]["content"] == "2:hello"
    assert (bodies[0]["model"], bodies[0]["temperature"], bodies[0]["stop"]) == ("fake-model", 0.5, ["x"])
    # What nobody asked for is the server's own choice.
    assert not {"top_p", "max_tokens", "max_completion_tokens", "seed", "chat_template_kwargs"} & set(bodies[0])


def test_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/stats", "/regenerate", "one", "/regenerate", "/stats", "two", f"/save {saved}", "/reset", "three", "/system new", "four",
             "/system", "/system -", "five", "/save", "/save /no/such/folder/x", "/nope", "/help", "/exit", "never"]  # fmt: skip
    code, out, err, bodies = chat(capsys, monkeypatch, echo, "\n".join(lines))
    assert code == 0
    assert out.splitlines() == ["1:one", "1:one", "3:two", "1:three", "2:four", "1:five"]
    assert bodies[4]["messages"][0] == {"role": "system", "content": "new"}
    notes = err.splitlines()
    assert notes[:2] == ["no answer yet", "there is no message to answer"]
    assert "9 prompt (3 cached) + 4 answer tokens; context 13" in notes[2]
    conversation = json.loads(saved.read_text())
    assert [message["content"] for message in conversation["messages"]] == ["one", "1:one", "two", "3:two"]
    not_saved = "/save /no/such/folder/x cannot be written: No such file"
    for text in ("new", "needed: /save FILE", not_saved, "/nope is no command", "/regenerate"):
        assert text in err


def test_json_is_one_object_and_the_answers_go_to_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err, _ = chat(capsys, monkeypatch, echo, "a\nb\n", "--json")
    assert code == 0
    answer = json.loads(out)
    assert [turn["content"] for turn in answer["turns"]] == ["1:a", "3:b"]
    turn = answer["turns"][0]
    assert (turn["finish_reason"], turn["prompt_tokens"], turn["completion_tokens"]) == ("stop", 9, 4)
    assert turn["ttft_s"] > 0
    assert "1:a" in err


def test_reasoning_is_kept_apart_and_not_sent_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def thinking(path: str, body: dict[str, Any]) -> Answer:
        del path, body
        thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]}
        return stream(thought, chat_chunk("yes"), chat_chunk(finish="stop"))

    code, out, _, bodies = chat(capsys, monkeypatch, thinking, "a\nb\n", "--thinking", "on")
    assert (code, out) == (0, "yes\nyes\n")
    assert "hm" not in json.dumps(bodies[1])
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (plain(429, {"error": {"message": "queue full"}}), "429: queue full"),
        (stream(chat_chunk("a"), {"error": {"message": "worker died"}}, done=False), "broke the answer off: worker died"),
        ([STREAM_HEAD, chunked(event(chat_chunk("a"))), CUT], "connection broke"),
        (stream(chat_chunk("a")), "without a finish reason"),
        ([STREAM_HEAD, chunked(b"data: {\n\n")], "no chat chunk"),
    ],
)
def test_a_failed_answer_is_said_and_its_message_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: Answer, text: str
) -> None:
    failed = False

    def handler(path: str, body: dict[str, Any]) -> Answer:
        nonlocal failed
        if not failed:
            failed = True
            return answer
        return echo(path, body)

    code, out, err, bodies = chat(capsys, monkeypatch, handler, "first\n/regenerate\nsecond\n")
    assert code == 1
    assert text in err
    assert out.splitlines()[1:] == ["1:first", "3:second"]
    assert [message["role"] for message in bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_a_message_after_a_failed_one_takes_its_place(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, bodies = chat(capsys, monkeypatch, lambda *_: plain(500, {}), "first\nsecond\n")
    assert [message["content"] for message in bodies[1]["messages"]] == ["second"]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--base-url", "127.0.0.1:9"], 1, "is the server running?"),
        (["--base-url", "ftp://x"], 2, "ftp://x"),
        (["no-such-model"], 2, "no-such-model"),
        (["tiny-v41", "--base-url", "127.0.0.1:9"], 2, "leave one out"),
        (["--temperature", "-1"], 2, "--temperature"),
    ],
)
def test_what_cannot_work_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, part: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert twinfer.main(["chat", *arguments]) == code
    finally:
        signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def endless(path: str, body: dict[str, Any]) -> Answer:
    del path, body
    return [STREAM_HEAD, chunked(event(chat_chunk("going \x1b]0;title\x07on"))), trio.Event()]


def start(url: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "twinfer", "chat", "--base-url", url], cwd=ROOT, stderr=subprocess.PIPE, **streams)


def test_an_interrupt_of_piped_input_ends_the_command() -> None:
    with threaded_server(endless) as server:
        process = start(server.url, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"going"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


class Terminal:
    """The person's side of a pseudo-terminal."""

    def __init__(self) -> None:
        self._descriptor, self.other_side = pty.openpty()
        self._unread = b""

    def type(self, text: bytes) -> None:
        os.write(self._descriptor, text)

    def read_until(self, mark: bytes) -> bytes:
        """What is shown up to the mark; what follows it is for the next call."""
        while mark not in self._unread:
            self._unread += os.read(self._descriptor, 4096)
        shown, _, self._unread = self._unread.partition(mark)
        return shown

    def close(self) -> None:
        os.close(self._descriptor)


def test_at_a_terminal_an_interrupt_stops_the_answer_and_two_leave() -> None:
    def handler(path: str, body: dict[str, Any]) -> Answer:
        return endless(path, body) if body["messages"][-1]["content"] == "endless" else echo(path, body)

    terminal = Terminal()
    with threaded_server(handler) as server:
        process = start(server.url, stdin=terminal.other_side, stdout=terminal.other_side)
        os.close(terminal.other_side)
        terminal.read_until(b"> ")
        terminal.type(b"endless\n")
        terminal.read_until(b"going ")
        assert b"\x1b" not in terminal.read_until(b"title")  # what a terminal obeys is not the model's to send
        process.send_signal(signal.SIGINT)
        terminal.read_until(b"> ")
        terminal.type(b"next\n")
        terminal.read_until(b"3:next")  # the stopped answer stays in the conversation
        terminal.read_until(b"> ")
        # Two leave; one that comes between the prompt and the wait for a key is only noticed with the next.
        err = b""
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = process.communicate(timeout=2)
                break
    terminal.close()
    assert process.returncode == 130
    assert b"stopped" in err
    assert b"once more to leave" in err


# -- an engine inside the process -----------------------------------------------------------------------------------------------


class Shouting(PlainParser):
    """Reasoning up to the first comma, held back; then content."""

    def __init__(self) -> None:
        self._thought: str | None = ""

    def push(self, text: str) -> Delta:
        if self._thought is None:
            return Delta(content=text)
        self._thought += text
        before, comma, after = self._thought.partition(",")
        if not comma:
            return Delta()
        self._thought = None
        return Delta(content=after, reasoning=before)


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_json(), eos_token_ids=(1,))


def script_of(text: str, **values: Any) -> Script:
    """A worker that says ``text`` over and over (by position, prompt tokens included)."""
    return Script(tokens=tuple(tokenizer().encode(text)), **values)


class PlainFormat:
    name, has_reasoning, has_tools = "plain", True, False

    def prepare(self, chat: ChatInput) -> PreparedChat:
        if len(chat.messages) > 3:
            raise RequestError("too many messages", param="messages")
        return PreparedChat(prompt="".join(message["content"] for message in chat.messages), make_parser=Shouting)

    def prepare_responses(self, body: dict[str, Any], chat: ChatInput) -> PreparedChat:
        raise NotImplementedError


@asynccontextmanager
async def scripted(script: Script, limit_tokens: int | None = None) -> AsyncIterator[Backend]:
    async with open_engine(engine_config(script), tokenizer(), worker_module=MODULE) as engine:
        yield EngineBackend(engine, "scripted", PlainFormat(), SamplingParams(), limit_tokens, ())


def drain(session: ChatSession, *texts: str) -> tuple[str, str, Ended]:
    session.ask([{"role": "user", "content": text} for text in texts])
    content, reasoning = "", ""
    while True:
        happening = session.wait()
        if isinstance(happening, Ended):
            return content, reasoning, happening
        content += happening.content
        reasoning += happening.reasoning


def test_an_engine_inside_the_process_answers() -> None:
    with ChatSession(functools.partial(scripted, script_of("well, yes "), 20)) as session:
        content, reasoning, ended = drain(session, "ab")
        assert ended.error is None
        assert ended.account is not None
        assert ended.account.finish_reason == "length"
        assert (ended.account.prompt_tokens, ended.account.completion_tokens) == (2, 20)
        assert content
        assert reasoning
        assert "," not in reasoning
        assert ended.account.tokens_per_s is None or ended.account.tokens_per_s > 0
        _, _, refused = drain(session, "a", "b", "c", "d")
        assert isinstance(refused.error, RequestError)
        full = drain(session, "x" * 100_000)[2]
        assert "context" in str(full.error)
        assert drain(session, "ab")[:2] == (content, reasoning)


def test_an_answer_can_be_stopped_at_any_moment() -> None:
    with ChatSession(functools.partial(scripted, script_of("well, yes ", step_s=0.005), None)) as session:
        session.ask([{"role": "user", "content": "a"}])
        session.stop()
        while not isinstance(ended := session.wait(), Ended):
            pass
        assert (ended.account, ended.error) == (None, None)
        session.ask([{"role": "user", "content": "a"}])
        assert isinstance(session.wait(), Said)
        session.stop()
        while not isinstance(session.wait(), Ended):
            pass
        assert not session.has_ended


def test_a_dead_worker_ends_the_answer_and_the_chat() -> None:
    with ChatSession(functools.partial(scripted, script_of("well, yes ", kill_at_step=3), None)) as session:
        _, _, ended = drain(session, "a")
        assert ended.error is not None
        while not isinstance(session.wait(), Ended):  # the thread's own end
            pass
        assert session.has_ended
        assert "worker-0" in str(drain(session, "b")[2].error)
