"""Grammars: what constraints become, the bounds on them, what no grammar may do to the process, and tokenizers of every kind."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from engine import grammar_compiler
from engine.constraints import AnyJson, Choice, Constraint, JsonSchema, Lark, Regex
from engine.core.errors import RequestError
from engine.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_PATTERN_CHARS, MAX_SCHEMA_DEPTH, grammar_of
from engine.grammar_compiler import GrammarCompiler
from engine.tokenizer import Tokenizer
from tests.test_tokenizer import byte_fallback_json, byte_level_json, word_piece_json

EOS = 1
PADDED = 400  # the model's vocabulary; the tokenizer's is smaller


def compiler_of(data: bytes, eos: tuple[int, ...] = (EOS,), vocab_size: int = PADDED, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(lambda: Tokenizer(data), vocab_size, eos, **options)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_json())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of(byte_level_json())


def accepts(matcher: LLMatcher, tokens: list[int]) -> bool:
    """Whether the whole of ``tokens`` is possible and an answer."""
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def allowed(matcher: LLMatcher, vocab_size: int = PADDED) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (AnyJson(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a":}']),
        (JsonSchema(OBJECT), ['{"name": "x", "age": 3}', '{\n  "name": "é",\n  "age": -1\n}'], ['{"name": "x"}', '{"name": 1, "age": 3}']),
        (JsonSchema(True), ["[1, 2]", '"x"', "null"], ["[1, ", "nul"]),
        (Regex("[a-c]{2}/[0-9]+"), ["ab/1", "cc/42"], ["ab", "xab/1", "ab/1x"]),
        (Regex("^x|yz$"), ["x", "yz"], ["xz", ""]),
        (Choice(("yes", "no", 'a "quoted"\\ one\n', "né 😀")), ["yes", "no", 'a "quoted"\\ one\n', "né 😀"], ["ye", "yesno", ""]),
        (Lark('start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)", "()"]),
    ],
)
def test_constraints_mean_what_they_say(
    compiler: GrammarCompiler, tokenizer: Tokenizer, constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(constraint)
    reasoned = grammar_of(constraint, reasoning_end_token=344)
    for texts, expected in ((good, True), (bad, False)):
        for text in texts:
            tokens = tokenizer.encode(text)
            assert accepts(compiler.compile(grammar), tokens) is expected, text
            thoughts = [*tokenizer.encode('Hm {"a": \n'), 344, *tokens]
            assert accepts(compiler.compile(reasoned), thoughts) is expected, text


def test_reasoning_is_text_until_its_end(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(grammar_of(Regex("[ab]"), reasoning_end_token=344))
    first = allowed(matcher)
    assert 344 in first
    assert EOS not in first
    assert 0 not in first  # another special token
    assert len(first) > 200
    assert matcher.consume_token(344)
    assert EOS not in allowed(matcher)


def test_blanks_in_json_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(grammar_of(JsonSchema(OBJECT)))
    (space,) = tokenizer.encode(" ")
    assert 15 < matcher.try_consume_tokens([*tokenizer.encode("{"), *[space] * 500]) < 25


def nested_one_of(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "integer"}
    inner = nested_one_of(depth - 1)
    return {"oneOf": [{"type": "object", "properties": {name: inner}, "required": [name]} for name in "ab"]}


def nested_arrays(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
HOSTILE: list[tuple[str, Constraint, str | None]] = [
    ("itself", Lark("start: start"), "no text satisfies"),
    ("two rules", Lark("start: root\nroot: root"), "no text satisfies"),
    ("left recursion", Lark('start: start "a" | "b"'), None),
    ("ref to itself", JsonSchema({"$ref": "#"}), "no text satisfies"),
    ("cycle of refs", JsonSchema(CYCLE), "no text satisfies"),
    ("max items", JsonSchema({"type": "array", "maxItems": 2**63}), None),
    ("max items beyond", JsonSchema({"type": "array", "maxItems": 2**64}), "maxItems"),
    ("min items", JsonSchema({"type": "array", "minItems": 10**9}), None),
    ("nested oneOf", JsonSchema(nested_one_of(8)), "oneOf"),
    ("nested arrays", JsonSchema(nested_arrays(60)), None),
    ("deeply nested arrays", JsonSchema(nested_arrays(2000)), f"deeper than {MAX_SCHEMA_DEPTH}"),
    ("optional a", Regex("(a?){500}a{500}"), "too many expressions"),
    ("many repeats", Regex("(a{1000}){1000}"), "too many expressions"),
    ("alternating quantifiers", Regex("(x+x+)+y"), None),
    ("invalid regex", Regex("(a"), "unclosed"),
    ("look-ahead", Regex("(?=a)b"), "look"),
    ("long regex", Regex("a" * (MAX_PATTERN_CHARS + 1)), f"at most {MAX_PATTERN_CHARS}"),
    ("newline in a regex", Regex("a\nb"), None),
    ("invalid type", JsonSchema({"type": "foo"}), "Invalid type"),
    ("false", JsonSchema(False), "Unsatisfiable"),
    ("contradiction", JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    ("unknown keyword", JsonSchema({"type": "string", "not": {"const": "a"}}), "not"),
    ("not JSON", JsonSchema({"const": float("nan")}), "not JSON"),
    ("dangling ref", JsonSchema({"$ref": "#/nowhere"}), "grammar"),
    ("remote ref", JsonSchema({"$ref": "https://example.com/schema.json"}), "grammar"),
    ("huge enum", JsonSchema({"enum": [f"value {index}" for index in range(20_000)]}), "bytes; allowed"),
    ("large enum", JsonSchema({"enum": [f"value {index}" for index in range(5_000)]}), None),
    ("no choice", Choice(()), "0 choices"),
    ("many choices", Choice(("a",) * (MAX_CHOICES + 1)), f"1 to {MAX_CHOICES}"),
    ("all choices", Choice(tuple(f"{index} and some more text" for index in range(MAX_CHOICES))), None),
    ("surrogate", Choice(("\ud800",)), "not valid Unicode"),
    ("not a grammar", Lark("not a grammar"), "grammar"),
    ("empty grammar", Lark(""), "grammar"),
    ("deep parentheses", Lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "grammar"),
    ("doubling rules", Lark("start: a1\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(1, 40)) + '\na40: "x"'), "Too many items"),
    ("long grammar", Lark("start: " + '"a" ' * MAX_GRAMMAR_CHARS), f"at most {MAX_GRAMMAR_CHARS}"),
    ("unknown token", Lark("start: <nothing_like_it>"), "grammar"),
    ("token out of range", Lark("start: <[99999]>"), "grammar"),
]


@pytest.mark.parametrize(("constraint", "error"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_no_grammar_hangs_or_breaks_anything(compiler: GrammarCompiler, constraint: Constraint, error: str | None) -> None:
    begin_s = time.perf_counter()
    if error is None:
        assert allowed(compiler.compile(grammar_of(constraint)))
    else:
        for _ in range(2):  # found, then remembered
            with pytest.raises(RequestError, match=error) as caught:
                compiler.compile(grammar_of(constraint))
            assert caught.value.param == "response_format"
            assert len(str(caught.value)) < 500
    assert time.perf_counter() - begin_s < 30  # not a measurement: the alternative is for ever
    assert allowed(compiler.compile(grammar_of(Regex("a"))))


def test_a_mask_allows_what_a_choice_begins_with(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The naive model: a token is possible where a choice goes on with its bytes. All choices are reached by what the masks allow."""
    choices = ("the cat", "the cats", "then", "tea", "été", "7")
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    reached: set[bytes] = set()

    def walk(matcher: LLMatcher, text: bytes) -> None:
        tokens = allowed(matcher)
        possible = {
            token
            for token, piece in enumerate(pieces)
            if piece and token not in tokenizer.control_ids and any(choice.encode().startswith(text + piece) for choice in choices)
        }
        assert (EOS in tokens) == (text.decode(errors="replace") in choices)
        assert tokens - {EOS} <= possible
        # Where the text is not forced, every token that fits is allowed; where it is, at least the one that spells it best.
        following = {
            choice.encode()[len(text)] for choice in choices if choice.encode().startswith(text) and len(choice.encode()) > len(text)
        }
        if len(following) > 1:
            assert tokens - {EOS} == possible
        if EOS in tokens:
            reached.add(text)
        for token in tokens - {EOS}:
            after = matcher.deep_copy()
            assert after.consume_token(token)
            walk(after, text + pieces[token])

    walk(compiler.compile(grammar_of(Choice(choices))), b"")
    assert reached == {choice.encode() for choice in choices}


def test_byte_fallback_tokenizers() -> None:
    tokenizer = Tokenizer(byte_fallback_json())
    compiler = compiler_of(byte_fallback_json(), (0,), 300)
    for text in ("a b", "ab", "\n😀"):
        tokens = tokenizer.encode("x" + text)[2:]  # the normaliser puts a blank before a text
        assert accepts(compiler.compile(grammar_of(Choice((text,)))), tokens), text


def test_several_ends_of_text_and_padding(tokenizer: Tokenizer) -> None:
    compiler = compiler_of(byte_level_json(), (1, 0))
    matcher = compiler.compile(grammar_of(Regex("a*")))
    assert {0, 1} < allowed(matcher)
    assert max(allowed(compiler.compile(grammar_of(Regex("(.|\n)*"))))) < tokenizer.vocab_size


def test_tokenizers_without_bytes_or_end_are_refused() -> None:
    with pytest.raises(RequestError, match="which bytes"):
        compiler_of(word_piece_json()).compile(grammar_of(AnyJson()))
    with pytest.raises(RequestError, match="end-of-text"):
        compiler_of(byte_level_json(), ()).compile(grammar_of(AnyJson()))


def test_copies_are_independent_and_the_cache_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_of(byte_level_json(), max_cached=3)
    grammars = [grammar_of(Regex(f"{letter}b")) for letter in "acdef"]
    one, other = compiler.compile(grammars[0]), compiler.compile(grammars[0])
    assert one.consume_token(tokenizer.encode("a")[0])
    assert allowed(one) != allowed(other)
    for grammar in grammars[:3]:
        compiler.compile(grammar)
    compiler.compile(grammars[0])
    compiler.compile(grammars[3])
    assert [compiler.is_cached(grammar) for grammar in grammars] == [True, False, True, True, False]
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_CHARS", len(grammars[0]) + 10)
    compiler.compile(grammars[4])
    assert [compiler.is_cached(grammar) for grammar in grammars] == [False] * 4 + [True]


def test_threads_share_a_compiler(tokenizer: Tokenizer) -> None:
    compiler = compiler_of(byte_level_json())
    failures: list[object] = []

    def work(number: int) -> None:
        try:
            for index in range(30):
                text = f"{(number + index) % 7}x"
                assert accepts(compiler.compile(grammar_of(Choice((text, "y")))), tokenizer.encode(text))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_grammars_are_json_that_names_the_answer() -> None:
    (answer,) = json.loads(grammar_of(Choice(("a",))))["grammars"]
    assert answer["name"] == "answer"
