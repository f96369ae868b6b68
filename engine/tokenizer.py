"""Text and token ids: a ``tokenizers`` file, the model's end-of-text ids, its chat template. Nothing of a model folder is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplate
from engine.core.errors import ConfigError, RequestError
from engine.detokenize import ByteDecoder, Decoder, WindowDecoder
from engine.reading import read_bytes, read_text

# The largest public tokenizer files are about 35 MB.
MAX_TOKENIZER_BYTES = 256 << 20
MAX_JSON_BYTES = 16 << 20
LONG_TEXT_CHARS = 8192  # a millisecond or two to encode
_USUAL_TOKEN_CHARS = 8  # and more
_CUT_MARGIN_TOKENS = 64


# One text at a time is encoded: threads of the library's own would have nothing to share. Read by it at its first use.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Encodes prompts and decodes tokens. Thread-safe: long prompts are encoded in a thread."""

    def __init__(self, data: bytes, *, eos_token_ids: Sequence[int] = (), chat_template: ChatTemplate | None = None) -> None:
        """``data`` is a tokenizer.json. Raises ConfigError where it is none."""
        if len(data) > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"the tokenizer takes {len(data)} bytes; allowed: at most {MAX_TOKENIZER_BYTES}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            description = json.loads(data)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.json_bytes = data  # for libraries that build a tokenizer of their own from it
        self.settings: Mapping[str, Any] = {}  # of tokenizer_config.json
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        # Added tokens mark up a text (</think>, <tool_call>), flagged as special or not; but for blanks, which some models have as such.
        added = [entry for entry in description.get("added_tokens") or () if isinstance(entry, dict)]
        self._special_ids = frozenset(entry["id"] for entry in added if entry.get("special"))
        self.control_ids = self._special_ids | {entry["id"] for entry in added if str(entry.get("content")).strip()}
        self._alphabet = _token_alphabet(description.get("decoder"))
        self._bytes_of = lru_cache(maxsize=1 << 16)(self._token_bytes)  # most of a vocabulary; some MB

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja, generation_config.json, config.json."""
        path = folder / "tokenizer.json"
        data = read_bytes(path, MAX_TOKENIZER_BYTES)
        settings = _read_json(folder / "tokenizer_config.json")
        try:
            tokenizer = cls(data, chat_template=_chat_template(folder, settings))
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        eos_ids = _token_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
        eos_ids += _token_ids(_read_json(folder / "config.json").get("eos_token_id"))
        eos_text = _token_text(settings.get("eos_token"))
        if eos_text and (eos_id := tokenizer.token_id(eos_text)) is not None:
            eos_ids += (eos_id,)
        tokenizer.eos_token_ids = tuple(dict.fromkeys(eos_ids))
        tokenizer.settings = settings
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; a model's own vocabulary may be padded beyond."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def spells_bytes(self) -> bool:
        """Whether ``token_bytes`` is exact, so that the bytes of tokens add up to those of their text."""
        return self._alphabet is not None

    def token_id(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def is_special(self, token: int) -> bool:
        """Whether decoding with ``skip_special_tokens`` leaves this token out."""
        return token in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises RequestError for text that is no Unicode (lone surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt is not valid Unicode: {error.reason} at character {error.start}", param="prompt") from None
        if len(text) <= LONG_TEXT_CHARS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        # Of the library's ways to encode, the one that lets other threads run meanwhile; for a short text it would take longer.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Decoder:
        """An incremental decoder for what follows ``prompt``."""
        if self._alphabet is not None:
            skipped = self._special_ids if skip_special_tokens else frozenset()
            bytes_of = self._bytes_of
            return ByteDecoder(lambda token: b"" if token in skipped else bytes_of(token), prompt)
        return WindowDecoder(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (for log-probabilities); special tokens give their name."""
        if self._alphabet is not None:
            return self._bytes_of(token)
        return self.decode([token], skip_special_tokens=False).encode("utf-8")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation. Raises RequestError where the template refuses it, ConfigError where there is none."""
        if self.chat_template is None:
            raise ConfigError("the model has no chat template; give a plain prompt")
        return self.chat_template.render(messages, **options)

    def _token_bytes(self, token: int) -> bytes:
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None or self._alphabet is None:
            return b""  # the model's vocabulary is padded beyond the tokenizer's
        return self._alphabet(text)


def refuse_far_too_long(text: str, limit_tokens: int, encode: Callable[[str], Sequence[int]], param: str) -> None:
    """Raise RequestError for a text that has certainly more than ``limit_tokens``, found out with as much of its beginning as that takes.

    A cut changes the tokens beside it and no others, for which there is a margin.
    """
    length = max(LONG_TEXT_CHARS, _USUAL_TOKEN_CHARS * limit_tokens)
    while length < len(text):
        if len(encode(text[:length])) > limit_tokens + _CUT_MARGIN_TOKENS:
            raise RequestError(
                f"{param} has {len(text)} characters, which are more than the {limit_tokens} tokens that the context holds",
                param=param,
                code="context_length_exceeded",
            )
        length *= 2


class _ByteLevelAlphabet:
    """GPT-2's: every byte has a printable character of its own. A token with any other character is an added one: plain text."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._byte_of = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

    def __call__(self, text: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in text])
        except KeyError:
            return text.encode("utf-8")


class _ByteFallbackAlphabet:
    """SentencePiece's: U+2581 is a space, <0xNN> a byte, the rest plain text."""

    def __init__(self, space: str) -> None:
        self._space = space

    def __call__(self, text: str) -> bytes:
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        return text.replace(self._space, " ").encode("utf-8")


def _token_alphabet(decoder: Any) -> _ByteLevelAlphabet | _ByteFallbackAlphabet | None:
    """How tokens of this decoder stand for bytes; None where only the library can tell."""
    if not isinstance(decoder, dict):
        return None
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelAlphabet()
    # Strip takes one space off the very beginning of a text, which a continuation does not have.
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        pattern = steps[0].get("pattern", {}).get("String")
        if pattern and steps[0].get("content") == " ":
            return _ByteFallbackAlphabet(pattern)
    return None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        defaults = [entry.get("template") for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = defaults[0] if defaults else None
    if file.is_file():
        source = read_text(file, MAX_JSON_BYTES)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, bos_token=_token_text(settings.get("bos_token")), eos_token=_token_text(settings.get("eos_token")))


def _token_text(entry: Any) -> str:
    """A token in tokenizer_config.json: a text, or an object around it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _token_ids(entry: Any) -> tuple[int, ...]:
    entries = entry if isinstance(entry, list) else [entry]
    return tuple(item for item in entries if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object; empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value
