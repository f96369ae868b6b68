"""Templates are strangers' code: neither time nor memory can be used up, and ordinary ones notice nothing of that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import jinja2.ext
import pytest

from engine.chat_template import ChatTemplate
from engine.core.errors import RequestError

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
TIMES_60 = "{% for _ in range(60) %}%s{% endfor %}"
STATE = "{% set ns = namespace(x=%s) %}"


def growing(start: str, step: str, end: str = "{{ ns.x }}") -> str:
    return STATE.replace("%s", start) + TIMES_60.replace("%s", "{% set ns.x = " + step + " %}") + end


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set y = f(n - 1) %}{% endif %}{% endmacro %}{% set z = f(60) %}",
        "{% for i in [1] recursive %}{% set x = loop([1, 1]) %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% for j in range(99999) %}{% set ns.x = [j] %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_templates_end(source: str) -> None:
    template = ChatTemplate(source, max_render_s=0.02)
    with pytest.raises(RequestError, match=r"too long|recursion"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        growing("'ab'", "ns.x ~ ns.x"),
        growing("'ab'", "ns.x + ns.x"),
        growing("[1]", "ns.x + ns.x"),
        growing("'ab'", "[ns.x, ns.x] | join"),
        growing("'ab'", "ns.x.join([ns.x, ns.x])"),
        growing("'ab'", "ns.x.replace('a', ns.x)"),
        growing("'ab'", "ns.x | replace('a', ns.x)"),
        growing("[1]", "[ns.x, ns.x]"),
        growing("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
        growing("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | string }}"),
        growing("[1]", "[ns.x, ns.x]", "{{ 'x' ~ ns.x }}"),
        growing("[1]", "[ns.x, ns.x]", "{{ [ns.x] | join(',') }}"),
        growing("9", "ns.x * ns.x"),
        growing("9", "ns.x ** 9"),
        growing("'a\\n'", "(ns.x + ns.x) | indent(1024, true, true)"),
        "{{ 'a' * 99999999 }}",
        "{{ 1 | round(99999999) * 'a' }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{{ lipsum(99999999) }}",
        "{{ 'a'.translate({97: 'b'}) }}",
    ],
)
def test_small_values_do_not_become_large_ones(source: str) -> None:
    with pytest.raises(RequestError, match="do not fit the model's chat template"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ loop.previtem }} {{ loop.nextitem }}\n{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index0 ~ m.content ~ 1 ~ none ~ undefined }}{% else %}none{% endfor %}",
        "{% for m in [] %}{% else %}none{% endfor %}{% for k, v in messages[0].items() %}{{ k + v }}{% endfor %}",
        "{% for k in messages[0] %}{{ k }}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
        "{% for m in [[1, [2, 3]]] recursive %}{{ m if m is number else loop(m) }}{% endfor %}",
        "{% macro f(m) %}<{{ m.content }}>{{ caller() }}{% endmacro %}{% for m in messages %}{% call f(m) %}x{% endcall %}{% endfor %}",
        "{{ messages | map(attribute='content') | join(', ') }}{{ messages[::-1] | length }}{{ [1, 2] | sum }}{{ 2.567 | round(1) }}",
        "{{ 'a-b'.replace('-', '+').split('+') }}{{ 'a-b' | replace('-', '') | upper }}{{ ', '.join(['a', 'b']) }}{{ [1, none, 'é'] }}",
        "{{ 'a\nb' | indent(2) }}{{ ' x ' | trim }}{{ 3 ** 2 % 5 * 2 }}{{ [1] + [2] }}{{ {'a': [1]} }}{{ ('-' * 3) | string }}",
    ],
)
def test_ordinary_templates_render_as_jinja_does(source: str) -> None:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    assert ChatTemplate(source).render(MESSAGES) == plain.from_string(source).render(messages=MESSAGES)


def test_deadlines_of_threads_are_their_own() -> None:
    template = ChatTemplate("{% for m in messages %}{% for j in range(300) %}{{ m.content }}{% endfor %}{% endfor %}")

    def render(count: int) -> str:
        return template.render(MESSAGES * count)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(render, range(8))) == [("a" * 300 + "b" * 300 + "c" * 300) * count for count in range(8)]


def test_names_a_template_asks_for() -> None:
    source = "{{ messages }}{{ tools }}{{ mood }}{% for x in range(3) %}{{ x }}{% endfor %}{{ raise_exception }}{{ bos_token }}"
    template: Any = ChatTemplate(source)
    assert (template.options, template.uses_tools) == ({"mood"}, True)
    assert not ChatTemplate("{{ messages }}").uses_tools
