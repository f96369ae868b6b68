"""What the tests of the chat formats share: models, chunkings, grammars tried against texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.api.formats.base import OutputParser
from engine.api.formats.template import TemplateFormat
from engine.chat_template import ChatTemplate
from engine.grammar_compiler import GrammarCompiler
from engine.launch import OpenedModel, open_model
from engine.tokenizer import Tokenizer

USER: dict[str, Any] = {"role": "user", "content": "What is the weather?"}


def tool(name: str, properties: dict[str, Any] | None = None, required: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "description": f"the {name} tool", "parameters": parameters}}


WEATHER = tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"])
CLOCK = tool("clock", {"zone": {"$ref": "#/$defs/Zone"}}, ["zone"], **{"$defs": {"Zone": {"enum": ["utc", "local"]}}})
TOOLS = [WEATHER, CLOCK]


@lru_cache
def tiny() -> OpenedModel:
    return open_model("tiny-v41")


class Read:
    """What a parser made of a text. ``calls`` are (name, arguments); ids and indexes are checked here."""

    def __init__(self, parser: OutputParser, chunks: Sequence[str]) -> None:
        self.content = self.reasoning = ""
        self.was_reasoning: list[bool] = []
        calls: dict[int, list[str]] = {}
        ids: list[str] = []
        for number in range(len(chunks) + 1):
            self.was_reasoning.append(parser.in_reasoning)
            delta = parser.push(chunks[number]) if number < len(chunks) else parser.finish()
            self.content += delta.content
            self.reasoning += delta.reasoning
            for piece in delta.tool_calls:
                if piece.index not in calls:
                    assert piece.index == len(calls)
                    assert piece.id is not None
                    assert piece.name is not None
                    ids.append(piece.id)
                    calls[piece.index] = [piece.name, ""]
                else:
                    assert piece.id is None
                    assert piece.name is None
                calls[piece.index][1] += piece.arguments
        assert all(call_id.startswith("call_") for call_id in ids)
        assert len(set(ids)) == len(ids) == parser.num_tool_calls
        self.calls = [(name, arguments) for name, arguments in calls.values()]

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    @property
    def all(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, self.calls


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def texts(pieces: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts out of the format's own markup, whole and in halves, and of anything else."""
    halves = [piece[: len(piece) // 2] for piece in pieces] + [piece[len(piece) // 2 :] for piece in pieces]
    return st.lists(st.sampled_from([*pieces, *pieces, *halves]) | st.text(max_size=4), max_size=14).map("".join)


CUTS = st.lists(st.integers(0, 200), max_size=8)


def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, (0,))


def accepts(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: str | None, text: str) -> bool | None:
    """Whether the whole ``text`` satisfies the grammar; None where it is only the beginning of such a text."""
    assert grammar is not None
    matcher = grammars.compile(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if matcher.try_consume_tokens(ids) < len(ids):
        return False
    return True if matcher.is_accepting() else None


class Marks(NamedTuple):
    """Texts that are tokens of their own; decoders leave the ``special`` ones out unless asked not to."""

    added: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


NO_MARKS = Marks()


@lru_cache
def byte_tokenizer(marks: Marks = NO_MARKS) -> bytes:
    """A token a byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: index + 1 for index, char in enumerate(alphabet)} | {"<|end|>": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", *marks.special])
    tokenizer.add_tokens(list(marks.added))
    data: str = tokenizer.to_str()
    return data.encode()


def template_format(source: str, marks: Marks = NO_MARKS, *, thinking: bool | None = None) -> TemplateFormat:
    tokenizer = Tokenizer(byte_tokenizer(marks), eos_token_ids=(0,), chat_template=ChatTemplate(source, bos_token="<s>"))
    return TemplateFormat(tokenizer, thinking)
