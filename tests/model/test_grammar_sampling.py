"""Structured output through the sampler and the whole engine: what comes out fits its grammar, however the work is cut.

Float32 on random models with a byte-level tokenizer smaller than their vocabulary; the witnesses are ``re``, ``json`` and a checker of the
small family of schemas that is drawn from.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.constraints import Choice, JsonSchema, Regex
from engine.core.events import TokensEmitted
from engine.core.sampling import SamplingParams
from engine.grammar import grammar_of
from engine.grammar_compiler import GrammarCompiler
from engine.kernels.sampling import masked
from engine.model.base import Model
from engine.model.grammar_state import GrammarMasks, GrammarSource, GrammarState
from engine.model.sample import DraftTokens, SampleRows
from engine.model.sampler import Sampler
from engine.tokenizer import Tokenizer
from tests.model.engine_harness import Engine, Finished, Preempted, random_v41, small_v41_spec

EOS = 1
NEW = 40


@lru_cache
def tokenizer_json() -> bytes:
    """At most 304 tokens, the vocabulary of the small model."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<pad>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(['{"name": "ab", "items": [true, false, null, 12]} the cats then'] * 3, trainer)
    return tokenizer.to_str().encode()


TOKENIZER = Tokenizer(tokenizer_json(), eos_token_ids=(EOS,))
VOCAB = 304


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_v41(msgspec.structs.replace(small_v41_spec(), eos_token_ids=(EOS,)))


@lru_cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: TOKENIZER, VOCAB, (EOS,))


def engine_of(model: Model, **options: Any) -> Engine:
    options.setdefault("eos_token_ids", (EOS,))
    return Engine(model, grammars=GrammarSource(compiler()), **options)


def text_of(tokens: list[int]) -> str:
    body = tokens[:-1] if tokens and tokens[-1] == EOS else tokens
    return b"".join(TOKENIZER.token_bytes(token) for token in body).decode()


def reason_of(engine: Engine, request: int) -> str:
    return str(next(event.reason for event in engine.of_kind(Finished) if event.request == request))


# -- the sampler alone --------------------------------------------------------------------------------------------------------


def test_masked_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 31, 32, 33, 77, 304):
        logits = torch.randn(3, vocab_size, generator=generator)
        bits = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab_size // 32)), generator=generator, dtype=torch.int64).to(torch.int32)
        found = masked(logits, bits)
        for row in range(3):
            for token in range(vocab_size):
                keeps = int(bits[row, token // 32]) >> (token % 32) & 1
                assert found[row, token] == (logits[row, token] if keeps else -torch.inf)


def rows_for(num_drafts: list[int]) -> SampleRows:
    drafts = torch.tensor(num_drafts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), (drafts + 1).cumsum(0)))
    slots = list(range(len(num_drafts)))
    return SampleRows(torch.tensor(slots), drafts, starts, int(drafts.max()), slots)


def state_of(pattern: str) -> GrammarState:
    return GrammarState(compiler().compile(grammar_of(Regex(pattern))), (EOS,))


def tokens_allowed(bits: torch.Tensor) -> list[set[int]]:
    zero = torch.zeros((len(bits), VOCAB))
    return [set((row == 0).nonzero()[:, 0].tolist()) for row in masked(zero, bits)]


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc*"), max_size=5))
@settings(max_examples=60, deadline=None)
def test_rows_after_drafts_equal_rows_after_the_same_tokens(before: list[str], drafts: list[str]) -> None:
    """Row j is what a fresh matcher that has taken the j drafts in says, up to the first draft that is not allowed; nothing remains."""
    ids = {char: EOS if char == "*" else TOKENIZER.encode(char)[0] for char in "abc*"}
    pattern = "a*b?(a|c)*"
    start = state_of(pattern)
    start.advance([ids[char] for char in before])
    if start.error is not None:
        assert re.fullmatch(pattern.replace("b?", "(b)?"), "".join(before)) is None
        return
    masks = GrammarMasks(VOCAB, torch.device("cpu"), (EOS,))
    found = tokens_allowed(masks.fill([start], [[ids[char] for char in drafts]]))
    for depth in range(len(drafts) + 1):
        fresh = state_of(pattern)
        fresh.advance([ids[char] for char in [*before, *drafts[:depth]]])
        if fresh.error is not None or fresh.ended:
            break
        expected = tokens_allowed(masks.fill([fresh], [[]]))[0]
        assert found[depth] == expected
        assert EOS in expected  # every prefix of this language is in it
    again = tokens_allowed(masks.fill([start], [[]]))[0]
    assert again == found[0]


def make_sampler(params: list[SamplingParams], patterns: list[str | None]) -> Sampler:
    sampler = Sampler(VOCAB, len(params), torch.device("cpu"), (EOS,))
    for slot, (param, pattern) in enumerate(zip(params, patterns, strict=True)):
        state = None if pattern is None else state_of(pattern)
        grammar = None if pattern is None else "given"
        sampler.start(slot, msgspec.structs.replace(param, grammar=grammar), 100 + slot, [5], [], state)
    return sampler


def test_only_rows_with_a_grammar_are_masked_and_logprobs_are_the_models() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    params = [SamplingParams(logprobs=1), SamplingParams(logprobs=1, logit_bias=((b, 50.0),)), SamplingParams(logprobs=1)]
    sampler = make_sampler(params, [None, "[ab]x", "[ab]x"])
    output = sampler.sample(logits, rows_for([0, 0, 0]))
    better = a if logits[2, a] > logits[2, b] else b
    assert output.tokens_IK[:, 0].tolist() == [int(logits[0].argmax()), b, better]
    assert output.logprobs is not None
    for item, entry in enumerate(output.logprobs):
        assert entry is not None
        raw = logits[item].log_softmax(0)
        assert entry[0].chosen == pytest.approx(float(raw[output.tokens_IK[item, 0]]), abs=1e-5)
        assert entry[0].top_ids == (int(raw.argmax()),)


def test_a_batch_without_grammars_asks_for_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler([SamplingParams()] * 2, [None, "[ab]x"])
    monkeypatch.setattr(GrammarMasks, "fill", lambda *_: pytest.fail("a mask was made"))
    logits = torch.randn(1, VOCAB)
    one = torch.zeros(1, dtype=torch.int64)
    assert sampler.sample(logits, SampleRows(one, one, torch.tensor([0, 1]), 0, [0])).tokens_IK.item() == int(logits.argmax())


def test_drafts_that_the_grammar_forbids_are_rejected_whatever_the_model_thinks() -> None:
    a, b, c = (TOKENIZER.encode(char)[0] for char in "abc")
    logits = torch.zeros(4, VOCAB)
    logits[:, c] = 9.0  # what the model wants
    logits[:, b] = 5.0
    logits[0, a] = 8.0
    for temperature in (0.0, 1.0):
        sampler = make_sampler([SamplingParams(temperature=temperature)], ["a[bd]+"])
        output = sampler.sample(logits, rows_for([3]), DraftTokens(torch.tensor([[a, c, c]]), None))
        assert output.tokens_IK[0, : int(output.counts_I[0])].tolist() == [a, b]
        follow = sampler.sample(logits[:1], rows_for([0]))
        assert follow.tokens_IK.item() == b


def test_a_dead_end_ends_its_request_alone() -> None:
    sampler = make_sampler([SamplingParams()] * 2, ["ab", None])
    sampler._grammars[0].advance([TOKENIZER.encode("c")[0]])  # what no mask would have let through
    logits = torch.randn(2, VOCAB)
    for _ in range(2):
        output = sampler.sample(logits, rows_for([0, 0]))
        assert list(output.errors) == [0]
        assert "dead end" in output.errors[0]
        assert not output.unusable_logits
        assert output.counts_I.tolist() == [0, 1]


def test_nothing_left_to_choose_ends_the_request_alone() -> None:
    a = TOKENIZER.encode("a")[0]
    sampler = make_sampler([SamplingParams()] * 2, ["a", None])
    logits = torch.randn(2, VOCAB)
    logits[0, a] = -torch.inf
    output = sampler.sample(logits, rows_for([0, 0]))
    assert list(output.errors) == [0]
    assert "no token is left" in output.errors[0]


# -- the whole engine ---------------------------------------------------------------------------------------------------------

CONSTRAINTS = [
    grammar_of(Regex("[a-f]{3,9}(, [0-9]{2}){6,9}!")),
    grammar_of(Choice(("the cats", "then", "the cat sat on the mat"))),
    grammar_of(
        JsonSchema({"type": "object", "properties": {"name": {"enum": ["ab", "abc"]}, "items": {"type": "boolean"}}, "required": ["name"]})
    ),
    grammar_of(JsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9})),
]


def run_all(engine: Engine, **params: Any) -> list[list[int]]:
    prompts = [[5 + index, 9, 40 + index] * 7 for index in range(4)]
    ids = [
        engine.submit(prompt, max_tokens=NEW, ignore_eos=False, grammar=grammar, **params)[0]
        for prompt, grammar in zip(prompts, CONSTRAINTS, strict=True)
    ]
    ids.append(engine.submit([3] * 20, max_tokens=NEW)[0])  # without
    tokens = engine.run()
    return [tokens[request] for request in ids]


@pytest.fixture(scope="module")
def alone(model: Model) -> list[list[int]]:
    answers = []
    for index, grammar in enumerate(CONSTRAINTS):
        engine = engine_of(model, overlap=False, prefix_caching=False)
        prompt = [5 + index, 9, 40 + index] * 7
        answers.append(engine.generate(prompt, max_tokens=NEW, ignore_eos=False, grammar=grammar))
    answers.append(engine_of(model, overlap=False, prefix_caching=False).generate([3] * 20, max_tokens=NEW))
    return answers


def test_answers_fit(alone: list[list[int]]) -> None:
    assert sum(answer[-1] == EOS for answer in alone) >= 2
    if alone[0][-1] == EOS:
        assert re.fullmatch("[a-f]{3,9}(, [0-9]{2}){6,9}!", text_of(alone[0]))
    assert alone[1][-1] == EOS
    assert text_of(alone[1]) in ("the cats", "then", "the cat sat on the mat")


HOST: dict[str, Any] = {"num_host_blocks": 32, "num_host_states": 8, "swap_threshold_tokens": 1}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"chunked_prefill_size": 5},
        {"draft_tokens": 1},
        {"draft_tokens": 4},
        {"num_blocks": 7, "watermark_blocks": 0},
        {"num_blocks": 7, "watermark_blocks": 0, "draft_tokens": 3},
        {"num_blocks": 7, "watermark_blocks": 0, **HOST},
        {"num_blocks": 7, "watermark_blocks": 0, "draft_tokens": 3, **HOST},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items() if "host" not in key) or "batched",
)
def test_greedy_answers_do_not_depend_on_how_the_work_is_cut(model: Model, alone: list[list[int]], options: dict[str, Any]) -> None:
    engine = engine_of(model, **options)
    assert run_all(engine) == alone
    if "num_blocks" in options:
        kinds = {event.kind for event in engine.of_kind(Preempted)}
        assert ("swap" if "num_host_blocks" in options else "recompute") in kinds
        # In the middle of its grammar: a request that has one, with output behind it.
        assert any(event.request < len(CONSTRAINTS) and event.num_computed_tokens > 25 for event in engine.of_kind(Preempted))


def test_accepted_drafts_move_the_grammar_on(model: Model, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle draft that is right two times of three, which drafts of random weights never are."""
    engine = engine_of(model, draft_tokens=3)
    original = engine.runner.model.draft
    count = 0

    def oracle(request: Any, cache: Any) -> Any:
        nonlocal count
        output = original(request, cache)
        for row, (slot, position) in enumerate(zip(request.slots_A.tolist(), request.positions_A.tolist(), strict=True)):
            owner = next(item.request for plan in reversed(engine.plans) for item in plan.ranks[0].items if item.slot == slot)
            answer = [*alone[owner], EOS, 0, 0, 0]
            count += 1
            for index in range(3):
                at = position + 1 + index - (20 if owner == 4 else 21)
                right = answer[at] if at < len(answer) else 0
                output.tokens_AK[row, index] = right if (count + index) % 3 else 70
        return output

    monkeypatch.setattr(engine.runner.model, "draft", oracle)
    assert run_all(engine) == alone
    assert len(engine.plans) < NEW - 10  # drafts were accepted


def test_every_sample_has_a_grammar_of_its_own(model: Model) -> None:
    grammar = grammar_of(Regex("([a-f]{2,4} ){2}(x|yy|zzz)"))
    for draft_tokens in (0, 2):
        engine = engine_of(model, draft_tokens=draft_tokens)
        ids = engine.submit([7] * 30, n=5, max_tokens=NEW, ignore_eos=False, grammar=grammar, temperature=1.5, seed=3)
        tokens = engine.run()
        assert any(start.fork_of_slot is not None for plan in engine.plans for start in plan.ranks[0].starts)
        texts = [text_of(tokens[sample]) for sample in ids]
        assert all(reason_of(engine, sample) == "stop" for sample in ids)
        assert all(re.fullmatch("([a-f]{2,4} ){2}(x|yy|zzz)", text) for text in texts), texts
        assert len(set(texts)) > 2


# -- random grammars ----------------------------------------------------------------------------------------------------------


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.integers(0, 9).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}),
        st.lists(st.sampled_from(["a", "bb", "a b", "é", '"']), min_size=1, max_size=3, unique=True).map(lambda texts: {"enum": texts}),
        st.integers(0, 3).map(lambda longest: {"type": "string", "maxLength": longest, "pattern": "^[a-d]*$"}),
    )

    def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
        )
        objects = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:1],
                "additionalProperties": False,
            }
        )
        return st.one_of(arrays, objects)

    return st.recursive(leaves, containers, max_leaves=4)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The meaning of the family above, from the JSON Schema specification."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"] and re.fullmatch("[a-d]*", value) is not None
        case "array":
            inside = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return inside and all(fits(item, schema["items"]) for item in value)
        case _:
            known = schema["properties"]
            inside = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
            return inside and all(fits(item, known[key]) for key, item in value.items())


@given(
    drawn=st.lists(st.tuples(schemas(), st.integers(0, 99), st.booleans()), min_size=4, max_size=4), draft_tokens=st.sampled_from([0, 2])
)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_finished_answers_satisfy_their_schema(model: Model, drawn: list[tuple[dict[str, Any], int, bool]], draft_tokens: int) -> None:
    engine = engine_of(model, draft_tokens=draft_tokens)
    ids = [
        engine.submit(
            [3 + seed % 50] * 5, max_tokens=60, ignore_eos=False, grammar=grammar_of(JsonSchema(schema)), seed=seed,
            temperature=1.0 if sampled else 0.0,
        )[0]
        for schema, seed, sampled in drawn
    ]  # fmt: skip
    tokens = engine.run()
    for request, (schema, _, _) in zip(ids, drawn, strict=True):
        assert reason_of(engine, request) in ("stop", "length")
        if reason_of(engine, request) == "stop":
            assert fits(json.loads(text_of(tokens[request])), schema), (schema, text_of(tokens[request]))


@pytest.mark.parametrize("pattern", ["[a-c]+d", "(the|cats)( then){0,3}", "é?[^a-z]{2}", "-?[0-9]{1,3}(\\.[0-9]{1,2})?", ""])
def test_finished_answers_match_their_expression(model: Model, pattern: str) -> None:
    engine = engine_of(model)
    ids = [
        engine.submit([seed + 3] * 5, max_tokens=80, ignore_eos=False, grammar=grammar_of(Regex(pattern)), seed=seed, temperature=1.0)[0]
        for seed in range(4)
    ]
    tokens = engine.run()
    finished = [request for request in ids if reason_of(engine, request) == "stop"]
    assert finished
    assert all(re.fullmatch(pattern, text_of(tokens[request])) for request in finished)


# -- compiling beside the steps -----------------------------------------------------------------------------------------------


def test_other_requests_go_on_while_a_grammar_compiles(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By events: the compilation is not over before another request has run from its beginning to its end."""
    slow = grammar_of(Regex("slow|tea"))
    begun, go_on = threading.Event(), threading.Event()
    own = GrammarCompiler(lambda: TOKENIZER, VOCAB, (EOS,))
    build = own._build

    def blocked(grammar: str) -> Any:
        if grammar == slow:
            begun.set()
            assert go_on.wait(60)
        return build(grammar)

    monkeypatch.setattr(own, "_build", blocked)
    source = GrammarSource(own)
    engine = Engine(model, grammars=source, eos_token_ids=(EOS,))
    engine.runner.prepare(slow)
    assert begun.wait(60)
    for index in range(40):  # hints do not pile up
        engine.runner.prepare(grammar_of(Choice((f"never asked for {index}",))))
    other = engine.submit([4] * 10, max_tokens=12)[0]
    assert len(engine.run()[other]) == 12
    assert not own.is_cached(slow)
    go_on.set()
    request = engine.submit([4] * 10, max_tokens=NEW, ignore_eos=False, grammar=slow)[0]
    assert text_of(engine.run()[request]) in ("slow", "tea")
    source.close()


def test_a_grammar_that_cannot_be_used_ends_its_request_alone(model: Model) -> None:
    """The gateway refuses these; the worker does not depend on it."""
    engine = engine_of(model)
    engine.runner.prepare("start: start")
    ids = [
        engine.submit([4] * 10, max_tokens=9, ignore_eos=False, grammar="start: start")[0],
        engine.submit([4] * 10, max_tokens=9)[0],
    ]
    tokens = engine.run()
    assert [reason_of(engine, request) for request in ids] == ["error", "length"]
    assert ids[0] not in tokens
    assert "no text satisfies" in next(event.message for event in engine.of_kind(Finished) if event.request == ids[0])
    without = Engine(model, eos_token_ids=(EOS,))
    request = without.submit([4] * 10, max_tokens=9, ignore_eos=False, grammar=grammar_of(Regex("a")))[0]
    without.run()
    assert reason_of(without, request) == "error"
    assert not [event for event in without.of_kind(TokensEmitted) if event.request == request]
