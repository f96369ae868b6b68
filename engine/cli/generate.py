"""``twinfer generate``: offline generation through the actors. The completion alone goes to stdout."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from engine.cli.common import (
    add_engine_arguments,
    follow_node_0,
    human_bytes,
    log,
    open_record_folder,
    resolve_options,
    sampling_params,
    show_nodes,
)
from engine.command_line import print_config, print_json
from engine.config import SAMPLING_OPTIONS
from engine.core.errors import CapacityError, RequestError, StoppedError, TwinferError
from engine.core.sampling import MAX_SEED
from engine.reading import read_text

if TYPE_CHECKING:
    from engine.actors.config import EngineConfig
    from engine.actors.gateway import Completion, Gateway, Generation
    from engine.options import Resolved
    from engine.tokenizer import Tokenizer

_logger = logging.getLogger("twinfer")
MAX_PROMPTS = 65536
MAX_SAMPLES = 128  # the gateway's bound too
MAX_PROMPTS_FILE_BYTES = 256 << 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="complete prompts offline", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="tiny-v41, smollm2-135m, a folder with config.json + safetensors, or a .gguf file")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='one JSON per line: {"prompt": text or "prompt_token_ids": ids, and any sampling option}; - reads standard input',
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the completion before this text; may be repeated")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="samples per prompt (default 1)")
    parser.add_argument("--chat", action="store_true", help="render each prompt as a user message with the model's chat template")
    add_engine_arguments(parser, SAMPLING_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    options = resolve_options(arguments, SAMPLING_OPTIONS)
    if arguments.print_config:
        return print_config(options, arguments.json)
    open_record_folder(options)
    entries = [{"prompt": prompt} for prompt in arguments.prompt]
    if arguments.prompts_file:
        entries += read_prompts(arguments.prompts_file)
    if not entries:
        raise RequestError("no prompt; give --prompt TEXT or --prompts-file FILE", param="prompt")
    if len(entries) > MAX_PROMPTS:
        raise RequestError(f"{len(entries)} prompts; at most {MAX_PROMPTS}", param="prompt")

    from engine.launch import open_model, plan_launch

    model = open_model(arguments.model)
    generations = [_generation(entry, options, arguments, model.tokenizer) for entry in entries]
    launch = plan_launch(options, model.spec, arguments.model)
    show_nodes(launch.config, arguments.log_level)
    if launch.config.is_follower:
        return follow_node_0(launch.config)
    return trio.run(_generate, launch.config, model.tokenizer, generations, arguments)


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Entries of a prompts file, every line checked. Raises RequestError naming the line."""
    text = read_text(path, MAX_PROMPTS_FILE_BYTES, RequestError).removeprefix("\ufeff")
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028 as it is
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}, line {number}: not JSON ({error})", param="prompts-file") from None
        if isinstance(entry, str):
            entry = {"prompt": entry}
        if not isinstance(entry, dict) or not (isinstance(entry.get("prompt"), str) or _is_token_list(entry.get("prompt_token_ids"))):
            raise RequestError(
                f'{path}, line {number}: needed: a JSON text, or an object with a text "prompt" or integers "prompt_token_ids"',
                param="prompts-file",
            )
        entries.append(entry)
    return entries


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _generation(entry: dict[str, Any], options: Resolved, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> Generation:
    from engine.actors.gateway import Generation

    overrides = {key: value for key, value in entry.items() if key not in ("prompt", "prompt_token_ids", "stop", "n")}
    stop = entry.get("stop", arguments.stop)
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise RequestError(f"stop is {stop!r}; needed: a text or a list of texts", param="stop")
    prompt, special = entry["prompt"] if "prompt" in entry else tuple(entry["prompt_token_ids"]), True
    if arguments.chat and isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("--chat needs a tokenizer, and the model has none", param="chat")
        prompt, special = tokenizer.render_chat([{"role": "user", "content": prompt}], add_generation_prompt=True), False
    samples = entry.get("n", arguments.n)
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES:
        raise RequestError(f"n is {samples!r}; allowed: an integer from 1 to {MAX_SAMPLES}", param="n")
    return Generation(
        prompt=prompt,
        params=sampling_params(options, **overrides),
        n=samples,
        stop=tuple(stop),
        add_special_tokens=special,
    )


async def _generate(
    config: EngineConfig, tokenizer: Tokenizer | None, generations: Sequence[Generation], arguments: argparse.Namespace
) -> int:
    from engine.actors.supervisor import open_engine

    completions: list[Completion | TwinferError | None] = [None] * len(generations)
    first_error: TwinferError | None = None
    engine: Gateway | None = None
    start_s = trio.current_time()
    try:
        async with open_engine(config, tokenizer, handle_signals=True) as engine:
            ready_s = trio.current_time() - start_s
            _logger.info("ready in %.1f s: %s", ready_s, _describe(engine))
            engine.begin_recording()
            begin_s = trio.current_time()
            if len(generations) == 1 and generations[0].n == 1 and not arguments.json:
                await _stream_one(engine, generations[0])
            else:
                # All enter together, bounded by what the gateway admits: it would refuse the rest.
                limiter = trio.CapacityLimiter(max(1, config.max_requests // max(generation.n for generation in generations)))
                async with trio.open_nursery() as nursery:
                    for index, generation in enumerate(generations):
                        nursery.start_soon(_complete, engine, generation, completions, index, limiter)
                elapsed_s = trio.current_time() - begin_s
                first_error = _print(arguments, config, generations, completions, ready_s, elapsed_s)
    except CapacityError:
        if engine is None or engine.stop_signal is None:
            raise
        raise StoppedError(engine.exit_code or 1) from None  # that is why the requests ended
    if engine.exit_code:
        return engine.exit_code
    return 0 if first_error is None else _error_code(first_error)


async def _stream_one(engine: Gateway, generation: Generation) -> None:
    async with engine.generate(generation) as stream:
        async for output in stream:
            await _write(output.text)
    await _write("\n")


def _describe(engine: Gateway) -> str:
    worker = engine.workers[0]
    weights, cache = human_bytes(worker.weight_bytes), human_bytes(worker.cache_bytes)
    return f"weights {weights}, KV {cache}, at most {engine.context_length} tokens a request"


async def _write(text: str) -> None:
    """Write in a thread: a reader that pauses (a pager) must not stop the heartbeats, nor Ctrl-C."""

    def write() -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    await trio.to_thread.run_sync(write, abandon_on_cancel=True)


async def _complete(
    engine: Gateway,
    generation: Generation,
    completions: list[Completion | TwinferError | None],
    index: int,
    limiter: trio.CapacityLimiter,
) -> None:
    """One request; its own error does not take the others down, a dead worker's reaches all of them anyway."""
    async with limiter:
        try:
            completions[index] = await engine.complete(generation)
        except TwinferError as error:
            completions[index] = error


def _print(
    arguments: argparse.Namespace,
    config: EngineConfig,
    generations: Sequence[Generation],
    completions: Sequence[Completion | TwinferError | None],
    ready_s: float,
    elapsed_s: float,
) -> TwinferError | None:
    outputs: list[dict[str, Any]] = []
    first_error: TwinferError | None = None
    for generation, completion in zip(generations, completions, strict=True):
        if completion is None or isinstance(completion, TwinferError):
            error = completion or TwinferError("stopped before the request was finished")
            first_error = first_error or error
            outputs.append({"prompt": generation.prompt, "error": {"type": type(error).__name__, "message": str(error)}})
            continue
        for index, sample in enumerate(completion.samples):
            outputs.append(
                {
                    "prompt": generation.prompt,
                    "index": index,
                    "text": sample.text,
                    "token_ids": sample.token_ids,
                    "logprobs": sample.logprobs if generation.params.logprobs is not None else None,
                    "finish_reason": sample.finish_reason,
                    "stop_reason": sample.stop_reason,
                    "seed": (completion.seed + index) % (MAX_SEED + 1),
                    "usage": msgspec.structs.replace(completion.usage, completion_tokens=len(sample.token_ids)),
                }
            )
    num_tokens = sum(len(output.get("token_ids", ())) for output in outputs)
    if arguments.json:
        print_json(
            {
                "model": config.workers[0].model,
                "layout": config.workers[0].layout,
                "outputs": outputs,
                "ready_s": ready_s,
                "elapsed_s": elapsed_s,
                "output_tokens": num_tokens,
                "output_tokens_per_s": num_tokens / elapsed_s if elapsed_s > 0 else None,
            }
        )
        return first_error
    for output in outputs:
        if "error" in output:
            log(f"twinfer generate: {output['error']['message']}")
        else:
            print(output["text"])
    log(f"{num_tokens} tokens in {elapsed_s:.2f} s")
    return first_error


def _error_code(error: TwinferError) -> int:
    return 2 if isinstance(error, RequestError) else 1
