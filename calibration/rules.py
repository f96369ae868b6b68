"""From a kernel's name to a component: an ordered list of regular expressions, the first that is found decides.

The file is TOML: ``version = 1`` and ``[[rule]]`` tables with ``pattern`` (searched for anywhere in the name, case ignored) and
``component``. ``kernel_rules.toml`` beside this module is the default; ``--rules`` replaces it.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from calibration.errors import TraceError
from calibration.trace import OTHER, KernelTable, Origin
from engine.core.specs import COMPONENTS

DEFAULT_RULES = Path(__file__).with_name("kernel_rules.toml")
RULES_VERSION = 1
MAX_RULES = 2000
MAX_FILE_BYTES = 1 << 20


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pattern: str
    component: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    rule: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """``sha256`` is the file's, for the provenance of what was classified by it."""

    compiled: tuple[tuple[re.Pattern[str], str], ...]
    sha256: str

    def component(self, kernel: str) -> str | None:
        """The component of the first rule that matches; None where none does."""
        return next((component for pattern, component in self.compiled if pattern.search(kernel)), None)

    def apply(self, table: KernelTable) -> KernelTable:
        """Classify the rows that no range has labelled."""
        found = [self.component(name) for name in table.kernel_names]
        codes = np.array([OTHER if name is None else COMPONENTS.index(name) for name in found], dtype=np.int8)
        origins = np.array([Origin.NONE if name is None else Origin.RULE for name in found], dtype=np.uint8)
        labelled = table.origin == Origin.RANGE
        return replace(
            table,
            component=np.where(labelled, table.component, codes[table.kernel]),
            origin=np.where(labelled, table.origin, origins[table.kernel]),
            sources=tuple(msgspec.structs.replace(source, rules_sha256=self.sha256) for source in table.sources),
        )


def load_rules(path: Path | None = None) -> Rules:
    """Read a rules file. Raises TraceError naming the rule at fault."""
    path = path or DEFAULT_RULES
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"rules file {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise TraceError(f"rules file {path} has {len(content)} B; allowed: {MAX_FILE_BYTES}")
    try:
        file = msgspec.convert(tomllib.loads(content.decode()), _File)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise TraceError(f"rules file {path} is not a rules file: {error}") from error
    if file.version != RULES_VERSION:
        raise TraceError(f"rules file {path} has version {file.version}; this release reads version {RULES_VERSION}")
    if len(file.rule) > MAX_RULES:
        raise TraceError(f"rules file {path} has {len(file.rule)} rules; allowed: {MAX_RULES}")
    compiled = []
    for number, rule in enumerate(file.rule, start=1):
        if rule.component not in COMPONENTS:
            raise TraceError(f"rules file {path}, rule {number}: component {rule.component!r} is unknown; known: {', '.join(COMPONENTS)}")
        try:
            compiled.append((re.compile(rule.pattern, re.IGNORECASE), rule.component))
        except re.error as error:
            raise TraceError(f"rules file {path}, rule {number}: {rule.pattern!r} is no regular expression: {error}") from error
    return Rules(tuple(compiled), hashlib.sha256(content).hexdigest())
