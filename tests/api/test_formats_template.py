"""Chats by Jinja templates: what is rendered, what is refused, how thoughts and calls are read and forced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api.formats.base import ChatInput, PreparedChat
from engine.api.formats.call_readers import dump_json, parse_json
from engine.api.formats.calls import BareJson, CallForm, MarkedList, TaggedFunctions, TaggedJson
from engine.api.formats.template import TemplateFormat
from engine.api.formats.template_parser import TemplateParser, Thinking
from engine.constraints import Choice, JsonSchema, Lark
from engine.core.errors import ConfigError, RequestError
from engine.tokenizer import Tokenizer
from tests.api.format_support import (
    CUTS,
    NO_MARKS,
    TOOLS,
    USER,
    WEATHER,
    Marks,
    Read,
    accepts,
    byte_tokenizer,
    compiler,
    cut,
    template_format,
    texts,
)

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"

CALLS = """
{%- if tools %}Tools:{% for t in tools %} {{ t.function | tojson }}{% endfor %} as %CALL%{{ "\n" }}{% endif %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}%BEGIN%{"name": "{{ c.function.name }}", "%KEY%": {{ c.function.arguments | tojson }}}%END%{% endfor %}
{{- "\n" }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def calls_template(begin: str, end: str = "", key: str = "arguments") -> str:
    return CALLS.replace("%BEGIN%", begin).replace("%END%", end).replace("%KEY%", key).replace("%CALL%", f'"name" "{key}"')


TAGGED = calls_template("<tool_call>", "</tool_call>")
FUNCTIONS = TAGGED.replace("<assistant>", "<assistant>{# <function= #}")
BARE = calls_template("", key="parameters")
MARKED = calls_template("[TOOL_CALLS]")
THINKS = TAGGED + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
ALWAYS = PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"


def prepare(chats: TemplateFormat, *messages: dict[str, Any], **options: Any) -> PreparedChat:
    return chats.prepare(ChatInput(messages=list(messages) or [USER], **options))


def prompt(prepared: PreparedChat) -> str:
    assert isinstance(prepared.prompt, str)
    return prepared.prompt


def read(prepared: PreparedChat, *chunks: str) -> Read:
    return Read(prepared.make_parser(), chunks)


def refused(chats: TemplateFormat, *messages: dict[str, Any], **options: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        prepare(chats, *messages, **options)
    return caught.value.param


# -- prompts ----------------------------------------------------------------------------------------------------------------------


def test_plain_template() -> None:
    chats = template_format(PLAIN)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prepared = prepare(chats, {"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": "n", "extra": {"x": 1}})
    assert prepared.prompt == "<system>s\n<user>a\nb\n<assistant>"
    assert (prepared.grammar, prepared.add_special_tokens, prepared.skip_special_tokens) == (None, False, True)
    assert prepare(chats, USER, add_generation_prompt=False).prompt == "<user>What is the weather?\n"
    assert (chats.has_tools, chats.has_reasoning) == (False, False)
    assert read(prepared, "<think>a", "</think><tool_call>").all == ("<think>a</think><tool_call>", "", [])
    responses = chats.prepare_responses({"input": "other"}, ChatInput(messages=[USER]))
    assert responses.prompt == prepare(chats, USER).prompt


def test_continuing_keeps_every_character() -> None:
    chats = template_format("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}<assistant>")
    last = {"role": "assistant", "content": "It is  \n"}
    assert prepare(chats, USER, last, continue_final_message=True).prompt == "<user>What is the weather?<end><assistant>It is  \n"
    empty = {"role": "assistant", "content": None}
    assert prepare(chats, USER, empty, continue_final_message=True).prompt == "<user>What is the weather?<end><assistant>"
    silent = template_format("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert refused(silent, USER, last, continue_final_message=True) == "continue_final_message"


def test_past_calls_in_each_templates_way() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ré"}'}}
    history: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    expected = '<tool_call>{"name": "weather", "arguments": {"city": "Ré"}}</tool_call>'
    assert expected in prepare(template_format(TAGGED), *history).prompt
    # A template that joins the arguments as text, and one that tells calls by content that is none.
    as_text = TAGGED.replace("c.function.arguments | tojson", "c.function.arguments + ''")
    assert expected in prepare(template_format(as_text), *history).prompt
    # One that prints the arguments as they are, so that an object would come out in Python's spelling.
    assert expected in prompt(prepare(template_format(TAGGED.replace("c.function.arguments | tojson", "c.function.arguments")), *history))
    none = TAGGED.replace("for c in m.tool_calls or []", "for c in (m.tool_calls if m.content is none else [])")
    assert expected in prepare(template_format(none.replace("{{ m.content }}", "{{ m.content or '' }}")), *history).prompt
    loop = "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}"
    tags = TAGGED.replace("{{ c.function.arguments | tojson }}", loop)
    assert "<parameter=city>\nRé\n</parameter>" in prepare(template_format(tags), *history).prompt
    thought = {"role": "assistant", "content": "x", "reasoning": "hm"}
    assert "<think>hm</think>x" in prepare(template_format(THINKS), USER, thought, USER).prompt


CALL_OF = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": 3, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        (CALL_OF | {"function_call": {"name": "f"}}, "messages[0].function_call"),
        (CALL_OF | {"tool_calls": "x"}, "messages[0].tool_calls"),
        (CALL_OF | {"tool_calls": [3]}, "messages[0].tool_calls[0]"),
        (CALL_OF | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "messages[0].tool_calls[0].function.arguments"),
        (CALL_OF | {"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_messages_that_are_none(message: dict[str, Any], param: str) -> None:
    assert refused(template_format(TAGGED), message) == param


def test_what_the_template_lacks_is_refused() -> None:
    plain = template_format(PLAIN)
    assert refused(plain, tools=TOOLS) == "tools"
    assert prepare(plain, tools=TOOLS, tool_choice="none").prompt == prepare(plain).prompt
    assert refused(template_format(PLAIN + "{{ tools }}"), tools=TOOLS) == "tools"  # a form that nobody knows
    assert refused(plain, thinking=True) == "thinking"
    assert prepare(plain, thinking=False).prompt == prepare(plain).prompt
    assert refused(plain, reasoning_effort="high") == "reasoning_effort"
    assert prepare(plain, reasoning_effort="none").prompt == prepare(plain).prompt
    assert refused(template_format(ALWAYS), thinking=False) == "thinking"
    for wrong in (True, False):
        with pytest.raises(ConfigError, match="thinking cannot be switched"):
            template_format(PLAIN if wrong else ALWAYS, thinking=wrong)


def test_options_of_the_template() -> None:
    chats = template_format(PLAIN + "{{ mood }}{{ reasoning_effort }}")
    assert prompt(prepare(chats, template_kwargs={"mood": "calm"}, reasoning_effort="low")).endswith("<assistant>calmlow")
    for options in (
        {"messages": [{"role": "user", "content": "x"}]},
        {"tools": None},
        {"bos_token": "x"},
        {"add_generation_prompt": False},
        {"raise_exception": "x"},
        {"range": 3},
        {"unknown": "x"},
        {"mood": ["x"]},
        {"mood": {"a": "b"}},
        {"mood": "x" * 5000},
    ):
        assert refused(chats, template_kwargs=options) == "chat_template_kwargs"


# -- thoughts ---------------------------------------------------------------------------------------------------------------------


def test_switched_thinking() -> None:
    chats = template_format(THINKS)
    on = prepare(chats, thinking=True)
    assert not prompt(on).endswith("</think>\n\n")
    assert read(on, "<think>\nhm", "</think>\n\nyes").all == ("yes", "hm", [])
    assert read(on, "no thoughts").all == ("no thoughts", "", [])
    for options in ({"thinking": False}, {"reasoning_effort": "none"}, {"template_kwargs": {"enable_thinking": False}}):
        off = prepare(chats, **options)
        assert prompt(off).endswith("<think>\n\n</think>\n\n")
        assert read(off, "<think>").all == ("<think>", "", [])
    assert prepare(template_format(THINKS, thinking=False)).prompt == off.prompt
    assert prepare(template_format(THINKS, thinking=False), thinking=True).prompt == on.prompt


def test_a_prompt_that_opens_the_thoughts() -> None:
    prepared = prepare(template_format(ALWAYS))
    assert read(prepared, "\n", "\nhm</think>yes").all == ("yes", "hm", [])
    result = read(prepared, "hm", "</th", "ink>\n\nyes")
    assert result.all == ("yes", "hm", [])
    assert result.was_reasoning == [True, True, True, False]
    assert read(prepared, "never ends </thin").all == ("", "never ends </thin", [])
    # What a user writes opens nothing.
    assert read(prepare(template_format(THINKS), {"role": "user", "content": "<think>"}), "hi").content == "hi"


# -- reading calls ----------------------------------------------------------------------------------------------------------------

CITY = {"city": "Rome", "days": 2}
FORMS: dict[str, CallForm] = {form.name: form for form in (TaggedJson(), TaggedFunctions(), BareJson(), MarkedList())}
SCHEMAS = {entry["function"]["name"]: entry["function"]["parameters"] for entry in TOOLS}


def parser(form: str, thinking: Thinking = "none", *, parallel: bool = True) -> TemplateParser:
    return TemplateParser(thinking, FORMS[form], SCHEMAS, parallel=parallel)


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("tagged_json", '<tool_call>\n{"name": "weather", "arguments": {"city": "R}</tool_call>"}}\n</tool_call>', "",
         [{"city": "R}</tool_call>"}]),
        ("tagged_json", 'Hi.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>\n', "Hi.\n",
         [{}, {}]),
        ("tagged_json", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}', "", [{"x": 1}]),  # JSON in a text; no end tag
        ("tagged_json", '<tool_call>{"name": "a", "arguments": {}}</tool_call> and more', "and more", [{}]),
        ("tagged_functions", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\nIt\n</parameter>\n<parameter=days>\n2\n"
         "</parameter>\n</function>\n</tool_call>", "", [{"city": "Rome\nIt", "days": 2}]),
        ("tagged_functions", "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>", "", [{"city": "12"}]),
        ("tagged_functions", "<tool_call><function=f></function></tool_call>x", "x", [{}]),
        ("tagged_functions", "<tool_call><function=f></function>\n<tool_call><function=g></function></tool_call>", "", [{}, {}]),
        ("bare_json", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [{"city": "Rome"}]),
        ("bare_json", '\n<|python_tag|>{"name": "weather", "parameters": {}}; {"name": "clock", "arguments": {}}', "\n", [{}, {}]),
        ("marked_list", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "[Rome]"}}, {"name": "b", "arguments": {}}]', "",
         [{"city": "[Rome]"}, {}]),
        ("marked_list", 'So:[TOOL_CALLS]weather{"city": "x"}[TOOL_CALLS]b[ARGS]{}', "So:", [{"city": "x"}, {}]),
        ("marked_list", '[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{"city": "x"}', "", [{"city": "x"}]),
    ],
)  # fmt: skip
def test_calls(form: str, text: str, content: str, calls: list[Any]) -> None:
    for chunks in ([text], list(text)):
        result = Read(parser(form), chunks)
        assert result.content == content
        assert [arguments for _, arguments in result.parsed_calls] == calls


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("tagged_json", "<tool_call>no JSON</tool_call>"),
        ("tagged_json", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("tagged_json", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("tagged_json", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>'),
        ("tagged_json", '<tool_call>{"name": "a", "arguments": {"x": 1,}}</tool_call>'),
        ("tagged_json", '<tool_call>{"name": "a", "argum'),
        ("tagged_json", '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001),
        ("tagged_json", "<tool_call>" + " " * 600 + "{}"),
        ("tagged_functions", "<tool_call><function=f><parameter=a>x</function></tool_call>"),
        ("tagged_functions", "<tool_call><function=f><tool_call></tool_call>"),
        ("tagged_functions", "<tool_call><function=f>stray</function></tool_call>"),
        ("bare_json", '{"name": "unknown", "parameters": {}}'),
        ("bare_json", '{"answer": 42}'),
        ("bare_json", 'The call is {"name": "weather", "parameters": {}}'),
        ("bare_json", "<|python_tag|>print(1)"),
        ("marked_list", "[TOOL_CALLS]"),
        ("marked_list", '[TOOL_CALLS]not a name {"a": 1}'),
        ("marked_list", "[TOOL_CALLS][1, 2]"),
        ("marked_list", "[TOOL_CALLS][]"),
    ],
)
def test_what_is_no_call_is_text(form: str, text: str) -> None:
    for chunks in ([text], list(text)):
        assert Read(parser(form), chunks).all == (text, "", [])


def test_a_second_call_is_text_where_one_was_asked_for() -> None:
    one = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    result = Read(parser("tagged_json", parallel=False), [one + one])
    assert (result.content, len(result.calls)) == (one, 1)
    bare = '{"name": "clock", "parameters": {}}'
    result = Read(parser("bare_json", parallel=False), list(bare + "; " + bare))
    assert (result.content, len(result.calls)) == (bare, 1)


PIECES = ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "weather", "arguments": {"city": "x"}}', '{"name": "clock"', "}",
          "{", '"', "<function=weather>", "</function>", "<parameter=city>", "</parameter>", "[TOOL_CALLS]", "<|python_tag|>", "weather",
          "[ARGS]", ";", "\n", " ", " " * 17, "[", "]", "\\", "word")  # fmt: skip
WHOLE = (
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
    '[TOOL_CALLS]weather{"city": "x"}',
    '{"name": "clock", "parameters": {}}',
)


@given(
    text=texts(PIECES + WHOLE),
    cuts=CUTS,
    form=st.sampled_from(sorted(FORMS)),
    thinking=st.sampled_from(["none", "begun", "possible"]),
    parallel=st.booleans(),
)
@example(text='<tool_call>x <tool_call>{"name": "a"}', cuts=[12], form="tagged_json", thinking="none", parallel=True)
@settings(max_examples=500, deadline=None)
def test_any_text_in_any_pieces(text: str, cuts: list[int], form: str, thinking: Thinking, parallel: bool) -> None:
    whole = Read(parser(form, thinking, parallel=parallel), [text])
    assert Read(parser(form, thinking, parallel=parallel), cut(text, cuts)).all == whole.all
    assert Read(parser(form, thinking, parallel=parallel), list(text)).all == whole.all
    assert all(isinstance(arguments, dict) for _, arguments in whole.parsed_calls)
    if not whole.calls:
        left = (whole.reasoning + whole.content).replace("<think>", "").replace("</think>", "")
        assert left.split() == text.replace("<think>", "").replace("</think>", "").split() or thinking != "none"
        assert "".join(left.split()) == "".join(text.replace("<think>", "").replace("</think>", "").split())


def test_arguments_are_always_json_that_can_be_sent() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": "\\ud800", "y": "line\nbreak", "é": 1e400}}</tool_call>'
    result = Read(parser("tagged_json"), [text])
    assert result.content == text  # 1e400 would become infinity, which is no JSON
    result = Read(parser("tagged_json"), [text.replace("1e400", "1")])
    result.calls[0][1].encode()
    assert result.parsed_calls == [("a", {"x": "\ud800", "y": "line\nbreak", "é": 1})]
    assert dump_json({"é": 1}) == '{"é": 1}'
    assert parse_json("9" * 5000) is None


# -- forced calls -----------------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "tagged_json": (TAGGED, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "\n"),
    "tagged_functions": (
        FUNCTIONS,
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    "bare_json": (BARE, '{"name": "weather", "parameters": {"city": "Rome"}}', "; "),
    "marked_list": (MARKED, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', ""),
}
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>")


@pytest.mark.parametrize("kind", ["text", "added", "special"])
@pytest.mark.parametrize("form", sorted(EXAMPLES))
def test_forced_calls(form: str, kind: str) -> None:
    source, good, between = EXAMPLES[form]
    marks = {"text": NO_MARKS, "added": Marks(added=TAGS), "special": Marks(special=TAGS)}[kind]
    chats = template_format(source, marks)
    tokenizer = Tokenizer(byte_tokenizer(marks), eos_token_ids=(0,))
    grammars = compiler(tokenizer)

    def fits(prepared: PreparedChat, text: str) -> bool | None:
        return accepts(grammars, tokenizer, prepared.grammar, text)

    required = prepare(chats, tools=TOOLS, tool_choice="required")
    assert fits(required, good) is True
    assert fits(required, good.replace("weather", "other")) is False
    assert fits(required, "Hello") is False
    assert fits(required, good.replace("city", "town")) is False
    if between:
        assert fits(required, good + between + good) is True
        assert fits(prepare(chats, tools=TOOLS, tool_choice="required", parallel_tool_calls=False), good + between + good) is False
    named = prepare(chats, tools=TOOLS, tool_choice={"name": "clock"})
    assert fits(named, good) is False
    assert "clock" in named.prompt
    # What the grammar allows, the decoder shows and the parser reads.
    shown = tokenizer.decode(tokenizer.encode(good, add_special_tokens=False), skip_special_tokens=required.skip_special_tokens)
    assert read(required, shown).parsed_calls == [("weather", {"city": "Rome"})]
    # A structured answer beside calls that are not forced.
    either = prepare(chats, tools=TOOLS, constraint=Choice(("yes", "no")))
    assert [fits(either, text) for text in (good, "yes", "maybe")] == [True, True, False]
    assert prepare(chats, tools=TOOLS).grammar is None
    one = prepare(chats, tools=TOOLS, parallel_tool_calls=False)
    if one.grammar is not None:
        assert [fits(one, text) for text in ("Hello <", "Hello " + good, good)] == [True] * 3
        assert not fits(one, good + good)


@pytest.mark.parametrize("marks", [NO_MARKS, Marks(added=TAGS)])
def test_grammars_leave_thoughts_free(marks: Marks) -> None:
    tokenizer = Tokenizer(byte_tokenizer(marks), eos_token_ids=(0,))
    grammars = compiler(tokenizer)
    good = EXAMPLES["tagged_json"][1]
    chats = template_format(THINKS, marks)
    call = prepare(chats, tools=TOOLS, tool_choice="required", thinking=True)
    answer = prepare(chats, constraint=JsonSchema({"type": "integer"}), thinking=True)
    for prepared, text in ((call, good), (answer, "12")):
        for before, expected in (("", True), ("<think>\nso {\n</think>\n\n", True), ("<think></think>", True), ("so", False)):
            assert accepts(grammars, tokenizer, prepared.grammar, before + text) is expected
    off = prepare(chats, constraint=JsonSchema({"type": "integer"}), thinking=False)
    assert accepts(grammars, tokenizer, off.grammar, "<think></think>12") is False
    begun = prepare(template_format(ALWAYS, marks), constraint=Choice(("yes",)))
    assert accepts(grammars, tokenizer, begun.grammar, "so</think>\nyes") is True
    assert accepts(grammars, tokenizer, begun.grammar, "yes") is None


def test_a_grammar_of_the_clients_own_beside_tools() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), eos_token_ids=(0,))
    prepared = prepare(template_format(TAGGED), tools=[WEATHER], constraint=Lark('start: x\nx: "a"+'))
    assert accepts(compiler(tokenizer), tokenizer, prepared.grammar, "aa") is True
    assert accepts(compiler(tokenizer), tokenizer, prepared.grammar, EXAMPLES["tagged_json"][1]) is True


def test_smollm2_style_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer())
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert TemplateFormat(Tokenizer.from_folder(tmp_path), None).name == "jinja"
