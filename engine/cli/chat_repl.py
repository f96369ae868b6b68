"""The conversation itself: reads lines, knows the commands, prints what comes, keeps the messages. Nothing of it is written to disk
but by /save.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from engine.cli.chat_backend import Account, Message
from engine.cli.chat_session import ChatSession, Ended
from engine.core.errors import OutputError
from engine.writing import whole_file

EXIT_FAULT = 1
EXIT_INTERRUPTED = 130
MAX_LINE_CHARS = 16 << 20
HELP = """\
/reset            forget the conversation, keep the system message
/system [TEXT]    show the system message, or set it and forget the conversation; /system - removes it
/regenerate       answer the last message again
/stats            tokens, time to the first token, tokens/s and context of the last answer
/save FILE        write the conversation as JSON
/help             this list
/exit             leave (Ctrl-D too)
A line that ends with \\ goes on with the next one. A message that begins with / is written with two: //path."""
# What a terminal obeys (colours, titles, the clipboard) is not the model's to send: C0 but tab and newline, DEL and C1.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Repl:
    """``run`` returns the exit code. ``turns`` has one entry per answer, for --json; then the answers themselves go to stderr."""

    def __init__(self, session: ChatSession, messages: list[Message], *, is_json: bool) -> None:
        self._session = session
        self._messages = messages
        self._out = sys.stderr if is_json else sys.stdout
        self._is_typed = sys.stdin.isatty()
        self._is_shown = self._out.isatty()
        self._last: Account | None = None
        self._code = 0
        self.model = session.model
        self.turns: list[dict[str, Any]] = []

    def run(self) -> int:
        if self._is_typed:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - line editing and, in memory, the history of input()
            self._note(f"{self.model}; /help lists the commands")
        num_interrupts = 0
        while True:
            try:
                text = self._read()
                if text is None:
                    break
                num_interrupts = 0
                if text.strip() and not self._handle(text):
                    break
                if self._session.has_ended:
                    return EXIT_FAULT
            except KeyboardInterrupt:
                num_interrupts += 1
                if num_interrupts > 1 or not self._is_typed:
                    self._note("interrupted")
                    return EXIT_INTERRUPTED
                self._note("\nonce more to leave (or /exit)")
        return self._code

    # -- input ----------------------------------------------------------------------------------------------------------------

    def _read(self) -> str | None:
        """One message, its continued lines joined; None at the end of the input."""
        lines: list[str] = []
        while True:
            line = self._line("... " if lines else "> ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if self._is_typed:
            try:
                return input(prompt)
            except EOFError:
                self._note("")
                return None
        line = sys.stdin.readline(MAX_LINE_CHARS)
        return line.removesuffix("\n").removesuffix("\r") if line else None

    # -- commands -------------------------------------------------------------------------------------------------------------

    def _handle(self, text: str) -> bool:
        """False to leave."""
        if not text.startswith("/") or text.startswith("//"):
            if self._messages and self._messages[-1]["role"] == "user":  # it got no answer
                self._messages.pop()
            self._messages.append({"role": "user", "content": text.removeprefix("/") if text.startswith("//") else text})
            self._answer()
            return True
        command, _, rest = text.partition(" ")
        rest = rest.strip()
        match command:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                self._note(HELP)
            case "/reset" | "/clear":
                self._messages[:] = [message for message in self._messages if message["role"] == "system"]
                self._note("the conversation is forgotten")
            case "/system":
                self._system(rest)
            case "/regenerate" | "/retry":
                self._regenerate()
            case "/stats":
                self._note(self._describe_last())
            case "/save":
                self._save(rest)
            case _:
                self._note(f"{command} is no command; /help lists them, // begins a message with a slash")
        return True

    def _system(self, text: str) -> None:
        if not text:
            system = [message["content"] for message in self._messages if message["role"] == "system"]
            self._note(system[0] if system else "no system message")
            return
        self._messages[:] = [] if text == "-" else [{"role": "system", "content": text}]
        self._note("the system message is removed" if text == "-" else "the system message is set, the conversation forgotten")

    def _regenerate(self) -> None:
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages or self._messages[-1]["role"] != "user":
            self._note("there is no message to answer")
            return
        self._answer()

    def _save(self, path: str) -> None:
        if not path:
            self._note("needed: /save FILE")
            return
        try:
            with whole_file("/save", Path(os.path.expanduser(path))) as beside, beside.open("w", encoding="utf-8") as file:
                json.dump({"model": self.model, "messages": self._messages}, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except OutputError as error:
            self._note(str(error))
            return
        self._note(f"wrote {len(self._messages)} messages to {path}")

    def _describe_last(self) -> str:
        account = self._last
        if account is None:
            return "no answer yet"
        parts = [f"finished by {account.finish_reason}", f"{account.total_s:.2f} s"]
        if account.ttft_s is not None:
            parts.append(f"first token after {account.ttft_s * 1e3:.0f} ms")
        if account.tokens_per_s is not None:
            parts.append(f"{account.tokens_per_s:.1f} tokens/s")
        if account.prompt_tokens is not None and account.completion_tokens is not None:
            used = account.prompt_tokens + account.completion_tokens
            cached = f" ({account.cached_tokens} cached)" if account.cached_tokens else ""
            of_context = f" of {account.context_length}, {used / account.context_length:.0%}" if account.context_length else ""
            parts.append(f"{account.prompt_tokens} prompt{cached} + {account.completion_tokens} answer tokens; context {used}{of_context}")
        return ", ".join(parts)

    # -- answers --------------------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Ask for the next message and print it as it comes; Ctrl-C ends it and keeps what has come."""
        content: list[str] = []
        reasoning: list[str] = []
        is_stopped = False
        self._session.ask(self._messages)
        ended: Ended | None = None
        while ended is None:
            try:
                happening = self._session.wait()
                if isinstance(happening, Ended):
                    ended = happening
                    continue
                self._show(happening.content, happening.reasoning, after_reasoning=bool(reasoning) and not content)
                content += [happening.content] if happening.content else []
                reasoning += [happening.reasoning] if happening.reasoning else []
            except KeyboardInterrupt:
                is_stopped = True
                self._session.stop()
        self._write("\n")
        self._keep("".join(content), "".join(reasoning), ended, is_stopped=is_stopped)
        if is_stopped and not self._is_typed:
            raise KeyboardInterrupt

    def _keep(self, content: str, reasoning: str, ended: Ended, *, is_stopped: bool) -> None:
        """The answer becomes part of the conversation; where it failed the message waits for /regenerate, or for another in its place."""
        question = self._messages[-1]["content"]
        turn: dict[str, Any] = {"user": question, "content": content, "reasoning": reasoning or None}
        if ended.error is not None:
            self._code = self._code if self._is_typed else EXIT_FAULT
            turn["error"] = {"type": type(ended.error).__name__, "message": str(ended.error)}
            self._note(f"twinfer chat: {ended.error}")
        else:
            # Reasoning is not sent back: models are trained to see their answers only.
            self._messages.append({"role": "assistant", "content": content})
            self._last = ended.account or self._last
            account = ended.account
            turn |= msgspec.to_builtins(account) if account is not None else {"finish_reason": "stopped"}
            turn["tokens_per_s"] = account.tokens_per_s if account is not None else None
            if is_stopped:
                self._note("stopped")
        self.turns.append(turn)

    def _show(self, content: str, reasoning: str, *, after_reasoning: bool) -> None:
        """Reasoning is for a terminal, dimmed; elsewhere the answer stands alone."""
        if reasoning and self._is_shown:
            self._write(f"{_DIM}{_safe(reasoning)}{_PLAIN}")
        if content:
            gap = "\n\n" if (after_reasoning or reasoning) and self._is_shown else ""
            self._write(gap + (_safe(content) if self._is_shown else content))

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _safe(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
