"""What a simulation answers."""

from __future__ import annotations

import msgspec

from engine.core.metrics import Distribution, Slo
from engine.core.step_cost import ComponentPrice


class Goodput(msgspec.Struct, frozen=True):
    """Requests that ended by themselves within every limit of ``slo``: a second of ``sim_s``, and as a share of those that arrived."""

    per_s: float | None
    share: float | None
    slo: Slo


class KvPeak(msgspec.Struct, frozen=True):
    """The fullest any rank was: blocks held by requests (cached blocks that can be evicted are free), and tokens of these requests.

    A prefix that several share counts for each of them.
    """

    share: float
    blocks: int
    tokens: int


class StepTime(msgspec.Struct, frozen=True):
    """Summed over all steps: the expectation, the 90 % bounds of the cost model (as if all steps erred alike), and what is behind them.

    ``extrapolated_share``: steps outside what the model was fitted on; ``notes`` are its own, each once, the first few. ``components`` add
    up to busy_s - transfer_s.
    """

    busy_s: float
    low_s: float
    high_s: float
    transfer_s: float
    extrapolated_share: float
    notes: tuple[str, ...]
    components: dict[str, ComponentPrice]


class SimResult(msgspec.Struct, frozen=True):
    """Times as the clients see them: from sending (before the door) to receiving. ``requests`` = finished + rejected + cancelled.

    ``sim_s`` from the first request to the last answer; ``gpu_s`` the GPUs of all replicas over that time; ``usd`` and ``joules`` None
    where the rates are not known. ``exact``: percentiles of every value; else of histogram bins.
    """

    requests: int
    finished: int
    rejected: int
    cancelled: int
    sim_s: float
    wall_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    exact: bool
    output_tokens: int
    output_tokens_per_s: float | None
    goodput: Goodput
    prefix_hit_rate: float | None
    kv_peak: KvPeak
    preemptions: int
    acceptance_length: float | None
    steps: int
    step_time: StepTime
    gpu_s: float
    usd: float | None
    joules: float | None
