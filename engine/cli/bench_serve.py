"""``twinfer bench serve``: a load generator against any OpenAI-compatible server.

Open loop (--request-rate): requests are sent on a schedule drawn from --seed, whatever the server does. Closed loop (--max-concurrency): so
many requests are kept running. A trace (--dataset) brings its own arrivals. Definitions of the figures: aiperf's; units are in the names.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from engine.cli.bench_serve_output import ReportWriter, check_output, print_summary, write_output
from engine.cli.bench_serve_values import parse_extra_body, parse_lengths
from engine.cli.common import log
from engine.cli.remote import DEFAULT_BASE_URL, add_key_arguments, check_base_url, read_api_key
from engine.command_line import add_common_arguments, print_json
from engine.core.errors import ConfigError, TwinferError
from engine.core.metrics import Slo
from engine.core.sampling import MAX_SEED
from engine.load_values import parse_rate, parse_slo, parse_strict_share
from engine.options import Option

if TYPE_CHECKING:
    import httpx

    from engine.bench.prompts import PromptMaker
    from engine.bench.runner import Run, RunSettings
    from engine.bench.summary import ServeSummary
    from engine.bench.workload import WorkloadSettings

MAX_REQUESTS = 1 << 24
EXIT_FAULT = 1
EXIT_SLO_NOT_MET = 3
# The server may refuse these on purpose (load, or a request that is wrong); anything else that fails is its fault.
NOT_A_SERVER_FAULT = ("http_4",)

NUMBERS = (
    Option("max-concurrency", int, None, "requests kept running (closed loop), or the cap of an open loop; 1 without a rate",
           ("--concurrency",), 1, 65536),
    Option("burstiness", float, 1.0, "shape of the gamma gaps: 1 Poisson, below bursts, above regular", (), 0.01, 1e6),
    Option("num-prompts", int, None, "requests to send; 100 where neither --duration nor --dataset ends the run",
           ("--request-count", "--num-requests"), 1, MAX_REQUESTS),
    Option("duration", float, None, "seconds after which no request is sent any more", ("--max-duration",), 0.001, 1e7),
    Option("isl-stddev", float, 0.0, "standard deviation of --isl in tokens", ("--prompt-tokens-stddev",), 0, 1 << 24),
    Option("osl-stddev", float, 0.0, "standard deviation of --osl in tokens", ("--output-tokens-stddev",), 0, 1 << 24),
    Option("prefix-tokens", int, 0, "tokens in front of every prompt, the same in all", ("--random-prefix-len",), 0, 1 << 24),
    Option("trace-speed", float, 1.0, "divides a trace's times: 2 replays twice as fast", (), 1e-6, 1e6),
    Option("warmup-requests", int, 0, "requests sent before, and left out of the figures", ("--num-warmups",), 0, MAX_REQUESTS),
    Option("request-cancellation-rate", float, 0.0, "percent of the requests that the client leaves", (), 0, 100),
    Option("request-cancellation-delay", float, 0.0, "seconds after sending until it leaves", (), 0, 1e6),
    Option("timeout", float, 600.0, "seconds a request may take", ("--request-timeout-seconds",), 0.001, 1e7),
    Option("temperature", float, None, "sampling temperature; the server's default without it", (), 0, 100),
    Option("seed", int, 0, "seed of arrivals, lengths, prompts and cancellations", ("--random-seed",), 0, MAX_SEED),
)  # fmt: skip


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser], write_report: ReportWriter | None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = actions.add_parser("serve", help="load generator for a running server", description=__doc__, formatter_class=raw)
    parser.add_argument("--base-url", "--url", "--target", "-u", default=DEFAULT_BASE_URL, metavar="URL",
                        help=f"the server (default {DEFAULT_BASE_URL})")  # fmt: skip
    parser.add_argument("--model", "-m", metavar="NAME", help="default: the first of /v1/models")
    parser.add_argument("--endpoint", "--endpoint-type", default="chat", choices=("chat", "completions", "responses"))
    parser.add_argument("--request-rate", metavar="R|inf", help="open loop: requests/s, or inf for all at once")
    parser.add_argument("--isl", "--random-input-len", "--input-len", metavar="N|LOW:HIGH", help="prompt tokens (default 512)")
    parser.add_argument("--osl", "--random-output-len", "--output-len", metavar="N|LOW:HIGH", help="output tokens asked for (default 128)")
    parser.add_argument("--dataset", "--dataset-path", "--input-file", metavar="FILE",
                        help="a Mooncake-style JSONL trace, an Azure CSV trace, or JSON Lines of prompts")  # fmt: skip
    parser.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits in ms: ttft:500 tpot:30 itl:100 e2e:4000")
    parser.add_argument("--strict-slo", nargs="?", const="99", metavar="PERCENT",
                        help="exit 3 where fewer of the requests (default 99 %%) meet the --goodput limits")  # fmt: skip
    parser.add_argument("--ignore-eos", action="store_true", help="ask for exactly --osl tokens")
    parser.add_argument("--no-continuous-usage", action="store_true", help="do not ask for usage on each chunk (for servers that refuse)")
    parser.add_argument("--extra-body", "--extra-inputs", metavar="JSON", help="an object merged into every request")
    add_key_arguments(parser)
    parser.add_argument("--tokenizer", default="none", choices=("none",), help="none: lengths by the server's /tokenize, or token ids")
    parser.add_argument("--output", "--artifact-dir", "-o", metavar="DIR|FILE.json|FILE.html",
                        help="write the summary, one JSON line per request, and an HTML report")  # fmt: skip
    parser.add_argument("--save-result", dest="output", action="store_const", const="bench-serve", help="--output bench-serve")
    for option in NUMBERS:
        default = "none" if option.default is None else option.default
        parser.add_argument(f"--{option.name}", *option.aliases, dest=option.key, metavar=option.kind.__name__.upper(),
                            help=f"{option.help} (default {default})".replace("%", "%%"))  # fmt: skip
    add_common_arguments(parser)
    parser.set_defaults(run=functools.partial(run, write_report=write_report))


def run(arguments: argparse.Namespace, write_report: ReportWriter | None) -> int:
    numbers = {option.key: _number(option, getattr(arguments, option.key)) for option in NUMBERS}
    slo = parse_slo(arguments.goodput)
    strict_share = parse_strict_share(arguments.strict_slo, slo)
    workload = _workload_settings(arguments, numbers)
    base_url = check_base_url(arguments.base_url)
    api_key = read_api_key(arguments)
    extra = parse_extra_body(arguments.extra_body)
    if arguments.output is not None:
        check_output(arguments.output)
    from engine.bench.runner import raise_open_files

    raise_open_files()
    plan = _Plan(base_url, api_key, arguments, numbers, workload, extra, slo)
    summary, result, prompt_source, model = trio.run(plan.run)
    facts = _facts(plan, model, prompt_source)
    if arguments.output is not None:
        write_output(arguments.output, facts, summary, result, write_report)
    if arguments.json:
        print_json({**facts, **_without_windows(summary)})
    else:
        print_summary(facts, summary)
    return _exit_code(summary, strict_share)


def _exit_code(summary: ServeSummary, strict_share: float | None) -> int:
    if not summary.finished:
        log(f"twinfer bench: none of the {summary.requests} requests finished: {summary.failed} failed, {summary.cancelled} were cancelled")
    faults = sum(number for kind, number in summary.errors.items() if not kind.startswith(NOT_A_SERVER_FAULT))
    if faults or (summary.failed and not summary.finished):
        return EXIT_FAULT
    if strict_share is not None and (summary.goodput_share is None or summary.goodput_share < strict_share):
        log(f"twinfer bench: {summary.goodput_share or 0.0:.2%} of the requests meet the limits; needed: {strict_share:.2%}")
        return EXIT_SLO_NOT_MET
    return 0


def _without_windows(summary: ServeSummary) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(summary)
    del fields["windows"]
    return fields


class _Plan:
    """A run's settings, checked. ``run`` asks the server what it needs to know, warms it up and measures."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        arguments: argparse.Namespace,
        numbers: Mapping[str, Any],
        workload: WorkloadSettings,
        extra: dict[str, Any],
        slo: Slo | None,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.arguments = arguments
        self.numbers = numbers
        self.workload = workload
        self.extra = extra
        self.slo = slo

    @property
    def concurrency(self) -> int | None:
        """The closed loop's number of requests, or the open loop's cap."""
        chosen: int | None = self.numbers["max_concurrency"]
        return chosen if chosen is not None or self.is_open_loop else 1

    @property
    def is_open_loop(self) -> bool:
        # A trace with times is an open loop unless a concurrency was asked for.
        return self.workload.request_rate_per_s is not None or (
            self.workload.dataset is not None and self.numbers["max_concurrency"] is None
        )

    async def run(self) -> tuple[ServeSummary, Run, str, str]:
        from tqdm import tqdm

        from engine.bench.endpoints import ENDPOINTS, Asked
        from engine.bench.probe import first_model, make_prompts
        from engine.bench.runner import RunSettings, make_http, run_workload
        from engine.bench.summary import summarise
        from engine.bench.workload import make_workload

        arguments, numbers = self.arguments, self.numbers
        async with make_http(self.base_url, self.api_key, self.concurrency) as http:
            model = arguments.model or await first_model(http)
            prompts = await make_prompts(http, model, arguments.endpoint, self.workload.seed)
            asked = Asked(
                model, not arguments.no_continuous_usage, arguments.ignore_eos, numbers["temperature"], self.extra
            )  # fmt: skip
            settings = RunSettings(
                asked=asked,
                endpoint=ENDPOINTS[arguments.endpoint],
                timeout_s=numbers["timeout"],
                max_concurrency=self.concurrency,
                duration_s=numbers["duration"],
            )
            await self._warm_up(http, settings, prompts)
            workload = self._closed(make_workload(self.workload))
            # A bar on a terminal only.
            with tqdm(total=self.workload.num_prompts, desc="requests", unit="req", disable=None, leave=False, mininterval=0.5) as bar:
                result = await run_workload(http, settings, prompts, workload, lambda: bar.update(1))
        capped = self.is_open_loop and self.concurrency is not None
        return summarise(result, self.slo, is_capped_open_loop=capped), result, prompts.source, model

    def _closed(self, workload: Iterator[Any]) -> Iterator[Any]:
        """Without the trace's times where a concurrency was asked for instead."""
        if self.is_open_loop:
            return workload
        return (msgspec.structs.replace(work, arrival_s=None) for work in workload)

    async def _warm_up(self, http: httpx.AsyncClient, settings: RunSettings, prompts: PromptMaker) -> None:
        from engine.bench.runner import run_workload
        from engine.bench.workload import make_workload

        count = self.numbers["warmup_requests"]
        if not count:
            return
        # Other prompts than the measured ones (but for the shared prefix), nobody leaves, as many at once as later.
        warm = msgspec.structs.replace(self.workload, num_prompts=count, seed=self.workload.seed + 1, cancellation_rate=0.0)
        workload = (msgspec.structs.replace(work, arrival_s=None, parts=_renamed(work.parts)) for work in make_workload(warm))
        plain = msgspec.structs.replace(settings, duration_s=None, max_concurrency=min(count, self.concurrency or count, 64))
        result = await run_workload(http, plain, prompts, workload)
        failed = [record for record in result.records if record.error is not None]
        log(f"warm-up: {count} requests in {result.wall_s:.2f} s, {len(failed)} failed; they are in no figure")
        if len(failed) == count:
            raise TwinferError(f"all {count} warm-up requests failed ({failed[0].error}): {failed[0].message}")


def _renamed(parts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name if name == "prefix" else f"warm-up:{name}", tokens) for name, tokens in parts)


# -- arguments ----------------------------------------------------------------------------------------------------------------


def _number(option: Option, value: object) -> Any:
    return option.default if value is None else option.parse(value, "command line")


def _workload_settings(arguments: argparse.Namespace, numbers: Mapping[str, Any]) -> WorkloadSettings:
    from engine.bench.workload import Lengths, WorkloadSettings

    if arguments.dataset is not None and arguments.isl is not None:
        raise ConfigError("--isl has no meaning with --dataset, which has prompts or their lengths; leave one out")
    num_prompts = numbers["num_prompts"]
    if num_prompts is None and numbers["duration"] is None and arguments.dataset is None:
        num_prompts = 100
    output = arguments.osl if arguments.osl is not None else None if arguments.dataset is not None else "128"
    return WorkloadSettings(
        seed=numbers["seed"],
        num_prompts=num_prompts,
        input_tokens=parse_lengths("isl", arguments.isl or "512", numbers["isl_stddev"]),
        output_tokens=parse_lengths("osl", output, numbers["osl_stddev"]) if output is not None else Lengths(128, 128),
        prefix_tokens=numbers["prefix_tokens"],
        request_rate_per_s=parse_rate(arguments.request_rate),
        burstiness=numbers["burstiness"],
        dataset=arguments.dataset,
        trace_speed=numbers["trace_speed"],
        cancellation_rate=numbers["request_cancellation_rate"] / 100,
        cancellation_delay_s=numbers["request_cancellation_delay"],
    )


def _facts(plan: _Plan, model: str, prompt_source: str) -> dict[str, Any]:
    """What was run, for whoever reads the figures later."""
    from engine.version import VERSION

    workload: dict[str, Any] = msgspec.to_builtins(plan.workload)
    rate = workload["request_rate_per_s"]
    workload["request_rate_per_s"] = "inf" if rate is not None and math.isinf(rate) else rate
    return {
        "command": "bench serve",
        "version": VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "base_url": plan.base_url,
        "endpoint": plan.arguments.endpoint,
        "model": model,
        "loop": "open" if plan.is_open_loop else "closed",
        "max_concurrency": plan.concurrency,
        "duration_limit_s": plan.numbers["duration"],
        "timeout_s": plan.numbers["timeout"],
        "warmup_requests": plan.numbers["warmup_requests"],
        "ignore_eos": plan.arguments.ignore_eos,
        "temperature": plan.numbers["temperature"],
        "extra_body": plan.extra,
        "prompts_from": prompt_source,
        "workload": workload,
        "slo": msgspec.to_builtins(plan.slo) if plan.slo is not None else None,
    }
