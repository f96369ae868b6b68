"""The import directions of ARCHITECTURE.md section 3, and what the core may never do. Rooms that do not exist yet cost nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Rule(NamedTuple):
    """Files under ``folder`` must not import what begins with one of ``never``, but for ``exceptions`` (file name -> allowed prefixes).
    ``only`` (if given) is all they may import of our own rooms."""

    folder: str
    never: tuple[str, ...]
    belongs: str
    exceptions: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    only: tuple[str, ...] | None = None


TENSORS = ("engine.model", "engine.kernels", "engine.parallel", "torch")
RULES = (
    Rule(
        "engine/core",
        (
            *("time", "random", "os", "numpy", "torch", "asyncio", "trio", "io", "socket", "pathlib", "subprocess", "threading"),
            *("datetime", "logging", "secrets", "tempfile", "multiprocessing", "uuid", "simpy"),
        ),
        "the core decides; clocks, I/O and tensors belong to engine/actors, engine/model or the twin",
        only=("engine.core",),
    ),
    Rule(
        "engine/kernels",
        ("engine.model", "engine.actors", "trio"),
        "a kernel takes tensors; what knows models belongs to engine/model",
        only=("engine.core", "engine.kernels"),
    ),
    Rule(
        "engine/model",
        ("engine.actors", "engine.api", "trio"),
        "a model takes a batch; what waits or serves belongs to engine/actors",
        only=(
            *("engine.core", "engine.kernels", "engine.model", "engine.parallel", "engine.reading"),
            *("engine.grammar", "engine.grammar_compiler", "engine.tokenizer"),  # what an answer may say is enforced by the sampler
        ),
    ),
    Rule(
        "engine/parallel",
        ("engine.actors", "engine.api", "trio"),
        "groups and collectives know no actors",
        only=("engine.core", "engine.kernels", "engine.model", "engine.parallel"),
    ),
    Rule(
        "engine/transfer",
        ("engine.actors", "engine.api", "engine.model"),
        "connectors move bytes; who orders them belongs to engine/actors",
    ),
    Rule(
        "engine/actors",
        (*TENSORS, "engine.api", "engine.transfer", "calibration", "twin", "dashboards"),
        "only the worker may touch the model, and only cache.py the transfers",
        # worker_main is the worker's own process: what worker.py starts.
        {
            "worker.py": TENSORS,
            "worker_main.py": (*TENSORS, "calibration.recorder", "calibration.errors"),  # --record-trace
            "link_main.py": ("engine.parallel",),  # another node's ranks are reached over a process group
            "cache.py": ("engine.transfer",),
        },
    ),
    Rule(
        "engine/bench",
        (*TENSORS, "engine.actors", "engine.api", "calibration", "twin", "dashboards"),
        "the load generator knows a server by its URL",
        only=("engine.core", "engine.bench", "engine.version"),
    ),
    Rule("engine/api", TENSORS, "HTTP speaks to the gateway actor and to nobody else"),
    Rule(
        "calibration",
        (*TENSORS, "engine.actors", "engine.api", "twin", "dashboards"),
        "only microbench.py and the recorder run kernels",
        {"microbench.py": TENSORS, "recorder.py": TENSORS},
    ),
    Rule(
        "twin",
        (*TENSORS, "trio", "engine.actors", "engine.api"),
        "the twin runs the core on simulated time; engine and twin meet in twinfer.py only",
    ),
    Rule(
        "dashboards",
        (*TENSORS, "simpy", "trio", "twin", "engine.actors", "engine.api"),
        "dashboards read event logs and tables",
    ),
)

STDLIB = set(sys.stdlib_module_names)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py")) if (ROOT / folder).is_dir() else []


def imports(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved; ``from a import b`` is both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(rule: Rule, path: Path, root: Path = ROOT) -> list[str]:
    package = ".".join(path.relative_to(root).parent.parts)
    found = []
    for line, name in imports(path, package):
        allowed = rule.exceptions.get(path.name, ())
        if any(begins(name, prefix) for prefix in allowed):
            continue
        own = name.split(".")[0] in ("engine", "calibration", "twin", "dashboards", "twinfer")
        wrong = any(begins(name, prefix) for prefix in rule.never)
        if own and rule.only is not None and name != "engine":
            wrong = wrong or not any(begins(name, prefix) for prefix in rule.only)
        if wrong:
            found.append(f"{path.relative_to(root)}:{line} imports {name}: {rule.belongs}")
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.folder)
def test_import_directions(rule: Rule) -> None:
    found = [text for path in sources(rule.folder) for text in violations(rule, path)]
    assert not found, "\n".join(["a room imports what its place in ARCHITECTURE.md section 3 rules out:", *found])


def test_the_core_needs_the_standard_library_and_msgspec_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("engine/core")
        for line, name in imports(path, "engine.core")
        if name.split(".")[0] not in STDLIB | {"msgspec", "engine"}
    ]
    assert not found, "\n".join(["engine/core runs in the twin without any other package:", *found])


BANNED_CALLS = {"open", "print", "input", "eval", "exec", "compile", "__import__", "breakpoint", "hash", "id"}


def banned_calls(tree: ast.AST) -> list[tuple[int, str]]:
    """Calls of I/O and of what differs from run to run; and loops over set displays or set(...), whose order does."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.append((node.lineno, f"{node.func.id}()"))
        iterated = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
        for value in iterated:
            is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("set", "frozenset")
            if isinstance(value, (ast.Set, ast.SetComp)) or is_call:
                found.append((value.lineno, "iteration over a set"))
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            found.append((node.lineno, "async code"))
    return found


def test_the_core_is_pure() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}: the core has no I/O, no async and no order that differs between runs"
        for path in sources("engine/core")
        for line, what in banned_calls(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


def test_the_rules_can_fail(tmp_path: Path) -> None:
    """A rule that cannot fail protects nothing."""
    core = tmp_path / "engine" / "core"
    core.mkdir(parents=True)
    path = core / "bad.py"
    path.write_text("import time\nfrom engine.model import base\nfrom ..actors import gateway\nfrom engine.core import plan\n")
    rule = RULES[0]
    assert len([text for text in violations(rule, path, tmp_path) if "bad.py:1" in text]) == 1
    assert [text for text in violations(rule, path, tmp_path) if "engine.model" in text]
    assert [text for text in violations(rule, path, tmp_path) if "engine.actors.gateway" in text]
    assert not [text for text in violations(rule, path, tmp_path) if "bad.py:4" in text]
    assert [what for _, what in banned_calls(ast.parse("for x in {1, 2}:\n    print(x)"))] == ["iteration over a set", "print()"]
