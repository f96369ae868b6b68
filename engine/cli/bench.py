"""``twinfer bench steps``: step times of the engine, from commit to commit.

Two published ways of measuring. ``window``: requests of varied lengths keep every rank at its batch size; whole steps count while
20 to 90 % of the requests are finished. ``first-batches``: one prompt repeated, about nine steps from the moment the batch is full.
With ``--new-tokens 1`` the steps are prompt steps, otherwise decode steps with the prompts of newcomers mixed in.

A published decode comparison, scaled down: --layout tp1dp2ep2 --batch-sizes 4,8 --context 2080 --shared-prefix 2048 --draft-tokens 3
--forced-acceptance 2.25 --forced-routing balanced.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from engine.cli import bench_serve
from engine.cli.bench_serve_output import ReportWriter
from engine.cli.common import add_engine_arguments, follow_node_0, log, open_record_folder, resolve_options, show_nodes
from engine.cli.step_bench import Recording, StepLoad, StepRecorder, record_in, with_room
from engine.command_line import print_config, print_json
from engine.core.errors import CapacityError, ConfigError, StoppedError
from engine.core.metrics import DraftCounts, percentile

if TYPE_CHECKING:
    from engine.actors.config import EngineConfig
    from engine.actors.gateway import Gateway
    from engine.launch import Launch

MAX_BATCH_SIZES = 64
MAX_LAYOUTS = 64


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], write_report: ReportWriter | None = None) -> None:
    parser = commands.add_parser("bench", help="measure the engine or a server", description="Measure the engine, or a server under load.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    steps = actions.add_parser("steps", help="step times over layouts and batch sizes", description=__doc__, formatter_class=_Raw)
    steps.add_argument("model", metavar="MODEL")
    steps.add_argument("--batch-sizes", default="1,8,32", metavar="B[,B...]", help="requests per DP rank (default 1,8,32)")
    steps.add_argument("--context", type=int, default=256, metavar="TOKENS", help="prompt length, the shared prefix included (default 256)")
    steps.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="so many tokens at the beginning of all prompts are the same, and in the prefix cache before the measurement; it finds whole "
        "blocks of --block-size (default 0)",
    )
    steps.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="tokens generated per request; 1 measures prefill (default 32)"
    )
    steps.add_argument("--method", default="window", choices=("window", "first-batches"))
    steps.add_argument(
        "--components", action="store_true", help="time components and count messages too (a second, slower pass for the breakdown)"
    )
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
    if not 0 <= arguments.shared_prefix < arguments.context:
        raise ConfigError(f"--shared-prefix is {arguments.shared_prefix}; needed: from 0 to less than --context {arguments.context}")
    if arguments.shared_prefix and options["disable_radix_cache"]:
        raise ConfigError(
            f"--shared-prefix is {arguments.shared_prefix}; it needs the prefix cache that --disable-radix-cache switches off"
        )
    layouts = options["layout"].split(",")
    if len(layouts) > MAX_LAYOUTS:
        raise ConfigError(f"--layout names {len(layouts)} layouts; allowed: at most {MAX_LAYOUTS}")

    open_record_folder(options)
    from engine.launch import open_model, plan_launch

    model = open_model(arguments.model)
    loads = [StepLoad(batch, arguments.context, arguments.new_tokens, arguments.method, arguments.shared_prefix) for batch in batch_sizes]
    # Everything is planned before anything is measured: a layout that cannot work is not found out after an hour.
    launches = []
    for layout in layouts:
        for load in loads:
            values = {**options.values, "layout": layout}
            if options["record_trace"] and len(layouts) * len(loads) > 1:
                values["record_trace"] = os.path.join(options["record_trace"], f"{layout.strip()}-b{load.batch}")
            sized = with_room(type(options)(values, options.origins), load)
            launches.append((load, plan_launch(sized, model.spec, arguments.model)))
            _check_lengths(load, launches[-1][1])
    points: list[dict[str, Any]] = []
    for load, launch in launches:
        show_nodes(launch.config, arguments.log_level)
        passes = (False, True) if arguments.components else (False,)
        if launch.config.is_follower:
            for components in passes:
                follow_node_0(_config(launch, components))
            continue
        point = trio.run(_measure, launch, load, False)
        if arguments.components:
            slower = trio.run(_measure, launch, load, True)
            point |= {"components": slower["components"], "traffic": slower["traffic"]}
        points.append(point)
        log(_line(point))
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


def _check_lengths(load: StepLoad, launch: Launch) -> None:
    limit = launch.config.scheduler.context_tokens
    if load.context + load.new_tokens > limit:
        raise ConfigError(f"--context {load.context} and --new-tokens {load.new_tokens} exceed the {limit} tokens a request may have")


def _line(point: dict[str, Any]) -> str:
    spread = f"p10 {point['step_p10_s'] * 1e3:.2f}, p90 {point['step_p90_s'] * 1e3:.2f}, n {point['n']}"
    return (
        f"{point['layout']}, batch {point['batch']}: step {point['step_s'] * 1e3:.2f} ms ({spread}), "
        f"forward {point['forward_s'] * 1e3:.2f} ms, {point['tokens_per_s']:.1f} tokens/s"
    )


def _config(launch: Launch, breakdown: bool) -> EngineConfig:
    """For the breakdown the workers time their components and count their messages step by step; a recording is the first pass's."""
    if not breakdown:
        return launch.config
    workers = tuple(msgspec.structs.replace(worker, time_components=True, record=None) for worker in launch.config.workers)
    return msgspec.structs.replace(launch.config, workers=workers, report_steps=1)


async def _measure(launch: Launch, load: StepLoad, breakdown: bool) -> dict[str, Any]:
    from engine.actors.supervisor import open_engine

    recorder, recording = StepRecorder(), None
    engine: Gateway | None = None
    try:
        async with open_engine(_config(launch, breakdown), None, handle_signals=True, observers=(recorder,)) as engine:
            recording = await record_in(engine, recorder, launch.config.scheduler.num_ranks, load)
    except (CapacityError, BaseExceptionGroup):
        if engine is None or engine.stop_signal is None:
            raise
    if engine.stop_signal is not None:  # half a measurement is none
        raise StoppedError(128 + engine.stop_signal)
    assert recording is not None
    return _point(recording, load, launch)


def _point(recording: Recording, load: StepLoad, launch: Launch) -> dict[str, Any]:
    recorder, chosen, admitted = recording.recorder, recording.chosen, recording.admitted
    num_ranks = launch.config.scheduler.num_ranks
    steps_s = sorted(recording.step_s(index) for index in chosen)
    emitted = sum(len(item.tokens) for index in chosen for rank in recorder.results[index].ranks for item in rank.items)
    computed = sum(recorder.plans[index].num_tokens for index in chosen)
    running = sum(len(rank.items) for index in chosen for rank in recorder.plans[index].ranks)
    drafts = DraftCounts()
    for index in chosen:
        drafts.add(recorder.verifications[index])
    prompt_tokens = sum(event.num_prompt_tokens for event in admitted)
    warm_up_steps = chosen[0]
    return {
        "layout": launch.config.workers[0].layout,
        "batch": load.batch,
        "context": load.context,
        "new_tokens": load.new_tokens,
        "method": load.method,
        "step_s": statistics.median(steps_s),
        "step_mean_s": statistics.fmean(steps_s),
        "step_p10_s": percentile(steps_s, 0.1),
        "step_p90_s": percentile(steps_s, 0.9),
        "n": len(steps_s),
        "forward_s": statistics.median(recorder.results[index].forward_s for index in chosen),
        "tokens_per_s": emitted / sum(steps_s),
        "computed_tokens_per_s": computed / sum(steps_s),
        "components": _components(recording),
        "traffic": _traffic(recording),
        "batch_mean": running / len(chosen) / num_ranks,
        "tokens_per_s_per_user": emitted / sum(steps_s) / (load.batch * num_ranks),
        "shared_prefix": load.shared_prefix,
        "prefix_hit_rate": sum(event.num_cached_tokens for event in admitted) / prompt_tokens,
        "prompt_tokens_mean": prompt_tokens / len(admitted),
        "requests": len(admitted),
        "draft_tokens": launch.config.scheduler.draft_tokens,
        "drafts": drafts.summary() if drafts.num_verified_items else None,
        "forced_acceptance": launch.config.workers[0].forced_acceptance,
        "forced_routing": launch.config.workers[0].forced_routing,
        "warm_up": {"steps": warm_up_steps, "seconds": recorder.commit_s[warm_up_steps - 1] - recorder.commit_s[0]},
    }


def _components(recording: Recording) -> dict[str, dict[str, float]] | None:
    """Mean seconds a step of the slowest rank, by component."""
    seconds: dict[str, float] = {}
    for index in recording.chosen:
        for name, value in recording.recorder.results[index].components:
            seconds[name] = seconds.get(name, 0.0) + value
    return {name: {"seconds": value / len(recording.chosen)} for name, value in sorted(seconds.items())} or None


def _traffic(recording: Recording) -> dict[str, dict[str, float]] | None:
    """Mean bytes and collectives a step, of all ranks together, by kind; None where the ranks did not tell after each step."""
    totals: dict[str, tuple[int, int]] = {}
    for index in recording.chosen:
        counters = recording.recorder.results[index].counters
        if counters is None:
            return None
        for kind, num_bytes, calls in counters.traffic:
            before_bytes, before_calls = totals.get(kind, (0, 0))
            totals[kind] = (before_bytes + num_bytes, before_calls + calls)
    count = len(recording.chosen)
    return {kind: {"bytes": num_bytes / count, "collectives": calls / count} for kind, (num_bytes, calls) in sorted(totals.items())}
