"""Command-line options: each defined once with its aliases, unit, bounds and default, and resolved with its origin.

Precedence: command line > environment (``TWINFER_*``) > ``--config`` file (TOML) > default. An unknown key of the file is an
error; ``--print-config`` shows every value and where it came from.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.reading import read_text

ENVIRONMENT_PREFIX = "TWINFER_"
MAX_CONFIG_BYTES = 1 << 20
MAX_TEXTS = 4096  # of one option


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``kind`` is int, float, str or bool (a switch); ``low``/``high`` are inclusive; None as default means automatic.

    ``many`` makes the value a tuple of texts: the flag may be repeated, and every text is split at commas. A ``secret`` value is never
    shown.
    """

    name: str
    kind: type[int] | type[float] | type[str] | type[bool]
    default: int | float | str | bool | tuple[str, ...] | None
    help: str
    aliases: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    many: bool = False
    secret: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        return ENVIRONMENT_PREFIX + self.key.upper()

    def parse(self, value: object, origin: str) -> int | float | str | bool | tuple[str, ...]:
        """Convert and bound one value; raises ConfigError with what, which value, the limit."""
        where = f"--{self.name} ({origin})"
        if self.many:
            return self._texts(value, where)
        if self.kind is bool:
            return self._switch(value, where)
        if isinstance(value, bool):
            raise ConfigError(f"{where} is {_brief(value)}; needed: {self._allowed()}")
        converted = self._convert(value, where)
        if self.choices and converted not in self.choices:
            raise ConfigError(f"{where} is {_brief(value)}; needed: {self._allowed()}")
        if not isinstance(converted, str) and not self.low <= converted <= self.high:  # NaN fails too
            raise ConfigError(f"{where} is {_brief(value)}; needed: {self._allowed()}")
        return converted

    def _texts(self, value: object, where: str) -> tuple[str, ...]:
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
            shown = "not a text" if self.secret else _brief(value)
            raise ConfigError(f"{where} is {shown}; needed: texts, separated by commas or in a list")
        parts = [part.strip() for entry in entries for part in entry.split(",")]
        if len(parts) > MAX_TEXTS:
            raise ConfigError(f"{where} has {len(parts)} entries; allowed: at most {MAX_TEXTS}")
        return tuple(part for part in parts if part)

    def _convert(self, value: object, where: str) -> int | float | str:
        try:
            if self.kind is str:
                return str(value)
            if self.kind is int:
                # A TOML float is no integer, and int("1.5") refuses by itself.
                if isinstance(value, float) and not value.is_integer():
                    raise ValueError
                return int(value)  # type: ignore[call-overload,no-any-return]
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{where} is {_brief(value)}; needed: {self._allowed()}") from None

    def _switch(self, value: object, where: str) -> bool:
        words = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ConfigError(f"{where} is {value!r}; needed: true or false")

    def _allowed(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {int: "an integer", float: "a number", str: "a text"}.get(self.kind, "a value")
        if math.isinf(self.low) and math.isinf(self.high):
            return noun
        if math.isinf(self.high):
            return f"{noun} from {_plain(self.low)} up"
        return f"{noun} from {_plain(self.low)} to {_plain(self.high)}"


def _brief(value: object) -> str:
    """A value for a message: a refused one may be of any length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a very large integer"
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """Values by key, and for each the place it came from."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    secrets: frozenset[str] = frozenset()  # keys whose values are not shown

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def shown(self) -> dict[str, Any]:
        """All values as they may be printed."""
        return {key: "(hidden)" if key in self.secrets and value else value for key, value in self.values.items()}

    def describe(self) -> str:
        width = max(len(key) for key in self.values)
        return "\n".join(f"{key:<{width}}  {_text(value):<24} {self.origins[key]}" for key, value in self.shown().items())

    def non_default(self) -> dict[str, Any]:
        return {key: value for key, value in self.shown().items() if self.origins[key] != "default"}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        value = ",".join(value)
    if value == "":
        return "none"
    return "auto" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def add_arguments(parser: argparse.ArgumentParser, options: Sequence[Option], title: str) -> None:
    """Declare ``options`` on a parser. Parsing leaves them as text; ``resolve`` converts, so that all origins fail alike."""
    group = parser.add_argument_group(title)
    for option in options:
        flags = [f"--{option.name}", *option.aliases]
        default = "none" if option.default in ((), "") else "auto" if option.default is None else option.default
        text = f"{option.help} (default: {default}; env {option.environment})".replace("%", "%%")
        if option.kind is bool:
            group.add_argument(*flags, dest=option.key, action="store_const", const=True, default=None, help=text)
            # The way back for a switch that the environment or the file has set.
            negated = f"--{option.name.removeprefix('no-')}" if option.name.startswith("no-") else f"--no-{option.name}"
            group.add_argument(negated, dest=option.key, action="store_const", const=False, default=None, help=argparse.SUPPRESS)
        else:
            metavar = "{" + ",".join(option.choices) + "}" if option.choices else "NAME" if option.many else option.kind.__name__.upper()
            action = "append" if option.many else "store"
            group.add_argument(*flags, dest=option.key, action=action, default=None, metavar=metavar, help=text)


def resolve(
    options: Sequence[Option],
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    config_file: str | None,
    known: Sequence[Option] = (),
) -> Resolved:
    """Merge the four origins. Raises ConfigError for a bad value, an unreadable file or a key that is neither in ``options`` nor in
    ``known`` (other commands' options, so that one file serves them all)."""
    file_values = read_config_file(config_file, {option.key for option in (*options, *known)}) if config_file else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in options:
        raw: object
        if arguments.get(option.key) is not None:
            raw, origin = arguments[option.key], "command line"
        elif option.environment in environment:
            raw, origin = environment[option.environment], f"environment {option.environment}"
        elif option.key in file_values:
            raw, origin = file_values[option.key], f"file {config_file}"
        else:
            values[option.key], origins[option.key] = option.default, "default"
            continue
        values[option.key], origins[option.key] = option.parse(raw, origin), origin
    return Resolved(values, origins, frozenset(option.key for option in options if option.secret))


def read_config_file(path: str, known: set[str]) -> dict[str, object]:
    """Read a flat TOML file; keys may be written with dashes or underscores."""
    try:
        values = tomllib.loads(read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:  # also integers of more digits than Python parses
        raise ConfigError(f"--config {path}: {error}") from None
    result = {key.replace("-", "_"): value for key, value in values.items()}
    unknown = sorted(set(result) - known)
    if unknown:
        raise ConfigError(f"--config {path}: unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return result
