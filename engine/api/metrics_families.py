"""Every metric that /metrics shows: name, meaning, labels and where its value comes from. A table; the values are read, not kept.

Counters and histograms count from the end of the warm-up. Gauges and counters of KV memory carry the data-parallel rank; what a ratio
is made of carries the same labels on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Union

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from engine.api.histogram import Histogram
from engine.core.scheduler_state import RankStats
from engine.core.shadow import WHOLE_STEP

if TYPE_CHECKING:
    from engine.actors.grammar_check import GrammarCheck
    from engine.api.metrics import Counters, Histograms, Reading
    from engine.core.metrics import DraftCounts
    from engine.core.shadow import ShadowState

PREFIX = "twinfer_"
DEVICE_TIER = "device"  # host blocks hold what running requests were swapped to; a prefix is not looked for there

Labels = tuple[str, ...]
Sample = tuple[Labels, float]
Value = Union[float, Histogram, "Total"]


class Total(NamedTuple):
    """A distribution of which only these two are known."""

    number: int
    sum: float


class Family(NamedTuple):
    """One metric. A counter's name is without ``_total``, which the exposition adds. ``read`` gives a number (a Histogram or a Total for
    those kinds) per combination of label values.
    """

    kind: Literal["counter", "gauge", "histogram", "summary"]
    name: str
    help: str
    label_names: Labels
    read: Callable[[Reading], Iterable[tuple[Labels, Value]]]


class FamilyCollector(Collector):
    """Renders a table of families from one reading."""

    def __init__(self, read: Callable[[], Reading], families: Sequence[Family]) -> None:
        self._read = read
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        for family in self._families:
            yield render(family, reading)


def render(family: Family, reading: Reading) -> Metric:
    samples = list(family.read(reading))
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(family.name, family.help, labels=family.label_names)
        for labels, value in samples:
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, buckets=value.buckets(), sum_value=value.sum)
        return histograms
    if family.kind == "summary":
        summaries = SummaryMetricFamily(family.name, family.help, labels=family.label_names)
        for labels, value in samples:
            assert isinstance(value, Total)
            summaries.add_metric(labels, count_value=value.number, sum_value=value.sum)
        return summaries
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    numbers = make(family.name, family.help, labels=family.label_names)
    for labels, value in samples:
        assert isinstance(value, (int, float))
        numbers.add_metric(labels, float(value))
    return numbers


# -- readers ------------------------------------------------------------------------------------------------------------------


class KvTokens(NamedTuple):
    """A rank's cache in tokens; used + evictable + free = capacity."""

    used: int
    evictable: int
    free: int
    capacity: int


def kv_tokens(rank: RankStats, block_size: int) -> KvTokens:
    used = rank.total_blocks - rank.free_blocks - rank.cached_only_blocks
    return KvTokens(*(blocks * block_size for blocks in (used, rank.cached_only_blocks, rank.free_blocks, rank.total_blocks)))


def kv_used_share(reading: Reading) -> float:
    """Of all ranks together, 0 to 1; 0 where nothing is known."""
    if reading.stats is None:
        return 0.0
    ranks = [kv_tokens(rank, reading.stats.core.block_size) for rank in reading.stats.core.ranks]
    return sum(rank.used for rank in ranks) / max(1, sum(rank.capacity for rank in ranks))


def _counter(read: Callable[[Counters], float]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: [((), read(reading.metrics.counters))]


def prefix_query_tokens(reading: Reading) -> int:
    """Prompt tokens looked for in the prefix cache: all of them, or none."""
    return reading.metrics.counters.prompt_tokens if reading.info is not None and reading.info.prefix_caching else 0


def _histogram(read: Callable[[Histograms], Histogram]) -> Callable[[Reading], Iterable[tuple[Labels, Histogram]]]:
    return lambda reading: [((), read(reading.metrics.histograms))]


def _by_rank(read: Callable[[RankStats, int], float]) -> Callable[[Reading], Iterable[Sample]]:
    def samples(reading: Reading) -> Iterable[Sample]:
        core = reading.stats.core if reading.stats is not None else None
        return [((str(rank),), read(stats, core.block_size)) for rank, stats in enumerate(core.ranks)] if core is not None else []

    return samples


def _running(reading: Reading) -> Iterable[Sample]:
    return _by_rank(lambda rank, _: rank.num_running)(reading)


def _waiting(reading: Reading) -> Iterable[Sample]:
    return [((), reading.stats.core.num_waiting)] if reading.stats is not None else []


def _swapped(reading: Reading) -> Iterable[Sample]:
    return [((), reading.stats.core.num_swapped)] if reading.stats is not None else []


def _granularity(reading: Reading) -> Iterable[Sample]:
    return [((), reading.info.block_size)] if reading.info is not None else []


def _moved_blocks(reading: Reading) -> Iterable[Sample]:
    if reading.stats is None:
        return []
    cache = reading.stats.cache
    return [(("copy",), cache.copied_blocks), (("swap_out",), cache.swapped_out_blocks), (("swap_in",), cache.swapped_in_blocks)]


def _moved_bytes(reading: Reading) -> Iterable[Sample]:
    return [((), reading.stats.cache.moved_bytes)] if reading.stats is not None else []


def _ready(reading: Reading) -> Iterable[Sample]:
    return [((), float(reading.stats is not None and reading.stats.health.ok))]


def _build_info(reading: Reading) -> Iterable[Sample]:
    info = reading.info
    return [((info.version, info.model, info.layout, info.dtype, info.device), 1.0)] if info is not None else []


def _keyed(values: Callable[[Reading], dict[str, int] | dict[str, float]]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: [((key,), value) for key, value in values(reading).items()]


def _drafts(read: Callable[[DraftCounts], int]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: [((), read(reading.metrics.drafts))]


def _positions(read: Callable[[DraftCounts], list[int]]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: [((str(position),), value) for position, value in enumerate(read(reading.metrics.drafts))]


def _grammar_times(reading: Reading) -> Iterable[tuple[Labels, Total]]:
    grammars = reading.grammars
    return [((), Total(grammars.num_compilations, grammars.compile_s))] if grammars is not None else []


def _grammar_counter(read: Callable[[GrammarCheck], int]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: [((), read(reading.grammars))] if reading.grammars is not None else []


def _http_requests(reading: Reading) -> Iterable[Sample]:
    return [((route, str(status)), count) for (route, status), count in sorted(reading.metrics.http_requests.items())]


def _expert_tokens(reading: Reading) -> Iterable[Sample]:
    layers = enumerate(reading.metrics.ranks.expert_choices)
    return [((str(layer), str(expert)), count) for layer, counts in layers for expert, count in enumerate(counts)]


def _sent_bytes(reading: Reading) -> Iterable[Sample]:
    return [((kind,), num_bytes) for kind, num_bytes, _ in reading.metrics.ranks.traffic]


def _collectives(reading: Reading) -> Iterable[Sample]:
    return [((kind,), calls) for kind, _, calls in reading.metrics.ranks.traffic]


def _engram_fetches(reading: Reading) -> Iterable[Sample]:
    ranks = reading.metrics.ranks
    return [(("ready",), ranks.engram_hits), (("waited",), ranks.engram_misses)]


def _shadow(read: Callable[[ShadowState], Iterable[Sample]]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: read(reading.shadow) if reading.shadow is not None else []


def _compared(state: ShadowState) -> Iterable[Sample]:
    outside = state.num_below + state.num_above
    return [(("below",), state.num_below), (("within",), state.num_compared - outside), (("above",), state.num_above)]


def _drift_ratios(state: ShadowState) -> Iterable[Sample]:
    ratios = [] if state.drift_ratio is None else [((WHOLE_STEP,), state.drift_ratio)]
    return [*ratios, *(((name,), ratio) for name, ratio in state.component_ratios.items())]


def _drift_alarm(state: ShadowState) -> Iterable[Sample]:
    return [((state.alarm or WHOLE_STEP,), float(state.alarm is not None))]


# -- the table ----------------------------------------------------------------------------------------------------------------

_TABLE: tuple[Family, ...] = (
    Family("gauge", "build_info", "What runs; the value is 1", ("version", "model", "layout", "dtype", "device"), _build_info),
    Family("gauge", "engine_ready", "1 while requests are taken", (), _ready),
    Family("gauge", "num_requests_running", "Samples that hold a slot", ("dp_rank",), _running),
    Family("gauge", "num_requests_waiting", "Samples that hold nothing on a device: queued, preempted or swapped out", (), _waiting),
    Family("gauge", "num_requests_swapped", "Of the waiting, those whose KV is on the host", (), _swapped),
    Family("gauge", "num_requests_preempted", "Of the waiting, those that lost their slot", (),
           lambda reading: [((), len(reading.metrics.preempted))]),
    Family("gauge", "kv_used_tokens", "KV held by requests; used + evictable + free = capacity", ("dp_rank",),
           _by_rank(lambda rank, block: kv_tokens(rank, block).used)),
    Family("gauge", "kv_evictable_tokens", "KV kept for prefix hits only", ("dp_rank",),
           _by_rank(lambda rank, block: kv_tokens(rank, block).evictable)),
    Family("gauge", "kv_free_tokens", "KV that holds nothing", ("dp_rank",), _by_rank(lambda rank, block: kv_tokens(rank, block).free)),
    Family("gauge", "kv_capacity_tokens", "KV in all", ("dp_rank",), _by_rank(lambda rank, block: kv_tokens(rank, block).capacity)),
    Family("gauge", "kv_host_used_tokens", "KV of swapped requests on the host", ("dp_rank",),
           _by_rank(lambda rank, block: (rank.total_host_blocks - rank.free_host_blocks) * block)),
    Family("gauge", "kv_host_capacity_tokens", "KV that fits the host pool", ("dp_rank",),
           _by_rank(lambda rank, block: rank.total_host_blocks * block)),
    Family("counter", "kv_moved_blocks", "Blocks copied for forks and swapped, since the workers started", ("kind",), _moved_blocks),
    Family("counter", "kv_moved_bytes", "Bytes of those moves", (), _moved_bytes),
    Family("counter", "prefix_cache_queries", "Prompt tokens looked for in the prefix cache", ("tier",),
           lambda reading: [((DEVICE_TIER,), prefix_query_tokens(reading))]),
    Family("counter", "prefix_cache_hits", "Prompt tokens found there", ("tier",),
           lambda reading: [((DEVICE_TIER,), reading.metrics.counters.prefix_hit_tokens)]),
    Family("gauge", "prefix_cache_granularity_tokens", "A hit is a multiple of this: shorter shared prefixes cannot hit", (), _granularity),
    Family("counter", "prompt_tokens", "Prompt tokens of admitted requests, once per request, cached ones included", (),
           _counter(lambda counters: counters.prompt_tokens)),
    Family("counter", "prefill_tokens", "Tokens computed before a sample's first token", (),
           _counter(lambda counters: counters.prefill_tokens)),
    Family("counter", "recomputed_tokens", "Tokens computed once more after a preemption", (),
           _counter(lambda counters: counters.recomputed_tokens)),
    Family("counter", "generation_tokens", "Tokens emitted", (), _counter(lambda counters: counters.generation_tokens)),
    Family("histogram", "iteration_tokens_total", "Tokens computed in a step", (), _histogram(lambda times: times.iteration_tokens)),
    Family("histogram", "request_prompt_tokens", "Prompt tokens of a request", (), _histogram(lambda times: times.prompt_tokens)),
    Family("histogram", "request_generation_tokens", "Tokens of a sample that ended by itself", (),
           _histogram(lambda times: times.generation_tokens)),
    Family("histogram", "time_to_first_token_seconds", "Arrival to first token, of every sample that has one", (),
           _histogram(lambda times: times.ttft_s)),
    Family("histogram", "inter_token_latency_seconds", "Gap before each token but the first; 0 between tokens of one step", (),
           _histogram(lambda times: times.itl_s)),
    Family("histogram", "time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1) of samples that ended by themselves", (),
           _histogram(lambda times: times.tpot_s)),
    Family("histogram", "e2e_request_latency_seconds", "Arrival to end, of samples that ended by themselves", (),
           _histogram(lambda times: times.e2e_s)),
    Family("histogram", "request_queue_time_seconds", "Arrival to first start on a rank", (), _histogram(lambda times: times.queue_s)),
    Family("histogram", "request_prefill_time_seconds", "First start to first token", (), _histogram(lambda times: times.prefill_s)),
    Family("histogram", "request_decode_time_seconds", "First token to end, of samples that ended by themselves", (),
           _histogram(lambda times: times.decode_s)),
    Family("counter", "requests_started", "Samples accepted into the queue", (), _counter(lambda counters: counters.started)),
    Family("counter", "requests", "Samples that ended, and requests refused at the queue", ("finish_reason",),
           _keyed(lambda reading: reading.metrics.finished)),
    Family("counter", "num_preemptions", "Samples that lost their slot for another's sake", ("kind",),
           _keyed(lambda reading: reading.metrics.preemptions)),
    Family("counter", "spec_decode_num_draft_tokens", "Drafts verified", (), _drafts(lambda drafts: drafts.num_draft_tokens)),
    Family("counter", "spec_decode_num_accepted_tokens", "Drafts accepted", (), _drafts(lambda drafts: drafts.num_accepted_tokens)),
    Family("counter", "spec_decode_num_verified_items", "Verifications; tokens per verification = 1 + accepted / this", (),
           _drafts(lambda drafts: drafts.num_verified_items)),
    Family("counter", "spec_decode_draft_tokens_per_position", "Drafts verified by place after the last token", ("position",),
           _positions(lambda drafts: drafts.drafts_by_position)),
    Family("counter", "spec_decode_accepted_tokens_per_position", "Drafts accepted by place after the last token", ("position",),
           _positions(lambda drafts: drafts.accepted_by_position)),
    Family("counter", "steps", "Steps committed", (), _counter(lambda counters: counters.steps)),
    Family("histogram", "step_seconds", "Commit to commit; from the plan on where the engine was idle", (),
           _histogram(lambda times: times.step_s)),
    Family("histogram", "step_forward_seconds", "The slowest worker's own time of a step", (), _histogram(lambda times: times.forward_s)),
    Family("counter", "step_component_seconds", "Parts of step_forward_seconds, where the workers are asked to time them", ("component",),
           _keyed(lambda reading: reading.metrics.component_s)),
    Family("histogram", "step_predicted_seconds", "step_seconds as the calibration has it, said before the step's result is known", (),
           _histogram(lambda times: times.predicted_s)),
    Family("histogram", "step_residual_ratio", "Measured / predicted seconds of a step; 1 is as predicted", (),
           _histogram(lambda times: times.residual_ratio)),
    Family("counter", "steps_compared", "Steps by where they lay to the 90 % interval of their prediction", ("interval",),
           _shadow(_compared)),
    Family("gauge", "step_drift_ratio", "Measured / predicted of late: of whole steps, and of components on steps that time them",
           ("component",), _shadow(_drift_ratios)),
    Family("gauge", "step_drift_alarm", "1 while steps lastingly take another time than predicted; the component that moved most",
           ("component",), _shadow(_drift_alarm)),
    Family("gauge", "step_prediction_correction", "What predictions are multiplied by; 1 without --calibration-correction", (),
           _shadow(lambda state: [((), state.correction)])),
    Family("counter", "expert_tokens", "How often each expert was chosen; reported every --report-steps, where experts are spread",
           ("layer", "expert"), _expert_tokens),
    Family("counter", "expert_rebalances", "Times that experts were moved between ranks", (),
           lambda reading: [((), reading.num_rebalances)]),
    Family("counter", "collective_sent_bytes", "Bytes that ranks sent each other; reported as above", ("kind",), _sent_bytes),
    Family("counter", "collectives", "Collectives that ranks took part in; reported as above", ("kind",), _collectives),
    Family("counter", "engram_fetches", "Fetches of Engram rows: ready when the layer asked, or waited for; reported as above",
           ("outcome",), _engram_fetches),
    Family("counter", "engram_wait_seconds", "Time that layers waited for them, over all ranks", (),
           lambda reading: [((), reading.metrics.ranks.engram_wait_s)]),
    Family("gauge", "actor_mailbox_depth", "Messages not read yet", ("actor",), _keyed(lambda reading: reading.mailbox_depths)),
    Family("gauge", "actor_heartbeat_age_seconds", "Since the last sign of life", ("actor",),
           _keyed(lambda reading: reading.heartbeat_ages_s)),
    Family("summary", "grammar_compilation_time_seconds", "Compilations of grammars at the door, failed ones included", (),
           _grammar_times),
    Family("counter", "num_grammar_failures", "Of them, grammars that cannot be used", (),
           _grammar_counter(lambda grammars: grammars.num_failures)),
    Family("counter", "num_grammar_timeout", "Of them, given up at the deadline", (),
           _grammar_counter(lambda grammars: grammars.num_timeouts)),
    Family("counter", "invariant_violations", "Readings at which a conservation law of the engine was broken", (),
           _counter(lambda counters: counters.invariant_violations)),
    Family("counter", "http_requests", "Answers by route and status; 499 where the client left", ("route", "status"), _http_requests),
    Family("gauge", "http_open_streams", "Event streams under way", (), lambda reading: [((), reading.metrics.open_streams)]),
)  # fmt: skip

FAMILIES = tuple(family._replace(name=PREFIX + family.name) for family in _TABLE)
BY_NAME = {family.name.removeprefix(PREFIX): family for family in FAMILIES}
