"""One node of a replica as a process: ``python -m tests.parallel.node_process CONFIG.json WORKER_MODULE``, exit codes as of ``twinfer``.

Node 0 says ``ready`` and what it knows of its ranks, then reads requests (prompt token ids) and writes tokens or errors, all as lines of
JSON; it ends at the end of its input.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import msgspec
import trio

from engine.actors.config import EngineConfig
from engine.actors.follower import follow
from engine.actors.gateway import Gateway, Generation
from engine.actors.supervisor import open_engine
from engine.core.errors import ConfigError, StoppedError, TwinferError
from engine.core.sampling import SamplingParams


class Ask(msgspec.Struct, frozen=True):
    prompt: tuple[int, ...]
    max_tokens: int = 8


def say(**values: object) -> None:
    print(msgspec.json.encode(values).decode(), flush=True)


async def lead(config: EngineConfig, module: str) -> int:
    async with open_engine(config, worker_module=module, handle_signals=True) as engine:
        say(ready=True, infos=engine.workers, names=sorted(engine.heartbeat_ages_s()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_all, engine, nursery.cancel_scope)
            await engine.wait_drained()
            nursery.cancel_scope.cancel()
    return engine.exit_code


async def answer_all(engine: Gateway, scope: trio.CancelScope) -> None:
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        ask = msgspec.json.decode(line, type=Ask)
        tokens: list[int] = []
        try:
            params = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
            async with engine.generate(Generation(prompt=ask.prompt, params=params)) as stream:
                async for output in stream:
                    if not tokens:
                        say(begun=True)
                    tokens += output.token_ids
            say(tokens=tokens, ages=engine.heartbeat_ages_s())
        except TwinferError as error:
            say(error=str(error))
    scope.cancel()


def main(path: str, module: str) -> int:
    logging.basicConfig(level="INFO", format="%(message)s")
    config = msgspec.json.decode(Path(path).read_bytes(), type=EngineConfig)
    try:
        if config.is_follower:
            trio.run(partial(follow, config, worker_module=module))
            return 0
        return trio.run(lead, config, module)
    except TwinferError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, StoppedError) else 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
