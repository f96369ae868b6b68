"""Structured output at the door and on the wire, and requests that fail alone."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from engine.actors import grammar_check
from engine.actors.config import EngineConfig, WorkerConfig
from engine.actors.gateway import Gateway, Generation
from engine.actors.supervisor import open_engine
from engine.constraints import Choice, JsonSchema, Lark, Regex
from engine.core.cache_config import CacheConfig
from engine.core.errors import CapacityError, GenerationError, RequestError
from engine.core.sampling import SamplingParams
from engine.core.scheduler_config import SchedulerConfig
from engine.grammar import grammar_of
from engine.grammar_compiler import GrammarCompiler
from engine.launch import open_model
from engine.tokenizer import Tokenizer
from tests.actors.harness import MODULE, engine_config, until
from tests.actors.scripted_worker import Script
from tests.actors.test_engine import assert_all_free, collect, params, script_of, tokenizer

WITH_END = {"eos_token_ids": (1,)}


@contextlib.asynccontextmanager
async def engine_of(script: Script | None = None, tokens: Tokenizer | None = None, **options: Any) -> AsyncIterator[Gateway]:
    options.setdefault("scheduler", WITH_END)
    async with open_engine(engine_config(script or script_of("abc "), **options), tokens or tokenizer(), worker_module=MODULE) as engine:
        yield engine


def asks(grammar: str, **values: Any) -> Generation:
    return Generation(prompt="Once", params=params(6, grammar=grammar, **values))


async def refused(engine: Gateway, generation: Generation) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async with engine.generate(generation):
            pass
    return caught.value


async def test_what_could_leave_no_token_is_refused() -> None:
    good = grammar_of(Regex("a"))
    async with engine_of() as engine:
        for values, param in (({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 2}, "min_tokens")):
            error = await refused(engine, asks(good, **values))
            assert error.param == param
            assert "structured output" in str(error)
        assert len(await collect(engine, asks(good))) > 0
    async with engine_of(scheduler={}) as engine:
        assert "end-of-text" in str(await refused(engine, asks(good)))
    config = engine_config(Script(), scheduler=WITH_END)
    async with open_engine(config, None, worker_module=MODULE) as engine:
        error = await refused(engine, Generation(prompt=(5, 6), params=params(3, grammar=good)))
        assert "needs a tokenizer" in str(error)


async def test_bad_grammars_are_refused_at_the_door_and_remembered() -> None:
    bad = [grammar_of(Regex("(")), grammar_of(JsonSchema({"$ref": "#"})), grammar_of(Lark("start: start")), "nonsense", "x" * 300_000]
    async with engine_of() as engine:
        for _ in range(2):
            for grammar in bad:
                error = await refused(engine, asks(grammar))
                assert error.param == "response_format"
        counts = engine.grammars
        assert (counts.num_compilations, counts.num_failures, counts.num_timeouts) == (4, 4, 0)  # the last is not even tried
        assert counts.compile_s > 0
        assert engine.num_requests == 0
        await collect(engine, asks(grammar_of(Choice(("a", "b")))))
        await collect(engine, asks(grammar_of(Choice(("a", "b")))))
        assert (counts.num_compilations, counts.num_failures) == (5, 4)
        await assert_all_free(engine)


async def test_slow_grammars_cost_their_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at most are held up; whoever finds them taken is told to come back, and other requests run meanwhile."""
    go_on = threading.Event()
    build = GrammarCompiler._build

    def slow(self: GrammarCompiler, grammar: str) -> Any:
        if "slow" in grammar:
            assert go_on.wait(60)
        return build(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_build", slow)
    async with engine_of() as engine:
        await collect(engine, asks(grammar_of(Choice(("warm",)))))
        monkeypatch.setattr(grammar_check, "DEADLINE_S", 0.05)
        for number in range(2):
            error = await refused(engine, asks(grammar_of(Choice((f"slow{number}",)))))
            assert "took more than" in str(error)
        with pytest.raises(CapacityError, match="other grammars"):
            async with engine.generate(asks(grammar_of(Choice(("quick",))))):
                pass
        assert engine.grammars.num_timeouts == 2
        await collect(engine, asks(grammar_of(Choice(("warm",)))))  # compiled already
        assert len(await collect(engine, Generation(prompt="Once", params=params(6)))) > 0
        monkeypatch.undo()
        go_on.set()
        # What was given up has come to its end meanwhile, and is known.
        await until(lambda: engine.grammars._threads.borrowed_tokens == 0)
        await collect(engine, asks(grammar_of(Choice(("slow0",)))))
        assert engine.grammars.num_compilations == 3


async def test_workers_hear_of_a_grammar_at_once_even_when_idle(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    grammars = [grammar_of(Choice((f"number {index}",))) for index in range(3)]
    script = script_of("abc ", prepared_file=str(tmp_path / "one"))
    async with engine_of(script) as engine:
        engine._scheduler.prepare(grammars[0])  # nothing else is said to the worker
        await until(lambda: files[0].exists() and files[0].read_text().splitlines() == grammars[:1])
        for grammar in grammars[1:]:
            await collect(engine, asks(grammar))
        assert files[0].read_text().splitlines() == grammars
        bad = grammar_of(Regex("("))
        await refused(engine, asks(bad))
        await until(lambda: files[0].read_text().splitlines() == [*grammars, bad])


async def test_announcements_are_bounded(tmp_path: Path) -> None:
    """However many are made while a step runs, the scheduler keeps the last of them."""
    script = script_of("abc ", prepared_file=str(tmp_path / "one"))
    async with engine_of(script) as engine:
        for index in range(1000):
            engine._scheduler.prepare(str(index))
        assert len(engine._scheduler._hints) <= 64
        await until(lambda: (tmp_path / "one").exists() and (tmp_path / "one").read_text().splitlines()[-1] == "999")


@pytest.mark.parametrize("n", [1, 3])
async def test_a_failed_request_is_the_only_one(n: int) -> None:
    text = "never again"
    unlucky = tokenizer().encode(text)[-1]
    script = script_of("abc ", error_token=unlucky)
    assert unlucky not in script.tokens
    outcomes: dict[str, object] = {}

    async with engine_of(script) as engine:

        async def run(prompt: str, samples: int) -> None:
            try:
                outcomes[prompt] = await engine.complete(Generation(prompt=prompt, params=params(12), n=samples))
            except GenerationError as error:
                outcomes[prompt] = error

        async with trio.open_nursery() as nursery:
            for prompt in ("one", text, "two"):
                nursery.start_soon(run, prompt, n)
        assert isinstance(outcomes[text], GenerationError)
        assert "scripted failure" in str(outcomes[text])
        for prompt in ("one", "two"):
            completion = outcomes[prompt]
            assert [len(sample.token_ids) for sample in completion.samples] == [12] * n  # type: ignore[attr-defined]
        await assert_all_free(engine)
        assert engine.health.ok


async def test_a_schema_through_a_real_worker() -> None:
    """The packaged model, its tokenizer, two processes: what comes back is what was asked for."""
    opened = open_model("tiny-v41")
    assert opened.tokenizer is not None
    spec = opened.spec
    cache = CacheConfig(num_blocks=16, block_size=128, max_running=4, max_batched_tokens=64, context_length=512, num_tails=4)
    config = EngineConfig(
        workers=(WorkerConfig(name="worker-0", model="tiny-v41", cache=cache, dtype="float32", num_threads=1),),
        scheduler=SchedulerConfig(cache=cache, eos_token_ids=spec.eos_token_ids, has_sequence_state=spec.has_sequence_state),
    )
    schema = {
        "type": "object",
        "properties": {"verb": {"enum": ["go", "come"]}},
        "required": ["verb"],
        "additionalProperties": False,
    }
    async with open_engine(config, opened.tokenizer) as engine:
        sampling = SamplingParams(max_tokens=90, grammar=grammar_of(JsonSchema(schema)), logprobs=0)
        completion = await engine.complete(Generation(prompt="And the LORD said", params=sampling, n=2))
        bad = await refused(engine, asks(grammar_of(JsonSchema({"type": "foo"}))))
        assert "Invalid type" in str(bad)
    for sample in completion.samples:
        assert sample.finish_reason in ("stop", "length")
        if sample.finish_reason == "stop":
            value = json.loads(sample.text)
            assert value in ({"verb": "go"}, {"verb": "come"})
    assert any(sample.finish_reason == "stop" for sample in completion.samples)
