"""Chat templates: Jinja from a model folder, so from a stranger. Rendered in a sandbox: no attribute, no import, no file is reachable.

The operations that fill the memory in one go are closed or bounded too, and so is the output. What is not bounded is time: a
template of nested loops that print nothing can keep a processor busy, so the operator still chooses whose models to serve.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from engine.core.errors import ConfigError, RequestError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_MESSAGES = 16_384
# Both sides of a render: no longer than the longest prompt the gateway takes.
MAX_RENDERED_CHARS = 16 << 20
# Products and powers in a template are for small numbers and rulers of dashes.
_MAX_PRODUCT = 1 << 20
_MAX_EXPONENT = 64
_UNBOUNDED_METHODS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"])
_UNBOUNDED_FILTERS = ("format", "batch", "slice", "wordwrap")
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, without the operators that make a short template fill the memory."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Text methods that allocate as much as their argument says are out of reach."""
        return attr not in _UNBOUNDED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would let ``str.format`` through, with any width; without its wrapper the method is as closed as the others."""
        del value

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            sized = next((value for value in (left, right) if hasattr(value, "__len__")), None)
            factor = right if sized is left else left
            if sized is not None and isinstance(factor, int) and len(sized) * factor > _MAX_PRODUCT:
                raise SecurityError(f"a product of more than {_MAX_PRODUCT} items")
        if operator == "**" and isinstance(right, (int, float)) and right > _MAX_EXPONENT:
            raise SecurityError(f"an exponent above {_MAX_EXPONENT}")
        if operator == "%" and isinstance(left, (str, bytes)):
            raise SecurityError("formatting with %; use + or ~")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One compiled template. What a client may set is ``messages``, ``tools`` and the options the caller lets through."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(source)} characters; allowed: at most {MAX_TEMPLATE_CHARS}")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        # Padding filters that allocate what they are told to.
        for name in ("center", "indent"):
            environment.filters[name] = _bounded_width(environment.filters[name])
        for name in _UNBOUNDED_FILTERS:
            del environment.filters[name]
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no valid Jinja: {error}") from None
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError naming ``messages`` where the template refuses them or the bounds are passed.

        ``variables`` is for options that the caller has checked against its own list: they can not replace what is set here.
        """
        if len(messages) > MAX_MESSAGES:
            raise RequestError(f"messages has {len(messages)} entries; allowed: at most {MAX_MESSAGES}", param="messages")
        values = dict(variables or {})
        values |= self._tokens | {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(values):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise RequestError(f"messages render to more than {MAX_RENDERED_CHARS} characters", param="messages")
                parts.append(part)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise RequestError(f"messages do not fit the model's chat template: {error}", param="messages") from None
        return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    # Jinja's own filter escapes for HTML, which no prompt wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=None if indent is None else min(int(indent), 16))


def _bounded_width(function: Any) -> Any:
    def bounded(value: Any, width: Any = 4, *rest: Any) -> Any:
        if isinstance(width, str) or not 0 <= int(width) <= 1024:
            raise jinja2.TemplateError(f"a width of {width}; allowed: 0 to 1024")
        return function(value, width, *rest)

    return bounded
