"""What ``simulate`` is asked: the engine's own options, the workload's, and its own; and the lists of them that make a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.config import ENGINE_OPTIONS, SERVE_OPTIONS
from engine.core.errors import ConfigError
from engine.core.layout import Deployment, parse_layout
from engine.core.metrics import Slo
from engine.load_values import parse_slo
from engine.options import Option, Resolved
from twin.executors import EXECUTORS, MAX_JOBS
from twin.routing import ROUTING_POLICIES
from twin.workload.spec import WORKLOAD_OPTIONS, WorkloadSpec

MAX_POINTS = 1024
MAX_LIST_CHARS = 4096
_LISTS = {
    "layout": "L[,L...]: as for serve, and replicas as 4x(tp1dp2ep2); several are a sweep",
    "request-rate": "R[,R...]: open loop, requests/s on average, or inf for all at once; replaces a file's times; several are a sweep",
    "concurrency": "C[,C...]: closed loop, clients who each wait for their answer; several are a sweep",
}
_ENGINE_KEYS = (
    *("layout", "rank_policy", "dtype", "block_size", "max_total_tokens", "mem_fraction_static", "context_length"),
    *("max_running_requests", "max_waiting_requests", "max_num_batched_tokens", "chunked_prefill_size", "draft_tokens"),
    *("disable_radix_cache", "order_policy", "eviction_policy", "num_window_tails", "swap_space_tokens", "swap_threshold_tokens"),
    *("engram", "redundant_experts", "draft_redundant_experts", "expert_rebalancing", "tpot_slo"),
)

COST_OPTIONS: tuple[Option, ...] = (
    Option("calibration", str, "", "what calibrate wrote"),
    Option("system", str, "", "a system of the catalogue (not in this release)"),
    Option("step-cost", str, "", "A[,B[,C]]: a step cost that is given instead of fitted, in seconds: A + B x new tokens + C x tokens in "
           "cache, of the rank with most to do; results say that it was given"),
    Option("no-probe", bool, False, "do not scale a calibration by how fast this machine is now; with it the same seed is the same output"),
)  # fmt: skip

TWIN_OPTIONS: tuple[Option, ...] = (
    Option("routing", str, "round-robin", "which replica takes a request", ("--policy",), choices=tuple(ROUTING_POLICIES)),
    Option("acceptance", str, "", "with --draft-tokens: mean accepted drafts a step, without the bonus token; the accepted share of drafts "
           "at each position, such as 0.8,0.6,0.4; or measured:FILE, a server's saved /metrics"),
    Option("expert-balance", str, "balanced", "which experts tokens choose: balanced, zipf:S, or measured:FILE; as of predict"),
    Option("memory-gib", float, None, "GiB of one rank's device, of which --mem-fraction-static holds weights and KV; auto is the engine's "
           "default on a CPU: the weights and 1 GiB of KV", low=1e-3, high=1e6),
    Option("host-gb-per-s", float, None, "GB/s at which preempted requests are swapped (--swap-space-tokens); auto: the cost model's",
           low=1e-3, high=1e6),
    Option("door-ms", float, 0.0, "ms from a client's request to the scheduler: connection, parsing, tokenising", low=0.0, high=1e6),
    Option("reply-ms", float, 0.0, "ms from a token to the client", low=0.0, high=1e6),
    Option("usd-per-gpu-hour", float, None, "price of a GPU; auto: unknown, and usd is null", low=0.0, high=1e6),
    Option("watts-per-gpu", float, None, "power of a GPU; auto: unknown, and joules is null", low=0.0, high=1e6),
    Option("ttft", float, None, "limit of a good request's TTFT in ms", ("--sla-ttft",), low=1e-3, high=1e9),
    Option("tpot", float, None, "limit of its TPOT in ms", ("--sla-tpot",), low=1e-3, high=1e9),
    Option("metrics", str, "exact", "percentiles of every value, or flat: of histograms, memory independent of the requests",
           choices=("exact", "flat")),
    Option("no-fast-forward", bool, False, "step through stretches of steady decode one by one; the results are the same"),
    Option("jobs", int, None, "simulations at a time; auto is one a core, at most as many as points", ("--num-workers",), 1, MAX_JOBS),
    Option("executor", str, "process", "where they run: processes of this machine, or a Ray cluster (RAY_ADDRESS; needs the extra ray)",
           choices=EXECUTORS),
    Option("no-progress", bool, False, "no bar on a terminal", ("--disable-progress",)),
)  # fmt: skip


def _with_help(option: Option) -> Option:
    if option.name not in _LISTS:
        return option
    return dataclasses.replace(option, kind=str, help=_LISTS[option.name])


ENGINE_PART = tuple(_with_help(option) for option in (*ENGINE_OPTIONS, *SERVE_OPTIONS) if option.key in _ENGINE_KEYS)
WORKLOAD_PART = tuple(_with_help(option) for option in WORKLOAD_OPTIONS)
SIMULATE_OPTIONS = (*COST_OPTIONS, *WORKLOAD_PART, *ENGINE_PART, *TWIN_OPTIONS)


class Load(msgspec.Struct, frozen=True):
    """One point of a sweep beside its layout; both None: as the workload file has it."""

    request_rate: float | None
    concurrency: int | None

    @property
    def name(self) -> str:
        if self.request_rate is not None:
            return f"{self.request_rate:g} req/s"
        return "as in the file" if self.concurrency is None else f"concurrency {self.concurrency}"


def deployments(options: Resolved) -> list[Deployment]:
    """The layouts asked for. Raises ConfigError for what cannot be parsed or is not simulated."""
    found = [parse_layout(part) for part in _parts("layout", options["layout"])]
    for deployment in found:
        if deployment.prefill is not None:
            raise ConfigError(f"layout {deployment}: a prefill/decode split is not simulated by this release; simulate its parts apart")
        if deployment.decode.unit.pp > 1:
            raise ConfigError(f"layout {deployment}: pipeline parallelism (pp{deployment.decode.unit.pp}) is not simulated by this release")
    return found


def loads(options: Resolved) -> list[Load]:
    """The rates or the concurrencies asked for; one Load of neither where the workload's file has its own times."""
    by_key = {option.key: option for option in WORKLOAD_OPTIONS}
    values: dict[str, list[Any]] = {}
    for key in ("request_rate", "concurrency"):
        text = options[key]
        parts = [] if text is None else _parts(by_key[key].name, text)
        values[key] = [by_key[key].parse(part, options.origins[key]) for part in parts]
    if values["request_rate"] and values["concurrency"]:
        raise ConfigError("--request-rate and --concurrency are both given; an open loop has a rate, a closed one a concurrency")
    found = [Load(rate, None) for rate in values["request_rate"]] + [Load(None, count) for count in values["concurrency"]]
    return found or [Load(None, None)]


def workload_spec(options: Resolved, load: Load) -> WorkloadSpec:
    values: Mapping[str, Any] = {option.key: options[option.key] for option in WORKLOAD_OPTIONS}
    return WorkloadSpec(**{**values, "request_rate": load.request_rate, "concurrency": load.concurrency})


def slo(options: Resolved, goodput: list[str]) -> Slo | None:
    """Limits of --goodput, --ttft and --tpot together; None without any. Raises ConfigError for a limit that is given twice."""
    limits = parse_slo(goodput) or Slo()
    for key in ("ttft", "tpot"):
        if options[key] is None:
            continue
        if getattr(limits, f"{key}_s") is not None:
            raise ConfigError(f"--{key} and --goodput {key}: are both given; leave one out")
        limits = msgspec.structs.replace(limits, **{f"{key}_s": options[key] / 1e3})
    return None if limits == Slo() else limits


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(text) > MAX_LIST_CHARS or len(parts) > MAX_POINTS or not all(parts):
        raise ConfigError(f"--{name} is {text[:60]!r}; needed: 1 to {MAX_POINTS} values, separated by commas")
    return parts
