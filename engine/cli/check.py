"""``twinfer check``: environment, model fit, layout. A dry run: nothing is loaded; exit code 2 says that it would not work."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from typing import Any

from engine.cli.common import add_engine_arguments, human_bytes, resolve_options
from engine.command_line import print_config, print_json
from engine.core.errors import ConfigError
from engine.version import VERSION

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "gguf", "msgspec", "trio", "jinja2")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("check", help="environment, model fit and layout, without loading anything", description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="tiny-v41")
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options = resolve_options(arguments)
    if arguments.print_config:
        return print_config(options, arguments.json)
    report: dict[str, Any] = {"version": VERSION, "python": platform.python_version(), "packages": _versions(), "cpus": os.cpu_count()}
    missing = [name for name, version in report["packages"].items() if version is None and name != "triton"]
    if missing:
        raise ConfigError(f"packages are missing: {', '.join(missing)}; install them with: pip install -e '.[engine]'")
    from engine.launch import open_model, plan_launch

    model = open_model(arguments.model)
    launch = plan_launch(options, model.spec, arguments.model)
    cache = launch.config.scheduler.cache
    longest = launch.config.scheduler.context_tokens
    report |= {
        "device": launch.device,
        "model": model.spec.name,
        "layout": options["layout"],
        "dtype": launch.config.workers[0].dtype,
        "memory_bytes": {"weights": launch.memory.weight_bytes, "kv": launch.memory.cache_bytes, "budget": launch.budget_bytes},
        "kv_tokens": cache.num_blocks * cache.block_size,
        "context_length": longest,
        "max_running_requests": cache.max_running,
        "requests_at_full_length": cache.num_blocks * cache.block_size // longest,
        "non_default": options.non_default(),
        "warning": launch.config.scheduler.clamp_warning,
        "ok": True,
    }
    if arguments.json:
        print_json(report)
        return 0
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version)
    for name, value in (
        ("twinfer", f"{VERSION}, Python {report['python']}, {report['cpus']} CPUs"),
        ("packages", packages),
        ("device", f"{launch.device.device} ({launch.device.description}), {human_bytes(launch.device.free_bytes)} free"),
        ("model", f"{model.spec.name}, {report['dtype']}, layout {options['layout']}"),
        ("weights", human_bytes(launch.memory.weight_bytes)),
        ("KV", f"{human_bytes(launch.memory.cache_bytes)}, {report['kv_tokens']:,} tokens"),
        ("requests", f"{report['requests_at_full_length']} at the full length of {longest:,} tokens; {cache.max_running} run at once"),
        ("non-default", ", ".join(f"{key}={value}" for key, value in report["non_default"].items()) or "nothing"),
    ):
        print(f"{name:<12} {value}")
    if report["warning"]:
        print(f"{'warning':<12} {report['warning']}")
    print("ok")
    return 0


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
