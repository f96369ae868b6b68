"""The text: the King James Bible (public domain) from Debian's package ``bible-kjv-text``, by chapters.

The package keeps the text compressed; its own reader, ``bible`` of package ``bible-kjv``, prints it.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from engine.model.tiny_v41.tokenizer import ASSISTANT, BOS, END_THINK, EOS, THINK, USER

PACKAGES = ("bible-kjv-text", "bible-kjv")
WHOLE = "Gen1:1-Rev22:21"
HELD_OUT_EVERY, HELD_OUT_AT = 25, 12  # one chapter in 25, spread over all books


@dataclass(frozen=True)
class Chapter:
    name: str
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.verses)


def fetch(folder: Path) -> Path:
    """Download and unpack the packages (no root needed), dump the text into ``folder``/kjv.txt."""
    target = folder / "kjv.txt"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=work, check=True)
        for package in Path(work).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "root"], cwd=work, check=True)
        command = [f"{work}/root/usr/bin/bible", "-f", "-p", f"{work}/root/usr/lib", WHOLE]
        target.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return target


def chapters(path: Path) -> list[Chapter]:
    """Lines are ``Ge1:1 In the beginning ...``."""
    verses: dict[str, list[str]] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        reference, _, text = line.partition(" ")
        verses.setdefault(reference.partition(":")[0], []).append(text.strip())
    return [Chapter(name, tuple(lines)) for name, lines in verses.items()]


def split(everything: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Training and held-out chapters."""
    held_out = [c for i, c in enumerate(everything) if i % HELD_OUT_EVERY == HELD_OUT_AT]
    return [c for i, c in enumerate(everything) if i % HELD_OUT_EVERY != HELD_OUT_AT], held_out


class Stream:
    """Endless training tokens: chapters in a new order each epoch, some of them cut into chats.

    A chat asks with one or two verses and is answered by the next ones, so that a served chat continues the text and ends.
    """

    def __init__(self, tokenizer: Tokenizer, training: list[Chapter], seed: int, chat_share: float) -> None:
        self.tokenizer = tokenizer
        self.training = training
        self.random = random.Random(seed)
        self.chat_share = chat_share
        self.epochs = 0
        self.tokens: list[int] = []

    def _chats(self, chapter: Chapter) -> str:
        text, at = "", 0
        while at < len(chapter.verses) - 1:
            asked = self.random.randint(1, 2)
            answered = self.random.randint(1, 6)
            question = "\n".join(chapter.verses[at : at + asked])
            answer = "\n".join(chapter.verses[at + asked : at + asked + answered])
            thinking = THINK if self.random.random() < 0.4 else ""
            text += f"{BOS}{USER}{question}{ASSISTANT}{thinking}{END_THINK}{answer}{EOS}"
            at += asked + answered
        return text

    def _epoch(self) -> None:
        order = list(self.training)
        self.random.shuffle(order)
        texts = [self._chats(c) if self.random.random() < self.chat_share else f"{BOS}{c.text}{EOS}" for c in order]
        for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False):
            self.tokens.extend(encoding.ids)
        self.epochs += 1

    def take(self, count: int) -> list[int]:
        while len(self.tokens) < count:
            self._epoch()
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        return taken
