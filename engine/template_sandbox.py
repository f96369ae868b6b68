"""A Jinja environment for templates of strangers: nothing outside is reachable, and neither time nor memory can be used up.

Time: every turn of a loop and every call looks at a deadline, for which loops are rewritten when a template is compiled. All else a
template can do takes time in proportion to its own length and to the values it holds. Memory: operations that make large values out
of small ones are closed, or refuse a result above a bound. What remains is the comparison of values nested on purpose, which no
template of a model does.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

MAX_TEXT_CHARS = 16 << 20  # of one value; the longest prompt
# Products and powers in a template are for small numbers and rulers of dashes.
_MAX_PRODUCT = 1 << 20
_MAX_BITS = 4096
_MAX_ITEMS = 1 << 20  # of a list, or of everything inside a value that becomes text
_CLOSED_METHODS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"])
_CLOSED_FILTERS = ("format", "batch", "slice", "wordwrap", "urlize", "pprint", "xmlattr")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compile with ``from_string``; what is rendered between ``start`` and the deadline is rendered in the thread that called it."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols],
            finalize=_printable,
            optimized=False,  # nothing of a template is computed while it is compiled
        )
        for name in _CLOSED_FILTERS:
            del self.filters[name]
        for name in ("center", "indent"):
            self.filters[name] = _bounded_width(self.filters[name])
        self.filters["tojson"] = _to_json
        self.filters["replace"] = lambda text, old, new, count=None: _replace(str(text), str(old), str(new), count)
        self.filters["join"] = _join
        self.filters["string"] = _text
        self.filters["sum"] = _sum
        self.filters["round"] = lambda value, precision=0: round(float(value), min(int(precision), 16))
        self.filters["_concatenated"] = lambda parts: _join(parts)
        self.filters["_timed"] = self._timed
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._limit = threading.local()

    def start(self, seconds: float) -> None:
        """The calling thread may render for ``seconds`` from now on."""
        self._limit.deadline = time.monotonic() + seconds

    def check_time(self) -> None:
        if time.monotonic() > getattr(self._limit, "deadline", 0.0):
            raise SecurityError("rendering takes too long")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Text methods that allocate as much as their argument says are out of reach."""
        return attr not in _CLOSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would let ``str.format`` through, with any width; without its wrapper the method is as closed as the others."""
        del value

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes."""
        self.check_time()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(obj, "__name__", "")
            if name == "replace":
                return _replace(owner, *args, **kwargs)
            if name == "join" and len(args) == 1:
                return _join(args[0], owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        _BINOP_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Rewriter().visit(source), *args, **kwargs)

    def _timed(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.check_time()
            yield value


class _Rewriter(jinja2.visitor.NodeTransformer):
    """Loops look at the clock, and ``~`` at the size of its result."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_timed")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), "_concatenated")


def _filtered(value: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _check_product(left: Any, right: Any) -> None:
    sized = next((value for value in (left, right) if hasattr(value, "__len__")), None)
    factor = right if sized is left else left
    if sized is not None and isinstance(factor, int) and len(sized) * factor > _MAX_PRODUCT:
        raise SecurityError(f"a product of more than {_MAX_PRODUCT} items")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise SecurityError(f"a number of more than {_MAX_BITS} bits")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and max(left.bit_length(), 1) * right > _MAX_BITS:
        raise SecurityError(f"an exponent of {right}: a number of more than {_MAX_BITS} bits")


def _check_modulo(left: Any, right: Any) -> None:
    del right
    if isinstance(left, (str, bytes)):
        raise SecurityError("formatting with %; use + or ~")


def _check_sum(left: Any, right: Any) -> None:
    if hasattr(left, "__len__") and hasattr(right, "__len__"):
        limit = MAX_TEXT_CHARS if isinstance(left, str) else _MAX_ITEMS
        if len(left) + len(right) > limit:
            raise SecurityError(f"a sum of more than {limit} items")


_BINOP_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "*": _check_product,
    "**": _check_power,
    "%": _check_modulo,
    "+": _check_sum,
}


def _printable(value: Any) -> Any:
    """A value about to become text: as it is, if what it holds is not larger than it looks."""
    if isinstance(value, (list, tuple, dict)):
        level: list[Any] = [value]
        num_items = 0
        while level:
            num_items += len(level)
            if num_items > _MAX_ITEMS:
                raise SecurityError(f"a value of more than {_MAX_ITEMS} items")
            item = level.pop()
            if isinstance(item, dict):
                level.extend(item.values())
            elif isinstance(item, (list, tuple)):
                level.extend(item)
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_printable(value))


def _join(values: Iterable[Any], separator: Any = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise SecurityError("join with an attribute; use map first")
    parts: list[str] = []
    between = _text(separator)
    num_chars = 0
    for value in values:
        parts.append(_text(value))
        num_chars += len(parts[-1]) + len(between)
        if num_chars > MAX_TEXT_CHARS:
            raise SecurityError(f"a text of more than {MAX_TEXT_CHARS} characters")
    return between.join(parts)


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    times = text.count(old)
    if len(text) + times * len(new) > MAX_TEXT_CHARS:
        raise SecurityError(f"a text of more than {MAX_TEXT_CHARS} characters")
    return text.replace(old, new, -1 if count is None else count)


def _sum(values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None or not isinstance(start, (int, float)):
        raise SecurityError("sum is for numbers")
    return sum(values, start)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    # Jinja's own filter escapes for HTML, which no prompt wants.
    return json.dumps(_printable(value), ensure_ascii=ensure_ascii, indent=None if indent is None else min(int(indent), 16))


def _bounded_width(function: Any) -> Any:
    def bounded(value: Any, width: Any = 4, *rest: Any, **more: Any) -> Any:
        if isinstance(width, str) or not 0 <= int(width) <= 1024:
            raise jinja2.TemplateError(f"a width of {width}; allowed: 0 to 1024")
        text = _text(value)
        if len(text) + text.count("\n") * int(width) > MAX_TEXT_CHARS:
            raise SecurityError(f"a text of more than {MAX_TEXT_CHARS} characters")
        return function(text, width, *rest, **more)

    return bounded
