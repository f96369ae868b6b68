"""The shared metrics once more under the names that other engines' dashboards and tools scrape: same values, from the same table.

Labels are the few that those dashboards select by: the served name, and for one of the two the number of the engine (here the
data-parallel rank; 0 where a value belongs to all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.api.metrics_families import BY_NAME, DEVICE_TIER, Family, Labels, Value, kv_tokens, kv_used_share

if TYPE_CHECKING:
    from engine.api.metrics import Compat, Reading

_Samples = Iterable[tuple[Labels, Value]]


def _model(reading: Reading) -> str:
    return reading.info.served_names[0] if reading.info is not None else ""


def _vllm(name: str, ours: str) -> Family:
    """One of our metrics without labels, as vLLM's."""
    family = BY_NAME[ours]

    def read(reading: Reading) -> _Samples:
        return [((_model(reading), "0"), value) for _, value in family.read(reading)]

    return Family(family.kind, f"vllm:{name}", family.help, ("model_name", "engine"), read)


def _vllm_keyed(name: str, ours: str, label: str, keys: Callable[[str], bool]) -> Family:
    """One of our metrics with one label, which keeps its values for which ``keys`` holds."""
    family = BY_NAME[ours]

    def read(reading: Reading) -> _Samples:
        return [((_model(reading), "0", key), value) for (key,), value in family.read(reading) if keys(key)]

    return Family(family.kind, f"vllm:{name}", family.help, ("model_name", "engine", label), read)


def _vllm_ranks(name: str, ours: str) -> Family:
    family = BY_NAME[ours]

    def read(reading: Reading) -> _Samples:
        return [((_model(reading), rank), value) for (rank,), value in family.read(reading)]

    return Family(family.kind, f"vllm:{name}", family.help, ("model_name", "engine"), read)


def _vllm_kv_usage(reading: Reading) -> _Samples:
    if reading.stats is None:
        return []
    ranks = [kv_tokens(rank, reading.stats.core.block_size) for rank in reading.stats.core.ranks]
    return [((_model(reading), str(number)), rank.used / max(1, rank.capacity)) for number, rank in enumerate(ranks)]


def _vllm_preemptions(reading: Reading) -> _Samples:
    return [((_model(reading), "0"), sum(reading.metrics.preemptions.values()))]


def _vllm_cache_config(reading: Reading) -> _Samples:
    if reading.stats is None:
        return []
    core = reading.stats.core
    return [((str(number), str(core.block_size), str(rank.total_blocks)), 1.0) for number, rank in enumerate(core.ranks)]


_VLLM = (
    _vllm_ranks("num_requests_running", "num_requests_running"),
    _vllm("num_requests_waiting", "num_requests_waiting"),
    Family("gauge", "vllm:kv_cache_usage_perc", "Share of the KV cache held by requests, 0 to 1", ("model_name", "engine"), _vllm_kv_usage),
    Family("gauge", "vllm:cache_config_info", "The KV cache; the value is 1", ("engine", "block_size", "num_gpu_blocks"),
           _vllm_cache_config),
    _vllm("prefix_cache_queries", "prefix_cache_queries"),
    _vllm("prefix_cache_hits", "prefix_cache_hits"),
    _vllm("prompt_tokens", "prompt_tokens"),
    _vllm("generation_tokens", "generation_tokens"),
    _vllm("iteration_tokens_total", "iteration_tokens_total"),
    _vllm("request_prompt_tokens", "request_prompt_tokens"),
    _vllm("request_generation_tokens", "request_generation_tokens"),
    _vllm("time_to_first_token_seconds", "time_to_first_token_seconds"),
    _vllm("inter_token_latency_seconds", "inter_token_latency_seconds"),
    _vllm("time_per_output_token_seconds", "inter_token_latency_seconds"),  # the older name of the same gaps
    _vllm("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    _vllm("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    _vllm("request_queue_time_seconds", "request_queue_time_seconds"),
    _vllm("request_prefill_time_seconds", "request_prefill_time_seconds"),
    _vllm("request_decode_time_seconds", "request_decode_time_seconds"),
    Family("counter", "vllm:num_preemptions", BY_NAME["num_preemptions"].help, ("model_name", "engine"), _vllm_preemptions),
    _vllm_keyed("request_success", "requests", "finished_reason", lambda reason: reason in ("stop", "length", "abort")),
    _vllm("spec_decode_num_draft_tokens", "spec_decode_num_draft_tokens"),
    _vllm("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens"),
    _vllm_keyed("spec_decode_num_accepted_tokens_per_pos", "spec_decode_accepted_tokens_per_position", "position", lambda _: True),
)  # fmt: skip


def _sglang(name: str, ours: str) -> Family:
    """One of our metrics as SGLang's: the sum over its labels where it has some."""
    family = BY_NAME[ours]

    def read(reading: Reading) -> _Samples:
        values = [value for _, value in family.read(reading)]
        if family.kind in ("histogram", "summary"):
            return [((_model(reading),), value) for value in values]
        return [((_model(reading),), sum(value for value in values if isinstance(value, (int, float))))] if values else []

    return Family(family.kind, f"sglang:{name}", family.help, ("model_name",), read)


def _sglang_usage(reading: Reading) -> _Samples:
    return [((_model(reading),), kv_used_share(reading))] if reading.stats is not None else []


def _sglang_cached(reading: Reading) -> _Samples:
    return [((_model(reading), DEVICE_TIER), reading.metrics.counters.prefix_hit_tokens)]


def _sglang_requests(reading: Reading) -> _Samples:
    finished = reading.metrics.finished
    return [((_model(reading),), sum(finished.values()) - finished["rejected"])]


def _sglang_aborted(reading: Reading) -> _Samples:
    return [((_model(reading),), reading.metrics.finished["abort"])]


def _sglang_accept_length(reading: Reading) -> _Samples:
    length = reading.metrics.drafts.acceptance_length
    return [((_model(reading),), length)] if length is not None else []


def _sglang_stages(reading: Reading) -> _Samples:
    times = reading.metrics.histograms
    stages = (("queue", times.queue_s), ("prefill", times.prefill_s), ("decode", times.decode_s))
    return [((_model(reading), stage), histogram) for stage, histogram in stages]


_SGLANG = (
    _sglang("num_running_reqs", "num_requests_running"),
    _sglang("num_queue_reqs", "num_requests_waiting"),
    Family("gauge", "sglang:token_usage", "Share of the KV cache held by requests, 0 to 1", ("model_name",), _sglang_usage),
    _sglang("kv_used_tokens", "kv_used_tokens"),
    _sglang("kv_available_tokens", "kv_free_tokens"),
    _sglang("kv_evictable_tokens", "kv_evictable_tokens"),
    Family("counter", "sglang:cached_tokens", BY_NAME["prefix_cache_hits"].help, ("model_name", "cache_source"), _sglang_cached),
    _sglang("prompt_tokens", "prompt_tokens"),
    _sglang("generation_tokens", "generation_tokens"),
    _sglang("time_to_first_token_seconds", "time_to_first_token_seconds"),
    _sglang("inter_token_latency_seconds", "inter_token_latency_seconds"),
    _sglang("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    _sglang("queue_time_seconds", "request_queue_time_seconds"),
    Family("histogram", "sglang:per_stage_req_latency_seconds", "Times of a request's stages", ("model_name", "stage"), _sglang_stages),
    _sglang("num_retracted_reqs", "num_requests_preempted"),
    _sglang("num_retracted_requests", "num_preemptions"),
    _sglang("grammar_compilation_time_seconds", "grammar_compilation_time_seconds"),
    _sglang("num_grammar_timeout", "num_grammar_timeout"),
    Family("counter", "sglang:num_requests", "Requests that ended", ("model_name",), _sglang_requests),
    Family("counter", "sglang:num_aborted_requests", "Requests whose client left", ("model_name",), _sglang_aborted),
    Family("gauge", "sglang:spec_accept_length", "Tokens per verification, since the start", ("model_name",), _sglang_accept_length),
)  # fmt: skip

COMPAT_FAMILIES: MappingProxyType[Compat, tuple[Family, ...]] = MappingProxyType({"none": (), "vllm": _VLLM, "sglang": _SGLANG})
