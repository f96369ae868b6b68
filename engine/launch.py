"""From options and a model folder to an EngineConfig: everything that is decided before a worker starts, torch-free.

What cannot work fails here, before weights are read, with the numbers in the text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from engine.actors.config import EngineConfig, GatewayConfig, SupervisionConfig, WorkerConfig
from engine.chat_template import ChatTemplate
from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.expert_balance import first_maps
from engine.core.layout import Deployment, parse_layout
from engine.core.memory import MemoryPlan, plan_memory
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec, V41Spec
from engine.device import DeviceInfo, resolve_device
from engine.model.files import ModelFiles, read_model_files
from engine.model.registry import require_weights
from engine.nodes import nodes_config, ranks_per_node
from engine.options import Resolved
from engine.recording import with_recording
from engine.scheduler_options import cache_config, cpu_budget_bytes, scheduler_config
from engine.tokenizer import Tokenizer

# A CPU's memory is shared with everything else on the machine, so the default KV pool is modest.
CPU_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """What the parent process needs of a model: its spec, its files and, where it has one, its tokenizer."""

    files: ModelFiles
    tokenizer: Tokenizer | None

    @property
    def spec(self) -> ModelSpec:
        return self.files.spec


def open_model(name_or_path: str) -> OpenedModel:
    """Resolve and read everything but the weights. Raises ConfigError naming the file at fault."""
    files = read_model_files(name_or_path)
    if files.tokenizer_json is None:
        return OpenedModel(files, None)
    if files.is_gguf:
        template = ChatTemplate(files.chat_template) if files.chat_template else None
        return OpenedModel(files, Tokenizer(files.tokenizer_json, eos_token_ids=files.spec.eos_token_ids, chat_template=template))
    return OpenedModel(files, Tokenizer.from_folder(files.text_folder))


class Launch(msgspec.Struct, frozen=True):
    """A checked plan of an engine: what will run where, and the memory it will take per rank."""

    config: EngineConfig
    spec: ModelSpec
    device: DeviceInfo
    memory: MemoryPlan
    layout: Deployment
    budget_bytes: int


def plan_launch(options: Resolved, spec: ModelSpec, model: str, *, to_run: bool = True) -> Launch:
    """Size the caches and fill the actors' configuration. Raises ConfigError for whatever cannot work.

    Without ``to_run`` the model need not have weights: its sizes are asked for.
    """
    _check_measuring_switches(options, spec)
    if to_run and options["load_format"] != "random":
        require_weights(model)
    layout = parse_layout(options["layout"])
    place = _place(options, layout, spec)
    per_node = ranks_per_node(options, place.num_ranks, place.layout.tp)
    device = resolve_device(options["device"])
    dtype = _auto_dtype(spec, device) if options["dtype"] == "auto" else options["dtype"]
    # The ranks of a CPU share its memory; each GPU has its own.
    free_bytes = device.free_bytes // (per_node if device.device == "cpu" else 1)
    budget_bytes = int(free_bytes * options["mem_fraction_static"])
    if device.device == "cpu":
        budget_bytes = min(int(budget_bytes * CPU_SHARE), cpu_budget_bytes(spec, dtype, place))
    cache = cache_config(options, spec, dtype, budget_bytes, place)
    memory = plan_memory(spec, cache, dtype, place)
    if memory.total_bytes > free_bytes:
        raise ConfigError(
            f"weights {memory.weight_bytes} B and KV {memory.cache_bytes} B of a rank exceed the {free_bytes} B free for it on "
            f"{device.device}; lower --max-total-tokens or --max-running-requests"
        )
    scheduler = scheduler_config(options, spec, cache, place.layout.dp)
    workers = _workers(options, place, per_node, cache, model, dtype, device)
    if to_run:
        workers = tuple(with_recording(worker, options, spec, model) for worker in workers)
    supervision = SupervisionConfig(
        heartbeat_interval_s=min(0.5, options["heartbeat_timeout"] / 2),
        heartbeat_timeout_s=options["heartbeat_timeout"],
        step_timeout_s=options["step_timeout"],
        start_timeout_s=options["start_timeout"],
        shutdown_timeout_s=options["shutdown_timeout"],
        on_worker_death=options["on_worker_death"],
    )
    maps = first_maps(spec, place)
    config = EngineConfig(
        workers=workers,
        scheduler=scheduler,
        supervision=supervision,
        gateway=GatewayConfig(
            max_requests=options["max_waiting_requests"] + options["max_running_requests"] * place.layout.dp,
            seed=options["random_seed"],
            allows_grammars=options["forced_acceptance"] is None,
        ),
        expert_maps=maps,
        report_steps=options["report_steps"] if place.num_ranks > 1 or place.engram == "host" else 0,
        rebalance_experts=bool(maps) and options["expert_rebalancing"],
        nodes=nodes_config(options, workers, supervision, spec, model) if to_run else None,
    )
    config.validate()
    return Launch(config, spec, device, memory, layout, budget_bytes)


def _check_measuring_switches(options: Resolved, spec: ModelSpec) -> None:
    forced, drafts = options["forced_acceptance"], options["draft_tokens"]
    if forced is not None and (drafts == 0 or forced > drafts):
        raise ConfigError(f"--forced-acceptance is {forced:g} with --draft-tokens {drafts}; allowed: at most as many as are drafted")
    if options["forced_routing"] != "model" and not isinstance(spec, V41Spec):
        raise ConfigError(f"--forced-routing is {options['forced_routing']!r}; {spec.name} is not of the family that has this switch")


def _auto_dtype(spec: ModelSpec, device: DeviceInfo) -> str:
    """bfloat16, but for V4.1 on a CPU: what fits there is small, and its many small operations take a third longer in bfloat16."""
    return "float32" if isinstance(spec, V41Spec) and device.device == "cpu" else "bfloat16"


def _place(options: Resolved, layout: Deployment, spec: ModelSpec) -> RankPlace:
    """The first rank's place; the others differ by their number alone. Raises ConfigError for what this release or the model cannot do."""
    reason = layout.why_not_runnable()
    if reason is not None:
        raise ConfigError(reason)
    place = RankPlace(
        layout=layout.decode.unit,
        engram=options["engram"],
        redundant_experts=options["redundant_experts"],
        draft_redundant_experts=options["draft_redundant_experts"],
    )
    place.validate_for(spec)
    return place


def _workers(
    options: Resolved, first: RankPlace, per_node: int, cache: CacheConfig, model: str, dtype: str, device: DeviceInfo
) -> tuple[WorkerConfig, ...]:
    """One process a rank: on a GPU of its own, or on its share of the cores. Of other nodes' ranks the cores and GPUs are theirs to say."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // per_node)
    on_cpu = device.device == "cpu"
    apart = on_cpu and per_node > 1 and share * per_node <= len(cores)
    workers = []
    for rank in range(first.num_ranks):
        place = msgspec.structs.replace(first, rank=rank)
        local = rank % per_node
        workers.append(
            WorkerConfig(
                name=f"worker-{rank}",
                model=model,
                cache=cache,
                dtype=dtype,
                device=device.device if on_cpu or first.num_ranks == 1 else f"cuda:{local}",
                layout=str(first.layout),
                rank=rank,
                num_ranks=first.num_ranks,
                data_rank=place.data_rank,
                tensor_rank=place.tensor_rank,
                # A rank that waits in vain says whom it waits for; the parent, at the end of the step's time, does not know.
                collective_timeout_s=min(options["collective_timeout"], 0.8 * options["step_timeout"]),
                cpu_cores=tuple(cores[local * share : (local + 1) * share]) if apart else (),
                load_format=options["load_format"],
                random_seed=options["random_seed"] or 0,
                num_threads=options["num_threads"] or share,
                cache_rounding=options["cache_rounding"] == "on",
                engram=options["engram"],
                redundant_experts=options["redundant_experts"],
                draft_redundant_experts=options["draft_redundant_experts"],
                forced_acceptance=options["forced_acceptance"],
                forced_routing=options["forced_routing"],
            )
        )
    return tuple(workers)
