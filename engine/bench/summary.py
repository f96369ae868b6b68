"""The headline of a run. Beside what engine.core.metrics defines (ttft_s, itl_s, tpot_s, e2e_s, goodput; the client's points in time are in
engine.bench.record), each figure is defined here. Warm-up requests are in none of them.

duration_s               first request sent - last request ended, errors and cancellations included
requests_per_s           finished requests (with "stop" or "length") / duration_s
goodput                  finished requests that meet every limit / duration_s; None without a limit
goodput_share            the same number / requests that the client did not cancel
output_tokens_per_s      output tokens of all requests / duration_s
peak_output_tokens_per_s the most tokens in one of the equal windows, at most 1 s long, that the duration is cut into, / the window's
                         length; never below output_tokens_per_s, which is their mean (checked)
prompt_tokens_per_s      prompt tokens of the requests that have a first token / duration_s
ttst_s                   second token - first token (aiperf's time to second token)
output_tokens_per_s_per_user   per request 1 / tpot_s
prefill_tokens_per_s_per_user  per request prompt tokens / ttft_s
concurrency              requests sent and not ended: peak, and mean over the duration (the integral / duration_s)
schedule_slip_s          sent - scheduled, open loop only
cached_tokens            prompt tokens the server says it had cached
client_cpu_share         processor seconds of this process / seconds of the run
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from engine.bench.record import RequestRecord
from engine.bench.runner import Run
from engine.core.errors import InvariantError
from engine.core.metrics import Distribution, MetricsLog, Slo, distribution, is_good

MAX_WINDOW_S = 1.0
MAX_WINDOWS = 100_000
MAX_ERROR_EXAMPLES = 5
# Above these the client may be what was measured.
MAX_SLIP_S = 0.010
MAX_CPU_SHARE = 0.85
# A prompt has another length than asked for beyond this many tokens and this share: a chat template's tokens come on top.
MAX_DEVIATION_TOKENS = 64
MAX_DEVIATION_SHARE = 0.05


class Window(msgspec.Struct, frozen=True):
    """One of the equal windows of the duration: its middle, from the first request on."""

    time_s: float
    output_tokens_per_s: float
    concurrency: float


class ServeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """See the module for the formulas. Counts are of measured requests; ``errors`` is by kind (engine.bench.client)."""

    requests: int
    finished: int
    failed: int
    timed_out: int
    cancelled: int
    errors: dict[str, int]
    error_examples: list[str]
    unique_prompts: int
    duration_s: float | None
    requests_per_s: float | None
    goodput: float | None
    goodput_share: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    token_counts_from: dict[str, int]
    output_tokens_per_s: float | None
    peak_output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    ttft_s: Distribution
    ttst_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    output_tokens_per_s_per_user: Distribution
    prefill_tokens_per_s_per_user: Distribution
    prompt_tokens_per_request: Distribution
    output_tokens_per_request: Distribution
    concurrency: dict[str, float | None]
    schedule_slip_s: Distribution
    events: int
    client_cpu_share: float
    warnings: list[str]
    windows: list[Window]


def summarise(run: Run, slo: Slo | None, *, is_capped_open_loop: bool = False) -> ServeSummary:
    """Raises InvariantError where a peak is below its mean: then this module is wrong."""
    records = sorted(run.records, key=lambda record: record.metrics.arrived_s)
    log = MetricsLog()
    for record in records:
        log.requests[record.metrics.request] = record.metrics
    core = log.summary(slo)

    def per_s(count: int) -> float | None:
        return count / core.duration_s if core.duration_s else None

    asked = [record for record in records if not record.cancelled]
    good = sum(is_good(record.metrics, slo) for record in asked) if slo is not None else None
    finished = core.num_finished["stop"] + core.num_finished["length"]
    served = [record.metrics for record in records if record.metrics.reason in ("stop", "length")]
    started = [record.metrics for record in records if record.metrics.first_token_s is not None]
    errors = Counter(record.error for record in records if record.error is not None)
    windows = make_windows(records, core.duration_s)
    peak = max((window.output_tokens_per_s for window in windows), default=None)
    _check_peak("output tokens/s", peak, core.output_tokens_per_s)
    slips = [record.metrics.arrived_s - record.scheduled_s for record in records if record.scheduled_s is not None]
    return ServeSummary(
        requests=len(records),
        finished=finished,
        failed=sum(errors.values()),
        timed_out=errors["timeout"],
        cancelled=len(records) - len(asked),
        errors=dict(sorted((str(kind), number) for kind, number in errors.items())),
        error_examples=_examples(records),
        unique_prompts=len({record.prompt_digest for record in records}),
        duration_s=core.duration_s,
        requests_per_s=per_s(finished),
        goodput=per_s(good) if good is not None else None,
        goodput_share=good / len(asked) if good is not None and asked else None,
        prompt_tokens=sum(record.metrics.num_prompt_tokens for record in records),
        cached_tokens=sum(record.metrics.num_cached_tokens for record in records),
        output_tokens=core.num_output_tokens,
        token_counts_from=dict(sorted(Counter(record.count_source or "none" for record in records).items())),
        output_tokens_per_s=core.output_tokens_per_s,
        peak_output_tokens_per_s=peak,
        prompt_tokens_per_s=per_s(sum(metrics.num_prompt_tokens for metrics in started)),
        ttft_s=core.ttft_s,
        ttst_s=distribution(metrics.itl_s[0] for metrics in started if metrics.itl_s),
        itl_s=core.itl_s,
        tpot_s=core.tpot_s,
        e2e_s=core.e2e_s,
        output_tokens_per_s_per_user=distribution(1 / metrics.tpot_s for metrics in served if metrics.tpot_s),
        prefill_tokens_per_s_per_user=distribution(metrics.num_prompt_tokens / metrics.ttft_s for metrics in started if metrics.ttft_s),
        prompt_tokens_per_request=distribution(float(metrics.num_prompt_tokens) for metrics in served),
        output_tokens_per_request=distribution(float(metrics.num_output_tokens) for metrics in served),
        concurrency={"mean": _mean_concurrency(records, core.duration_s), "peak": float(max(_running(records), default=0))},
        schedule_slip_s=distribution(slips),
        events=sum(record.num_events for record in records),
        client_cpu_share=run.cpu_s / run.wall_s if run.wall_s > 0 else 0.0,
        warnings=_warnings(run, records, errors, slips, is_capped_open_loop),
        windows=windows,
    )


def _examples(records: Sequence[RequestRecord]) -> list[str]:
    """One message of each kind, a few kinds."""
    seen: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            seen.setdefault(record.error, f"{record.error}: {record.message[:300]}")
    return list(seen.values())[:MAX_ERROR_EXAMPLES]


def _check_peak(what: str, peak: float | None, mean: float | None) -> None:
    if peak is not None and mean is not None and peak < mean * (1 - 1e-9):
        raise InvariantError(f"the peak of {what} is {peak}, below the mean {mean}")


def token_times_s(record: RequestRecord) -> Iterator[float]:
    """The time of every output token, from the first token and the gaps."""
    metrics = record.metrics
    if metrics.first_token_s is None:
        return
    now_s = metrics.first_token_s
    yield now_s
    for gap_s in metrics.itl_s:
        now_s += gap_s
        yield now_s


def make_windows(records: Sequence[RequestRecord], duration_s: float | None) -> list[Window]:
    """Equal windows that cover the duration exactly, so that their mean is the run's."""
    if not duration_s:
        return []
    start_s = min(record.metrics.arrived_s for record in records)
    count = min(max(1, math.ceil(duration_s / MAX_WINDOW_S)), MAX_WINDOWS)
    width_s = duration_s / count
    tokens, busy_s = [0] * count, [0.0] * count

    def place(time_s: float) -> int:
        return min(max(int((time_s - start_s) / width_s), 0), count - 1)

    for record in records:
        for time_s in token_times_s(record):
            tokens[place(time_s)] += 1
        begin_s, end_s = record.metrics.arrived_s, record.metrics.finished_s or record.metrics.arrived_s
        for index in range(place(begin_s), place(end_s) + 1):
            low_s = start_s + index * width_s
            busy_s[index] += max(0.0, min(end_s, low_s + width_s) - max(begin_s, low_s))
    return [Window((index + 0.5) * width_s, tokens[index] / width_s, busy_s[index] / width_s) for index in range(count)]


def _running(records: Sequence[RequestRecord]) -> Iterator[int]:
    """The number of running requests after every change; one that ends when another starts makes room first."""
    changes = [(record.metrics.arrived_s, 1) for record in records]
    changes += [(record.metrics.finished_s, -1) for record in records if record.metrics.finished_s is not None]
    running = 0
    for _, change in sorted(changes):
        running += change
        yield running


def _mean_concurrency(records: Sequence[RequestRecord], duration_s: float | None) -> float | None:
    return math.fsum(record.metrics.e2e_s or 0.0 for record in records) / duration_s if duration_s else None


def _warnings(
    run: Run, records: Sequence[RequestRecord], errors: Counter[str], slips: Sequence[float], is_capped_open_loop: bool
) -> list[str]:
    found: list[str] = []
    if errors:
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(errors.items()))
        found.append(f"{sum(errors.values())} of {len(records)} requests failed ({kinds}): the figures are of what was left")
    slip_s = distribution(slips).p99
    if slip_s is not None and slip_s > MAX_SLIP_S:
        why = "the cap on the concurrency held requests back" if is_capped_open_loop else "the client could not keep its schedule"
        found.append(f"requests were sent up to {max(slips):.3f} s late (p99 {slip_s:.3f} s): {why}, so this is no open loop")
    if run.wall_s > 0 and run.cpu_s / run.wall_s > MAX_CPU_SHARE:
        found.append(f"the client used {run.cpu_s / run.wall_s:.0%} of a processor: latencies may be its own")
    uncounted = sum(record.count_source == "events" for record in records)
    if uncounted:
        found.append(f"{uncounted} answers came without usage: their tokens are counted as one an event")
    off = sum(_is_off(record) for record in records)
    if off:
        found.append(f"{off} prompts had another length than asked for; prompt_tokens_per_request has the server's counts")
    short = sum(
        record.metrics.reason == "stop" and record.metrics.num_output_tokens < (record.asked_output_tokens or 0) for record in records
    )
    if short:
        found.append(f"{short} answers ended before the asked number of output tokens; --ignore-eos goes on to it")
    return found


def _is_off(record: RequestRecord) -> bool:
    asked, got = record.asked_input_tokens, record.metrics.num_prompt_tokens
    return asked is not None and got > 0 and abs(got - asked) > MAX_DEVIATION_TOKENS + MAX_DEVIATION_SHARE * asked
