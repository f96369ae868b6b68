"""``twinfer bench steps``: step times of the engine, from commit to commit.

Two published ways of measuring. ``window``: requests of varied lengths keep every rank at its batch size; whole steps count while
20 to 90 % of the requests are finished. ``first-batches``: one prompt repeated, about nine steps from the moment the batch is full.
With ``--new-tokens 1`` the steps are prompt steps, otherwise decode steps with the prompts of newcomers mixed in.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from engine.cli import bench_serve
from engine.cli.bench_serve_output import ReportWriter
from engine.cli.common import add_engine_arguments, follow_node_0, log, print_config, print_json, resolve_options, show_nodes
from engine.core.errors import CapacityError, ConfigError, StoppedError
from engine.core.events import Event, Finished
from engine.core.plan import StepPlan, StepResult
from engine.core.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.actors.config import EngineConfig
    from engine.actors.gateway import Gateway
    from engine.launch import Launch

MAX_BATCH_SIZES = 64
WINDOW_FINISHED_SHARES = (0.2, 0.9)
WINDOW_REQUESTS_PER_SLOT = 6
FIRST_BATCHES = 9
WARM_UP_STEPS = 2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], write_report: ReportWriter | None = None) -> None:
    parser = commands.add_parser("bench", help="measure the engine or a server", description="Measure the engine, or a server under load.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    steps = actions.add_parser("steps", help="step times over batch sizes", description=__doc__, formatter_class=_Raw)
    steps.add_argument("model", metavar="MODEL")
    steps.add_argument("--batch-sizes", default="1,8,32", metavar="B[,B...]", help="requests per DP rank (default 1,8,32)")
    steps.add_argument("--context", type=int, default=256, metavar="TOKENS", help="prompt length (default 256)")
    steps.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="tokens generated per request; 1 measures prefill (default 32)"
    )
    steps.add_argument("--method", default="window", choices=("window", "first-batches"))
    steps.add_argument("--components", action="store_true", help="time components too (a second, slower pass for the breakdown)")
    add_engine_arguments(steps)
    steps.set_defaults(run=run)
    bench_serve.add_parser(actions, write_report)


class _Raw(argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter):
    """Keeps the module text's paragraphs."""


def run(arguments: argparse.Namespace) -> int:
    options = resolve_options(arguments)
    if arguments.print_config:
        return print_config(options, arguments.json)
    batch_sizes = parse_batch_sizes(arguments.batch_sizes)
    for name, value, high in (("context", arguments.context, 1 << 24), ("new-tokens", arguments.new_tokens, 1 << 20)):
        if not 1 <= value <= high:
            raise ConfigError(f"--{name} is {value}; needed: an integer from 1 to {high}")

    from engine.launch import open_model, plan_launch

    model = open_model(arguments.model)
    points: list[dict[str, Any]] = []
    for batch in batch_sizes:
        sized = with_room(options, batch, arguments.context + arguments.new_tokens)
        launch = plan_launch(sized, model.spec, arguments.model)
        show_nodes(launch.config, arguments.log_level)
        if arguments.context + arguments.new_tokens > launch.config.scheduler.context_tokens:
            raise ConfigError(
                f"--context {arguments.context} and --new-tokens {arguments.new_tokens} exceed the "
                f"{launch.config.scheduler.context_tokens} tokens a request may have"
            )
        if launch.config.is_follower:
            for time_components in (False, True)[: 1 + arguments.components]:
                follow_node_0(_config(launch, time_components))
            continue
        point = trio.run(_measure, launch, batch, arguments, False)
        if arguments.components:
            point["components"] = trio.run(_measure, launch, batch, arguments, True)["components"]
        points.append(point)
        spread = f"p10 {point['step_p10_s'] * 1e3:.2f}, p90 {point['step_p90_s'] * 1e3:.2f}, n {point['n']}"
        log(
            f"batch {batch}: step {point['step_s'] * 1e3:.2f} ms ({spread}), forward {point['forward_s'] * 1e3:.2f} ms, "
            f"{point['tokens_per_s']:.1f} tokens/s"
        )
    if arguments.json and points:
        print_json({"model": model.spec.name, "layout": options["layout"], "points": points})
    return 0


def parse_batch_sizes(text: str) -> list[int]:
    """Raises ConfigError for anything but a list of positive integers."""
    parts = text.split(",")
    if len(parts) > MAX_BATCH_SIZES or not all(part.strip().isdecimal() and len(part) <= 8 and 1 <= int(part) <= 65536 for part in parts):
        raise ConfigError(
            f"--batch-sizes is {text[:80]!r}; needed: at most {MAX_BATCH_SIZES} integers from 1 to 65536, separated by commas"
        )
    return [int(part) for part in parts]


def with_room(options: Any, batch: int, tokens_each: int) -> Any:
    """The options with slots and KV for the batch, unless they were set by hand."""
    values = dict(options.values)
    if options.origins["max_running_requests"] == "default":
        values["max_running_requests"] = batch
    if values["max_total_tokens"] is None:
        block = values["block_size"]
        values["max_total_tokens"] = (batch + 1) * (-(-tokens_each // block) + 1) * block
    if values["max_running_requests"] < batch:
        raise ConfigError(f"--max-running-requests is {values['max_running_requests']}; the batch has {batch}")
    return type(options)(values, options.origins)


class StepRecorder:
    """An observer: the commit time of every step and how many requests were finished by then."""

    def __init__(self) -> None:
        self.commit_s: list[float] = []
        self.results: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self.num_finished: list[int] = []
        self.finished = 0

    def planned(self, plan: StepPlan, now_s: float) -> None: ...

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self.commit_s.append(now_s)
        self.plans.append(plan)
        self.results.append(result)
        self.num_finished.append(self.finished)

    def events(self, events: Sequence[Event]) -> None:
        self.finished += sum(isinstance(event, Finished) for event in events)


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps of one batch size, and which of them count."""

    recorder: StepRecorder
    chosen: list[int]

    def step_s(self, index: int) -> float:
        """From the commit before to this one."""
        return self.recorder.commit_s[index] - self.recorder.commit_s[index - 1]


def _config(launch: Launch, time_components: bool) -> EngineConfig:
    workers = tuple(msgspec.structs.replace(worker, time_components=time_components) for worker in launch.config.workers)
    return msgspec.structs.replace(launch.config, workers=workers)


async def record(launch: Launch, batch: int, arguments: argparse.Namespace, time_components: bool = False) -> Recording:
    """Run the measurement. ``arguments`` names ``context``, ``new_tokens`` and ``method``. Raises ConfigError where no step counts."""
    from engine.actors.supervisor import open_engine

    config = _config(launch, time_components)
    recorder, recording = StepRecorder(), None
    engine: Gateway | None = None
    try:
        async with open_engine(config, None, handle_signals=True, observers=(recorder,)) as engine:
            recording = await record_in(engine, recorder, launch, batch, arguments)
    except (CapacityError, BaseExceptionGroup):
        if engine is None or engine.stop_signal is None:
            raise
    if engine.stop_signal is not None:  # half a measurement is none
        raise StoppedError(128 + engine.stop_signal)
    assert recording is not None
    return recording


async def record_in(engine: Gateway, recorder: StepRecorder, launch: Launch, batch: int, arguments: argparse.Namespace) -> Recording:
    """The same in an engine that is open, and that ``recorder`` observes; nothing else may run in it."""
    num_ranks = launch.config.scheduler.num_ranks
    requests = _requests(arguments, batch * num_ranks, launch.spec.vocab_size)
    await _warm_up(engine, launch.spec.vocab_size, arguments)
    first = len(recorder.commit_s)
    finished_before = recorder.finished
    limiter = trio.CapacityLimiter(batch * num_ranks)
    async with trio.open_nursery() as nursery:
        for prompt, new_tokens in requests:
            nursery.start_soon(_one, engine, prompt, new_tokens, limiter)
    chosen = _chosen_steps(recorder, first, finished_before, len(requests), batch, arguments)
    if not chosen and engine.stop_signal is None:
        raise ConfigError("no whole step fell into the measured window; raise --new-tokens or the batch size")
    return Recording(recorder, chosen)


async def _measure(launch: Launch, batch: int, arguments: argparse.Namespace, time_components: bool) -> dict[str, Any]:
    recording = await record(launch, batch, arguments, time_components)
    return _point(recording, batch, arguments, launch.config.workers[0].layout)


def _requests(arguments: argparse.Namespace, concurrency: int, vocab_size: int) -> list[tuple[tuple[int, ...], int]]:
    """Prompts (as token ids) and output lengths, the same for the same arguments."""
    draw = random.Random(concurrency)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(length))

    if arguments.method == "first-batches":
        shared = prompt(arguments.context)
        count = concurrency * (FIRST_BATCHES + WARM_UP_STEPS if arguments.new_tokens == 1 else 1)
        # Distinct first tokens: the same work in every request, without a prefix hit that would skip it.
        return [((*prompt(1), *shared[1:]), max(arguments.new_tokens, FIRST_BATCHES + WARM_UP_STEPS) if arguments.new_tokens > 1 else 1)
                for _ in range(count)]  # fmt: skip
    requests = []
    for _ in range(max(concurrency * WINDOW_REQUESTS_PER_SLOT, 10)):
        # Lengths uniform from 80 % of the nominal one up to it, as in the public closed-loop benchmarks; the means are reported.
        length = max(1, round(arguments.context * draw.uniform(0.8, 1.0)))
        new = arguments.new_tokens if arguments.new_tokens == 1 else max(2, round(arguments.new_tokens * draw.uniform(0.8, 1.0)))
        requests.append((prompt(length), new))
    return requests


async def _one(engine: Gateway, prompt: tuple[int, ...], new_tokens: int, limiter: trio.CapacityLimiter) -> None:
    from engine.actors.gateway import Generation

    async with limiter:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        await engine.complete(Generation(prompt=prompt, params=params))


async def _warm_up(engine: Gateway, vocab_size: int, arguments: argparse.Namespace) -> None:
    from engine.actors.gateway import Generation

    prompt = tuple(index % vocab_size for index in range(min(arguments.context, 32)))
    await engine.complete(Generation(prompt=prompt, params=SamplingParams(max_tokens=WARM_UP_STEPS + 1, ignore_eos=True)))


def _point(recording: Recording, batch: int, arguments: argparse.Namespace, layout: str) -> dict[str, Any]:
    recorder, chosen = recording.recorder, recording.chosen
    steps_s = sorted(recording.step_s(index) for index in chosen)
    emitted = sum(len(item.tokens) for index in chosen for rank in recorder.results[index].ranks for item in rank.items)
    computed = sum(recorder.plans[index].num_tokens for index in chosen)
    components: dict[str, list[float]] = {}
    for index in chosen:
        for name, seconds in recorder.results[index].components:
            components.setdefault(name, []).append(seconds)
    return {
        "layout": layout,
        "batch": batch,
        "context": arguments.context,
        "new_tokens": arguments.new_tokens,
        "method": arguments.method,
        "step_s": statistics.median(steps_s),
        "step_p10_s": _quantile(steps_s, 0.1),
        "step_p90_s": _quantile(steps_s, 0.9),
        "n": len(steps_s),
        "forward_s": statistics.median(recorder.results[index].forward_s for index in chosen),
        "tokens_per_s": emitted / sum(steps_s),
        "computed_tokens_per_s": computed / sum(steps_s),
        "components": {name: {"seconds": sum(values) / len(chosen)} for name, values in sorted(components.items())} or None,
    }


def _chosen_steps(
    recorder: StepRecorder, first: int, finished_before: int, num_requests: int, batch: int, arguments: argparse.Namespace
) -> list[int]:
    """Indices of the steps that count; the gap before a step belongs to it, so the very first one has none."""
    later = range(first + 1, len(recorder.commit_s))
    if arguments.method == "window":
        low, high = WINDOW_FINISHED_SHARES
        return [index for index in later if low <= (recorder.num_finished[index] - finished_before) / num_requests <= high]
    if arguments.new_tokens == 1:
        return list(later)[WARM_UP_STEPS - 1 :][:FIRST_BATCHES]
    full = [index for index in later if _is_full_decode(recorder.plans[index], batch)]
    return full[WARM_UP_STEPS:][:FIRST_BATCHES]


def _is_full_decode(plan: StepPlan, batch: int) -> bool:
    """All requests of rank 0 decode, none still computes its prompt."""
    items = plan.ranks[0].items
    return len(items) == batch and all(item.num_new_tokens == 1 + item.num_draft_tokens for item in items)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (the definition numpy calls ``linear``)."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
