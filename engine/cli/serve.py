"""``twinfer serve``: the OpenAI API over HTTP, engine and server in one process.

The address is taken before the weights are loaded, and answers once the engine is warm. The first SIGINT or SIGTERM lets running
requests finish, a second one ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from engine.cli import logs
from engine.cli.common import add_engine_arguments, follow_node_0, log, open_record_folder, resolve_options
from engine.command_line import print_config, print_json
from engine.config import SERVE_OPTIONS
from engine.core.errors import ConfigError
from engine.core.sampling import SamplingParams
from engine.reading import read_text
from engine.version import VERSION

if TYPE_CHECKING:
    import socket
    import ssl

    from engine.actors.config import EngineConfig
    from engine.actors.gateway import Gateway
    from engine.api.config import ApiConfig
    from engine.api.formats.base import ChatFormat
    from engine.api.info import ServerInfo
    from engine.core.specs import ModelSpec
    from engine.core.step_cost import StepCost
    from engine.launch import Launch, OpenedModel
    from engine.options import Resolved

# (file, model's name, spec, engine, draft tokens): the prices of that engine's steps. Raises ConfigError where the file is of another one.
LoadCost = Callable[[str, str, "ModelSpec", "EngineConfig", int], "StepCost"]
MAX_KEY_FILE_BYTES = 1 << 20
MAX_NAME_CHARS = 256

_log = logging.getLogger("twinfer.serve")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], load_cost: LoadCost | None) -> None:
    """``load_cost`` reads ``--calibration``; None where no cost model can be had."""
    parser = commands.add_parser("serve", help="serve a model over the OpenAI API", description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="tiny-v41 (default), smollm2-135m, a model folder or a .gguf file")
    parser.add_argument("--model", "--model-path", "-m", dest="model_option", metavar="MODEL", help="the same as MODEL")
    add_engine_arguments(parser, SERVE_OPTIONS, "server options")
    parser.set_defaults(run=lambda arguments: run(arguments, load_cost), default_log_level="info")


def run(arguments: argparse.Namespace, load_cost: LoadCost | None = None) -> int:
    options = resolve_options(arguments, SERVE_OPTIONS)
    if arguments.print_config:
        return print_config(options, arguments.json)
    logs.set_up(options["log_format"])
    if arguments.model and arguments.model_option and arguments.model != arguments.model_option:
        raise ConfigError(f"two models, {arguments.model!r} and --model {arguments.model_option!r}; give one")
    name = arguments.model or arguments.model_option or "tiny-v41"

    open_record_folder(options)
    from engine.api.formats import choose_format
    from engine.api.server import bind, tls_context
    from engine.launch import open_model, plan_launch
    from engine.sampling_defaults import read_sampling_defaults

    model = open_model(name)
    config = api_config(options, model.spec.name)
    launch = with_shadow(plan_launch(options, model.spec, name), options)
    if launch.config.is_follower:
        return follow_node_0(launch.config)
    cost = None
    if options["calibration"]:
        if load_cost is None:
            raise ConfigError("--calibration: this installation has no cost model")
        cost = load_cost(options["calibration"], name, model.spec, launch.config, options["draft_tokens"])
    setup = Setup(
        launch=launch,
        model=model,
        options=options,
        config=config,
        chat_format=choose_format(model, config.thinking),
        defaults=read_sampling_defaults(model.files.path),
        tls=tls_context(config),
        bound=bind(config.host, config.port),
        as_json=arguments.json,
        cost=cost,
    )
    with setup.bound:
        return trio.run(_serve, setup)


def with_shadow(launch: Launch, options: Resolved) -> Launch:
    """What the options say about predictions, put into the configuration. Raises ConfigError for what needs a calibration."""
    slo_ms = options["tpot_slo"]
    if not options["calibration"]:
        for given, name in ((slo_ms is not None, "tpot-slo"), (options["calibration_correction"], "calibration-correction")):
            if given:
                raise ConfigError(f"--{name} needs --calibration FILE: it goes by the cost model's prices")
        return launch
    config = launch.config
    scheduler = msgspec.structs.replace(config.scheduler, tpot_slo_s=None if slo_ms is None else slo_ms / 1000)
    config = msgspec.structs.replace(config, scheduler=scheduler, corrects_predictions=options["calibration_correction"])
    return msgspec.structs.replace(launch, config=config)


def api_config(options: Resolved, model_name: str) -> ApiConfig:
    """Raises ConfigError for keys, names and hosts that cannot be."""
    from engine.api.auth import Hosts, Keys, parse_key_file
    from engine.api.config import ApiConfig

    path = options["api_key_file"]
    keys = tuple(options["api_key"])
    if keys and options.origins["api_key"] == "command line":
        _log.warning("--api-key is visible to everybody who lists this machine's processes; --api-key-file and TWINFER_API_KEY are not")
    if path:
        keys += parse_key_file(read_text(path, MAX_KEY_FILE_BYTES), path)
    names = options["served_model_name"] or (model_name,)
    for name in names:
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise ConfigError(f"--served-model-name is {name[:80]!r}; needed: 1 to {MAX_NAME_CHARS} printable characters")
    if options["ssl_keyfile"] and not options["ssl_certfile"]:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    config = ApiConfig(
        host=options["host"],
        port=options["port"],
        served_names=tuple(dict.fromkeys(names)),
        api_keys=tuple(dict.fromkeys(keys)),
        allowed_hosts=options["allowed_hosts"],
        public_metrics=options["public_metrics"],
        metrics_compat=options["metrics_compat"],
        thinking=options["thinking"],
        max_body_bytes=options["max_body_size"],
        body_timeout_s=options["client_timeout"],
        client_timeout_s=options["client_timeout"],
        request_timeout_s=options["request_timeout"],
        keep_alive_timeout_s=options["keep_alive_timeout"],
        max_connections=options["max_connections"],
        # Red before the supervisor gives the worker up.
        health_timeout_s=options["heartbeat_timeout"] / 2,
        ssl_certfile=options["ssl_certfile"] or None,
        ssl_keyfile=options["ssl_keyfile"] or None,
    )
    Keys(config.api_keys), Hosts(config.host, config.allowed_hosts)  # what is wrong with them is said now
    return config


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that was read and checked before the engine starts."""

    launch: Launch
    model: OpenedModel
    options: Resolved
    config: ApiConfig
    chat_format: ChatFormat | None
    defaults: SamplingParams
    tls: ssl.SSLContext | None
    bound: socket.socket
    as_json: bool
    cost: StepCost | None = None


async def _serve(setup: Setup) -> int:
    from engine.actors.supervisor import open_engine
    from engine.api.app import App
    from engine.api.context import ApiContext
    from engine.api.metrics import ServerMetrics
    from engine.api.server import serve_http
    from engine.api.stats_line import log_stats
    from engine.cli.progress import LoadProgress, Progress
    from engine.cli.warm_up import warm_up

    options, config, launch = setup.options, setup.config, setup.launch
    begin_s = trio.current_time()
    metrics = ServerMetrics()
    with Progress(enabled=not options["no_progress"]) as progress:
        loading = LoadProgress(progress, len(launch.config.workers))
        async with open_engine(
            launch.config, setup.model.tokenizer, handle_signals=True, observers=(metrics,), loading=loading, cost=setup.cost
        ) as engine:
            load_s = trio.current_time() - begin_s
            # The first request with a grammar would otherwise wait for the vocabulary to be read, and all others with it.
            await engine.grammars.warm_up()
            if not options["no_warm_up"]:
                await warm_up(engine, launch.config.scheduler, lambda done, total: progress.update("warming up", done, total))
            engine.begin_recording()
            if engine.shadow is not None:
                engine.shadow.reset()  # the first steps are slower than any later one
            info = server_info(setup, engine, load_s, trio.current_time() - begin_s)
            context = ApiContext(engine, info, config, setup.chat_format, setup.defaults, metrics)
            app = App(context, log_requests=options["log_requests"])
            metrics.start(engine, info, config.metrics_compat)
            async with serve_http(app, setup.bound, setup.tls), trio.open_nursery() as nursery:
                _announce(setup, info)
                if options["stats_interval"]:
                    nursery.start_soon(log_stats, metrics, options["stats_interval"])
                await engine.wait_drained()
                nursery.cancel_scope.cancel()
    return engine.exit_code


def server_info(setup: Setup, engine: Gateway, load_s: float, ready_s: float) -> ServerInfo:
    """The one object that the summary, /server_info, /v1/models and the metrics read."""
    from engine.api.info import ServerInfo
    from engine.core.counts import count_parameters
    from engine.sampling_defaults import describe

    launch, config = setup.launch, setup.config
    scheduler, worker = launch.config.scheduler, launch.config.workers[0]
    return ServerInfo(
        version=VERSION,
        model=launch.spec.name,
        served_names=config.served_names,
        created_unix_s=int(time.time()),
        layout=worker.layout,
        dtype=worker.dtype,
        device=worker.device,
        num_parameters=count_parameters(launch.spec).total,
        weight_bytes=engine.workers[0].weight_bytes,
        kv_bytes=engine.workers[0].cache_bytes,
        kv_tokens=scheduler.cache.num_blocks * scheduler.cache.block_size,
        block_size=scheduler.cache.block_size,
        context_length=engine.context_length,
        max_running_requests=scheduler.cache.max_running,
        max_waiting_requests=scheduler.max_waiting,
        draft_tokens=scheduler.draft_tokens,
        prefix_caching=scheduler.prefix_caching,
        chat_format=setup.chat_format.name if setup.chat_format else None,
        load_s=load_s,
        warm_up_s=ready_s - load_s,
        ready_s=ready_s,
        non_default=setup.options.non_default(),
        sampling_defaults=describe(setup.defaults),
        num_api_keys=len(config.api_keys),
    )


def _announce(setup: Setup, info: ServerInfo) -> None:
    """Once clients are answered: the summary on stderr, with --json the same facts as one object on stdout."""
    from engine.api.routes import ROUTES
    from engine.api.server import base_url
    from engine.api.summary import summary, warnings

    url = base_url(setup.bound, setup.config)
    port = setup.bound.getsockname()[1]
    facts: dict[str, Any] = {"url": url, "host": setup.config.host, "port": port, **msgspec.to_builtins(info)}
    facts["full_length_requests"] = info.full_length_requests
    if logs.is_json():
        _log.info("ready", extra={"fields": facts})
    else:
        with contextlib.suppress(OSError):  # nobody can read it, which is no reason not to serve
            log(summary(info, setup.config, url, dict.fromkeys(route.path for route in ROUTES)))
    for text in warnings(info, setup.config):
        _log.warning("%s", text)
    if setup.launch.config.scheduler.clamp_warning:
        _log.warning("%s", setup.launch.config.scheduler.clamp_warning)
    if setup.as_json:
        print_facts(facts)


def print_facts(facts: dict[str, Any]) -> None:
    """To stdout, or a warning where it takes nothing: clients are answered by now, and are served on."""
    try:
        print_json(facts)
    except OSError as error:
        _log.warning("the facts of the start cannot be written to stdout: %s", error.strerror)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes the other one at the end, and would complain once more
