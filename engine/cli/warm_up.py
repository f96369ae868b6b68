"""Short generations before the first client: what is compiled, allocated or read lazily is so before anybody waits for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import trio

from engine.actors.gateway import Gateway, Generation
from engine.core.errors import StoppedError
from engine.core.sampling import SamplingParams
from engine.core.scheduler_config import SchedulerConfig

# A prompt that is little more than a decode step, and one of several blocks, as far as the context has room.
PROMPT_TOKENS = (8, 256)
BATCH_SIZES = (1, 8)
NEW_TOKENS = 4


async def warm_up(engine: Gateway, config: SchedulerConfig, report: Callable[[int, int], None]) -> None:
    """Exercise prefill and decode in several shapes. Nothing of it can be found by a client: its KV has a namespace of its own.

    Raises StoppedError where a stop signal ended it.
    """
    namespace = secrets.token_hex(16)
    longest = min(engine.context_length - NEW_TOKENS, config.cache.max_batched_tokens)
    prompts = sorted({max(1, min(length, longest)) for length in PROMPT_TOKENS})
    batches = sorted({min(size, config.cache.max_running) for size in BATCH_SIZES})
    rounds = [(length, 1) for length in prompts] + [(prompts[0], size) for size in batches if size > 1]
    for done, (length, size) in enumerate(rounds):
        report(done, len(rounds))
        try:
            async with trio.open_nursery() as nursery:
                for index in range(size):
                    nursery.start_soon(_generate, engine, length, index, namespace)
        except BaseExceptionGroup:
            if engine.stop_signal is None:
                raise
            raise StoppedError(128 + engine.stop_signal) from None  # that is why its requests ended
    report(len(rounds), len(rounds))


async def _generate(engine: Gateway, length: int, index: int, namespace: str) -> None:
    # Half of them greedy, half sampled: those are different paths.
    params = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, temperature=float(index % 2), top_p=0.9 if index % 2 else 1.0, seed=index
    )
    prompt = tuple((index + position) % engine.vocab_size for position in range(length))
    await engine.complete(Generation(prompt=prompt, params=params, cache_salt=namespace))
