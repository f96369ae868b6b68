"""``twinfer chat``: a conversation in the terminal, with a running server or with MODEL directly.

Type a message and Enter; a backslash at the end of a line goes on with the next one. Ctrl-C stops the answer, Ctrl-D leaves. With piped
input every line is a message and the answers alone go to stdout. /help lists the commands.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from engine.cli.chat_backend import Message, OpenBackend, open_engine_backend, open_server_backend
from engine.cli.chat_repl import Repl
from engine.cli.chat_session import ChatSession
from engine.cli.common import add_engine_arguments, log, open_record_folder, resolve_options
from engine.cli.remote import DEFAULT_BASE_URL, add_key_arguments, check_base_url, read_api_key
from engine.command_line import print_config, print_json
from engine.config import SAMPLING_OPTIONS
from engine.core.errors import ConfigError
from engine.core.sampling import SamplingParams
from engine.options import Resolved

# Log-probabilities are for programs.
OPTIONS = tuple(option for option in SAMPLING_OPTIONS if option.key != "logprobs")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "model_path", metavar="MODEL", nargs="?", help="a model to run here: as for generate; without it, a server is asked"
    )
    parser.add_argument("--base-url", "--url", metavar="URL", help=f"a running server (default {DEFAULT_BASE_URL})")
    parser.add_argument("--model", "-m", metavar="NAME", help="the server's model; default: the first of /v1/models")
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="the system message")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be repeated")
    parser.add_argument("--thinking", default="auto", choices=("auto", "on", "off"), help="reasoning of models that can switch it")
    add_key_arguments(parser)
    add_engine_arguments(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options = resolve_options(arguments, OPTIONS)
    if arguments.print_config:
        return print_config(options, arguments.json)
    if arguments.model_path is not None and (arguments.base_url is not None or arguments.model is not None):
        raise ConfigError(f"both MODEL ({arguments.model_path}) and a server (--base-url, --model) are given; leave one out")
    open_backend = _server(arguments, options) if arguments.model_path is None else _engine(arguments, options)
    messages: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    signal.signal(signal.SIGTERM, _terminated)
    with ChatSession(open_backend) as session:
        repl = Repl(session, messages, is_json=arguments.json)
        code = repl.run()
    if arguments.json:
        print_json({"model": repl.model, "turns": repl.turns})
    return code


def _terminated(number: int, frame: Any) -> NoReturn:
    del frame
    sys.exit(128 + number)


def _given(options: Resolved) -> dict[str, Any]:
    """The sampling values that somebody asked for; the others are the server's, or the model's own."""
    return {option.key: options[option.key] for option in OPTIONS if options.origins[option.key] != "default"}


def _server(arguments: argparse.Namespace, options: Resolved) -> OpenBackend:
    base_url = check_base_url(arguments.base_url or DEFAULT_BASE_URL)
    body = _given(options)
    if "max_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_tokens")
    if arguments.stop:
        body["stop"] = arguments.stop
    if arguments.thinking != "auto":
        # Templates call it by either name.
        body["chat_template_kwargs"] = {"enable_thinking": arguments.thinking == "on", "thinking": arguments.thinking == "on"}
    return functools.partial(open_server_backend, base_url, read_api_key(arguments), arguments.model, body)


def _engine(arguments: argparse.Namespace, options: Resolved) -> OpenBackend:
    from engine.api.formats import choose_format
    from engine.launch import open_model, plan_launch
    from engine.sampling_defaults import read_sampling_defaults

    open_record_folder(options)
    model = open_model(arguments.model_path)
    chat_format = choose_format(model, arguments.thinking)
    if chat_format is None:
        raise ConfigError(f"{arguments.model_path} has no chat template; twinfer generate completes plain text")
    launch = plan_launch(options, model.spec, arguments.model_path)
    if launch.config.nodes is not None:
        raise ConfigError("chat runs a model on this machine; for --nnodes start twinfer serve on them, and chat with its URL")
    given = _given(options)
    limit_tokens = given.pop("max_tokens", None)
    defaults = read_sampling_defaults(Path(model.files.path))
    params = SamplingParams(**{name: getattr(defaults, name) for name in defaults.__struct_fields__} | given)
    log(f"loading {arguments.model_path} ...")
    return functools.partial(open_engine_backend, launch.config, model.tokenizer, chat_format, params, limit_tokens, tuple(arguments.stop))
