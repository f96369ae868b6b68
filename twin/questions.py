"""From options to the questions of a sweep: every layout under every load, each with the memory and the prices it has there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import msgspec

from calibration.measured import parse_acceptance
from engine.core.errors import ConfigError
from engine.core.layout import Deployment
from engine.core.memory import block_bytes, plan_memory
from engine.core.metrics import Slo
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec
from engine.options import Resolved
from engine.scheduler_options import cache_config, cpu_budget_bytes, scheduler_config
from twin.config import TransferCost, TwinConfig
from twin.given_cost import GivenCost, parse_given_cost
from twin.point import FittedCost, Question
from twin.simulate_options import MAX_POINTS, Load, deployments, loads, slo, workload_spec
from twin.workload.spec import make_workload

__all__ = ["questions", "slo", "with_outputs"]

_GIVEN_DTYPE = "bfloat16"


def questions(options: Resolved, model: str, spec: ModelSpec, limits: Slo | None) -> tuple[dict[str, Any], list[Question]]:
    """What is the same for all points, as it is printed, and the points: layouts in the order given, each under all loads. Raises
    ConfigError for what cannot be asked, DomainError for what a calibration cannot say."""
    layouts, asked = deployments(options), loads(options)
    if len(layouts) * len(asked) > MAX_POINTS:
        raise ConfigError(f"{len(layouts)} layouts under {len(asked)} loads; allowed: at most {MAX_POINTS} points")
    _check_workload(options)
    cost, dtype, source = _cost(options, model, spec)
    configs = [_config(options, spec, deployment, dtype, limits) for deployment in layouts]
    make_workload(workload_spec(options, asked[0]))  # what is wrong with it is said before anything runs
    found = [
        Question(
            name=f"{deployment}, {load.name}",
            layout=str(deployment),
            request_rate="inf" if load.request_rate == math.inf else load.request_rate,
            concurrency=load.concurrency,
            spec=spec,
            config=config,
            cost=cost,
            workload=workload_spec(options, load),
            slo=limits,
        )
        for deployment, config in zip(layouts, configs, strict=True)
        for load in asked
    ]
    for question in found:
        if isinstance(question.cost, FittedCost):
            question.cost.cost(spec, question.layout)
    facts = {
        "model": model,
        "seed": options["seed"],
        "dtype": dtype,
        "cost": source,
        "workload": _shown(options),
        "slo": None if limits is None else {name: value for name, value in msgspec.to_builtins(limits).items() if value is not None},
    }
    return facts, found


def with_outputs(asked: Sequence[Question], *, wants_details: bool, events: Path | None) -> list[Question]:
    """Raises ConfigError for the event log of several simulations."""
    if events is not None and len(asked) > 1:
        raise ConfigError(f"--events {events}: the log is of one simulation, and {len(asked)} are asked for; leave one layout and one load")
    path = None if events is None else str(events.absolute())
    return [msgspec.structs.replace(one, wants_details=wants_details, events_path=path) for one in asked]


def _check_workload(options: Resolved) -> None:
    if not options["workload"]:
        return
    for key in ("isl", "osl"):
        if options.origins[key] != "default":
            raise ConfigError(f"--workload {options['workload']} and --{key} are both given; a file brings its own lengths, leave one out")


def _shown(options: Resolved) -> dict[str, Any]:
    """The workload's options that are not at their defaults, and the lengths where no file brings them."""
    spec = msgspec.to_builtins(workload_spec(options, Load(None, None)))
    given = {key: value for key, value in spec.items() if options.origins.get(key, "default") != "default" and key not in ("seed",)}
    lengths = {} if options["workload"] else {key: spec[key] for key in ("isl", "osl")}
    rates = {key: options[key] for key in ("request_rate", "concurrency") if options[key] is not None}
    return {**lengths, **given, **rates}


def _cost(options: Resolved, model: str, spec: ModelSpec) -> tuple[Union[GivenCost, FittedCost], str, dict[str, Any]]:
    """(prices of steps, dtype of weights and KV, where they come from)."""
    given = [flag for flag in ("calibration", "system", "step_cost") if options[flag]]
    if len(given) != 1:
        raise ConfigError(
            "where step times come from: give one of --calibration FILE (what twinfer calibrate wrote) and --step-cost A[,B[,C]]"
        )
    if options["system"]:
        raise ConfigError(f"--system {options['system']}: published systems are not in this release; calibrate one and use --calibration")
    if options["step_cost"]:
        if options["expert_balance"] != "balanced":
            raise ConfigError(
                f"--expert-balance {options['expert_balance']}: a given step cost (--step-cost) knows no experts; use --calibration"
            )
        cost = parse_given_cost(options["step_cost"])
        return cost, _GIVEN_DTYPE if options["dtype"] == "auto" else options["dtype"], {"source": "given", "note": cost.note}
    return _fitted(options, model, spec)


def _fitted(options: Resolved, model: str, spec: ModelSpec) -> tuple[FittedCost, str, dict[str, Any]]:
    from calibration import store
    from calibration.calibrate import spec_hash
    from calibration.imbalance import parse_expert_balance
    from twin.speed import is_here, probe_now

    calibration = store.load(Path(options["calibration"]))
    fit = calibration.model(model, spec_hash(spec))
    if options["dtype"] not in ("auto", fit.dtype):
        raise ConfigError(f"--dtype is {options['dtype']}; {model} was calibrated in {fit.dtype}")
    is_probed = not options["no_probe"] and is_here(calibration)
    probe = probe_now(calibration)[0] if is_probed else None
    source = {
        "source": "calibration",
        "made": calibration.made,
        "machine": msgspec.to_builtins(calibration.machine),
        "fits_sha256": calibration.fits_sha256,
        "probe": None if probe is None else msgspec.to_builtins(probe),
    }
    cost = FittedCost(
        fit=fit,
        probe=probe,
        engram=options["engram"],
        draft_tokens=options["draft_tokens"],
        redundant_experts=options["redundant_experts"],
        expert_balance=parse_expert_balance(options["expert_balance"]),
        expert_rebalancing=options["expert_rebalancing"],
    )
    return cost, fit.dtype, source


def _config(options: Resolved, spec: ModelSpec, deployment: Deployment, dtype: str, limits: Slo | None) -> TwinConfig:
    place = RankPlace(
        layout=deployment.decode.unit,
        engram=options["engram"],
        redundant_experts=options["redundant_experts"],
        draft_redundant_experts=options["draft_redundant_experts"],
    )
    place.validate_for(spec)
    scheduler = _scheduler(options, spec, place, dtype)
    transfer = None
    if options["host_gb_per_s"] is not None:
        transfer = TransferCost(block_bytes(spec, options["block_size"], dtype, place), options["host_gb_per_s"] * 1e9)
    config = TwinConfig(
        scheduler=scheduler,
        num_replicas=deployment.decode.count,
        routing=options["routing"],
        door_s=options["door_ms"] / 1e3,
        reply_s=options["reply_ms"] / 1e3,
        acceptance=acceptance(options),
        transfer=transfer,
        gpus_per_replica=deployment.decode.unit.num_gpus,
        usd_per_gpu_hour=options["usd_per_gpu_hour"],
        watts_per_gpu=options["watts_per_gpu"],
        slo=limits or Slo(),
        seed=options["seed"],
        metrics=options["metrics"],
        fast_forward=not options["no_fast_forward"],
    )
    config.validate()
    return config


def _scheduler(options: Resolved, spec: ModelSpec, place: RankPlace, dtype: str) -> SchedulerConfig:
    """Raises ConfigError where weights and KV exceed the memory that was stated."""
    stated = options["memory_gib"]
    memory_bytes = None if stated is None else int(stated * (1 << 30))
    budget = cpu_budget_bytes(spec, dtype, place) if memory_bytes is None else int(memory_bytes * options["mem_fraction_static"])
    cache = cache_config(options, spec, dtype, budget, place)
    if memory_bytes is not None:
        memory = plan_memory(spec, cache, dtype, place)
        if memory.total_bytes > memory_bytes:
            raise ConfigError(
                f"layout {place.layout}: weights {memory.weight_bytes} B and KV {memory.cache_bytes} B of a rank exceed {memory_bytes} B "
                "(--memory-gib); lower --max-total-tokens or --max-running-requests"
            )
    config = scheduler_config(options, spec, cache, place.layout.dp)
    return config if options["tpot_slo"] is None else msgspec.structs.replace(config, tpot_slo_s=options["tpot_slo"] / 1e3)


def acceptance(options: Resolved) -> tuple[float, ...]:
    """Raises ConfigError for drafts without an acceptance, and the other way round."""
    text, drafts = options["acceptance"], options["draft_tokens"]
    if not text:
        if drafts:
            raise ConfigError(f"--draft-tokens is {drafts}: how many are accepted is not known before a run; give --acceptance")
        return ()
    if not drafts:
        raise ConfigError(f"--acceptance is {text[:60]!r} without --draft-tokens")
    return parse_acceptance(text, drafts)
