"""Chat templates: Jinja from a model folder, so from a stranger. Rendered in a sandbox (template_sandbox.py) under bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from engine.core.errors import ConfigError, RequestError
from engine.template_sandbox import MAX_TEXT_CHARS, Sandbox

MAX_TEMPLATE_CHARS = 1 << 20
MAX_MESSAGES = 16_384
MAX_RENDERED_CHARS = MAX_TEXT_CHARS
MAX_RENDER_S = 10.0  # the longest prompts take about a second
_RESERVED = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class ChatTemplate:
    """One compiled template. What a client may set is ``messages``, ``tools`` and the options the caller lets through."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", max_render_s: float = MAX_RENDER_S) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(source)} characters; allowed: at most {MAX_TEMPLATE_CHARS}")
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
            named = jinja2.meta.find_undeclared_variables(self._sandbox.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template is no valid Jinja: {error}") from None
        # What a caller may set: the names the template asks for, but for those that are set here.
        self.options = frozenset(named) - _RESERVED - frozenset(self._sandbox.globals)
        self.uses_tools = "tools" in named
        self._max_render_s = max_render_s
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
        self._sandbox.start(self._max_render_s)
        try:
            for part in self._template.generate(values):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise RequestError(f"messages render to more than {MAX_RENDERED_CHARS} characters", param="messages")
                parts.append(part)
        except _FAULTS as error:
            raise RequestError(f"messages do not fit the model's chat template: {error}", param="messages") from None
        return "".join(parts)
