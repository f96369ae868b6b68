"""A workload from options: what ``simulate`` takes, each value defined and bounded once."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

from engine.core.errors import ConfigError
from engine.options import Option
from twin.workload.arrivals import Bursts, Profile, Ramp, Steady, arrival_times_s
from twin.workload.contents import Contents, Context, Drawn, Leaving, Recorded
from twin.workload.draws import Draws, TokenIds
from twin.workload.files import Clients, LengthTable, read_workload_file
from twin.workload.lengths import Empirical, Independent, LengthPairs, parse_lengths
from twin.workload.loops import ClosedLoop, OpenLoop, ThinkTime
from twin.workload.mix import ClientMix
from twin.workload.recording import Recording
from twin.workload.types import Workload

MAX_REQUESTS = 10_000_000
MAX_SECONDS = 1e7
MAX_TOKENS = 1 << 24
DEFAULT_REQUESTS = 1000
# In the vocabulary of every packaged model, and not among its special tokens.
TOKEN_IDS = (100, 3000)

_LENGTHS = "N, LOW:HIGH (every length alike) or lognormal:MEAN:CV"
WORKLOAD_OPTIONS: tuple[Option, ...] = (
    Option("workload", str, "", "file of requests: Mooncake JSON Lines, Azure CSV, an event log, a CSV of lengths, or clients (rates and "
           "distributions, JSON Lines); what it is is seen from its content"),
    Option("isl", str, "512", f"tokens of a prompt: {_LENGTHS}", ("--input-tokens", "--random-input-len")),
    Option("osl", str, "128", f"tokens of an answer: {_LENGTHS}", ("--output-tokens", "--random-output-len")),
    Option("range-ratio", float, 1.0, "lengths given as N are drawn from RATIO * N to N, every one alike", ("--random-range-ratio",),
           low=0.0, high=1.0),
    Option("request-rate", float, None, "open loop: requests/s on average, or inf for all at once; replaces a file's times",
           low=1e-6, high=math.inf),
    Option("concurrency", int, None, "closed loop: clients who each wait for their answer", ("--max-concurrency",), low=1, high=1 << 20),
    Option("requests", int, None, f"requests, all turns counted; auto is {DEFAULT_REQUESTS}, of a file all",
           ("--num-requests", "--num-prompts"), low=1, high=MAX_REQUESTS),
    Option("seed", int, 0, "seed of arrivals, lengths, texts, thinking and leaving", low=0, high=2**63 - 1),
    Option("arrival", str, "poisson", "gaps of the open loop: poisson (CV 1), gamma (with --cv), constant, or burst: Poisson, on and off",
           choices=("poisson", "gamma", "constant", "burst")),
    Option("cv", float, None, "coefficient of variation of gamma gaps: 1 is Poisson, more is burstier", low=0.01, high=100.0),
    Option("burst-period", float, 10.0, "seconds from the beginning of one burst to the next", low=1e-3, high=MAX_SECONDS),
    Option("burst-share", float, 0.5, "part of the period that is burst; the rate of the whole stays --request-rate", low=1e-3, high=1.0),
    Option("ramp-to", float, None, "open loop: the rate goes in a straight line from --request-rate to this over --ramp-time, and stays",
           low=1e-6, high=1e6),
    Option("ramp-time", float, 60.0, "seconds of the ramp to --ramp-to", low=1e-3, high=MAX_SECONDS),
    Option("ramp-up", float, 0.0, "closed loop: seconds over which the clients begin one after the other", low=0.0, high=MAX_SECONDS),
    Option("prefix", int, 0, "tokens of a system prompt in front of prompts, the same in all that have it", ("--random-prefix-len",),
           low=0, high=MAX_TOKENS),
    Option("prefix-share", float, 1.0, "part of the sessions that begin with a system prompt", low=0.0, high=1.0),
    Option("num-prefixes", int, 1, "different system prompts, each as frequent", low=1, high=1 << 16),
    Option("turns", int, 1, "requests of a session; each repeats what was said and adds to it. A request rate counts all of them",
           low=1, high=1000),
    Option("turn-isl", str, "", f"tokens that a user adds from the second turn on: {_LENGTHS}; none is --isl"),
    Option("think-time", float, 0.0, "mean seconds from an answer to the same client's next request, exponentially distributed",
           low=0.0, high=MAX_SECONDS),
    Option("cancel-share", float, 0.0, "part of the requests (of sessions: of their last turns) whose client leaves", low=0.0, high=1.0),
    Option("cancel-after", float, 1.0, "mean seconds until it leaves", low=0.0, high=MAX_SECONDS),
    Option("cancel-delay", str, "exponential", "distribution of --cancel-after; uniform is from 0 to twice the mean",
           choices=("exponential", "uniform")),
    Option("max-tokens", int, None, "tokens clients ask for at most; longer answers end there. Auto asks for each answer's own length",
           low=1, high=MAX_TOKENS),
    Option("time-scale", float, 1.0, "times a file's times: 0.5 replays twice as fast", low=1e-6, high=1e6),
    Option("max-context", int, None, "longest sequence, prompt and answer together", low=2, high=1 << 30),
    Option("over-context", str, "refuse", "what --max-context does with a longer one; clip cuts the prompt's end, then the answer",
           choices=("refuse", "clip")),
)  # fmt: skip
_OF_DRAWN = ("isl", "osl", "range_ratio", "prefix", "prefix_share", "num_prefixes", "turns", "turn_isl")


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The values of WORKLOAD_OPTIONS by key, and the ids that tokens may have (from, up to and not including)."""

    workload: str = ""
    isl: str = "512"
    osl: str = "128"
    range_ratio: float = 1.0
    request_rate: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    seed: int = 0
    arrival: str = "poisson"
    cv: float | None = None
    burst_period: float = 10.0
    burst_share: float = 0.5
    ramp_to: float | None = None
    ramp_time: float = 60.0
    ramp_up: float = 0.0
    prefix: int = 0
    prefix_share: float = 1.0
    num_prefixes: int = 1
    turns: int = 1
    turn_isl: str = ""
    think_time: float = 0.0
    cancel_share: float = 0.0
    cancel_after: float = 1.0
    cancel_delay: str = "exponential"
    max_tokens: int | None = None
    time_scale: float = 1.0
    max_context: int | None = None
    over_context: str = "refuse"
    token_ids: tuple[int, int] = TOKEN_IDS


def make_workload(spec: WorkloadSpec) -> Workload:
    """Raises ConfigError for a value out of its bounds, for options that contradict each other, and for a file that is not what it should
    be: all before the first request is made. The same spec (and file) is the same workload, byte for byte."""
    _check(spec)
    if not spec.workload:
        return _with_loop(spec, _drawn(spec, _lengths(spec)))
    content = read_workload_file(spec.workload, spec.requests)
    if isinstance(content, LengthTable):
        _refuse_changed(spec, ("isl", "osl", "range_ratio", "time_scale"), _in_file(spec, "lengths"))
        return _with_loop(spec, _drawn(spec, Empirical(content.inputs, content.outputs)))
    _refuse_changed(spec, _OF_DRAWN, _in_file(spec, "requests of its own"))
    if isinstance(content, Clients):
        return _mix(spec, content)
    contents = Recorded(
        spec.seed,
        content,
        TokenIds(*spec.token_ids),
        max_tokens=spec.max_tokens,
        context=_context(spec),
        leaving=_leaving(spec),
    )
    if spec.request_rate is None and spec.concurrency is None:
        _refuse_changed(spec, ("arrival",), _in_file(spec, "times"))
        return OpenLoop(contents, functools.partial(_recorded_times_s, content, spec.time_scale), _think(spec))
    if spec.request_rate != math.inf:  # all at once is what a load is compared with, its other options as they are
        _refuse_changed(spec, ("time_scale",), "with --request-rate or --concurrency, which replace the file's times")
    return _with_loop(spec, contents)


def _check(spec: WorkloadSpec) -> None:
    for option in WORKLOAD_OPTIONS:
        value = getattr(spec, option.key)
        if value is not None:
            option.parse(value, "workload")
    if not 0 <= spec.token_ids[0] < spec.token_ids[1] <= 1 << 31:
        raise ConfigError(f"token_ids is {spec.token_ids}; needed: from 0 up, at most 2^31, the first below the second")
    if spec.request_rate is not None and spec.concurrency is not None:
        raise ConfigError("--request-rate and --concurrency are both given; an open loop has a rate, a closed one a concurrency")
    if spec.arrival == "gamma" and spec.cv is None:
        raise ConfigError("--arrival gamma needs --cv, the coefficient of variation of the gaps")
    if spec.ramp_to is not None and (spec.request_rate is None or math.isinf(spec.request_rate) or spec.arrival == "burst"):
        raise ConfigError("--ramp-to needs a finite --request-rate to begin with, and an --arrival other than burst")
    for keys, has_effect, needed in _needs(spec):
        if not has_effect:
            _refuse_changed(spec, keys, needed)


def _needs(spec: WorkloadSpec) -> tuple[tuple[tuple[str, ...], bool, str], ...]:
    """Options that say more about another one, whether they have an effect, and what they need."""
    return (
        (("cv",), spec.arrival == "gamma", "without --arrival gamma"),
        (("burst_period", "burst_share"), spec.arrival == "burst", "without --arrival burst"),
        (("ramp_time",), spec.ramp_to is not None, "without --ramp-to"),
        (("arrival",), spec.concurrency is None, "with --concurrency, whose clients wait for their answers"),
        (("ramp_up",), spec.concurrency is not None, "without --concurrency"),
        (("think_time",), spec.concurrency is not None or spec.turns > 1, "without --concurrency or --turns"),
        (("prefix_share", "num_prefixes"), spec.prefix > 0, "without --prefix"),
        (("turn_isl",), spec.turns > 1, "without --turns"),
        (("cancel_after", "cancel_delay"), spec.cancel_share > 0, "without --cancel-share"),
        (("over_context",), spec.max_context is not None, "without --max-context"),
        (("time_scale",), bool(spec.workload), "without a --workload file that has times"),
    )


def _context(spec: WorkloadSpec) -> Context:
    return Context(spec.max_context, spec.over_context == "clip")


def _leaving(spec: WorkloadSpec) -> Leaving:
    return Leaving(spec.cancel_share, spec.cancel_after, spec.cancel_delay == "uniform")


def _refuse_changed(spec: WorkloadSpec, keys: Sequence[str], why: str) -> None:
    """An option that would do nothing is refused, not passed over. ``why`` begins with "with" or "without"."""
    plain = WorkloadSpec()
    for key in keys:
        if getattr(spec, key) != getattr(plain, key):
            raise ConfigError(f"--{key.replace('_', '-')} {getattr(spec, key)} has no effect {why}; leave it out")


def _in_file(spec: WorkloadSpec, what: str) -> str:
    return f"with --workload {spec.workload}, which has {what}"


def _recorded_times_s(recording: Recording, time_scale: float) -> Iterator[float]:
    return (arrival_s * time_scale for arrival_s in recording.arrival_s)


def _mix(spec: WorkloadSpec, content: Clients) -> ClientMix:
    if spec.concurrency is not None or (spec.request_rate is not None and math.isinf(spec.request_rate)):
        raise ConfigError(f"{spec.workload} has clients with rates; --request-rate (finite) scales them, --concurrency cannot")
    _refuse_changed(spec, ("arrival", "ramp_to"), _in_file(spec, "a rate for each client"))
    return ClientMix(
        spec.seed,
        content.clients,
        spec.requests or DEFAULT_REQUESTS,
        TokenIds(*spec.token_ids),
        peak_per_s=spec.request_rate,
        time_scale=spec.time_scale,
        max_tokens=spec.max_tokens,
        context=_context(spec),
        leaving=_leaving(spec),
    )


def _lengths(spec: WorkloadSpec) -> LengthPairs:
    return Independent(*(parse_lengths(name, getattr(spec, name), spec.range_ratio) for name in ("isl", "osl")))


def _drawn(spec: WorkloadSpec, lengths: LengthPairs) -> Drawn:
    return Drawn(
        spec.seed,
        spec.requests or DEFAULT_REQUESTS,
        lengths,
        TokenIds(*spec.token_ids),
        turns=spec.turns,
        turn_tokens=parse_lengths("turn-isl", spec.turn_isl, spec.range_ratio) if spec.turn_isl else None,
        prefix_tokens=spec.prefix,
        prefix_share=spec.prefix_share,
        num_prefixes=spec.num_prefixes,
        max_tokens=spec.max_tokens,
        context=_context(spec),
        leaving=_leaving(spec),
    )


def _think(spec: WorkloadSpec) -> ThinkTime:
    return ThinkTime(spec.think_time, Draws(spec.seed, "think"))


def _with_loop(spec: WorkloadSpec, contents: Contents) -> Workload:
    if spec.concurrency is not None:
        return ClosedLoop(contents, spec.concurrency, spec.ramp_up, _think(spec))
    if spec.request_rate is None:
        raise ConfigError("no arrivals: give --request-rate (open loop), --concurrency (closed loop) or a --workload file that has times")
    return OpenLoop(contents, functools.partial(_times_s, spec), _think(spec))


def _times_s(spec: WorkloadSpec) -> Iterator[float]:
    """A rate of requests begins 1 / turns as many sessions."""
    assert spec.request_rate is not None
    if math.isinf(spec.request_rate):
        return itertools.repeat(0.0)
    cv = {"poisson": 1.0, "burst": 1.0, "constant": 0.0, "gamma": spec.cv or 0.0}[spec.arrival]
    return arrival_times_s(_profile(spec, spec.request_rate / spec.turns), cv, f"{spec.seed}:arrivals")


def _profile(spec: WorkloadSpec, rate_per_s: float) -> Profile:
    if spec.ramp_to is not None:
        return Ramp(rate_per_s, spec.ramp_to / spec.turns, spec.ramp_time)
    if spec.arrival == "burst":
        return Bursts(rate_per_s, spec.burst_period, spec.burst_share)
    return Steady(rate_per_s)
