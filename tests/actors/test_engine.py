"""The whole tree with scripted workers: what comes out, what is refused, what is freed when a client leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
import trio

from engine.actors.config import EngineConfig, GatewayConfig
from engine.actors.gateway import Gateway, Generation
from engine.actors.stream import Output
from engine.actors.supervisor import open_engine
from engine.core.cache_config import CacheConfig
from engine.core.errors import CapacityError, ConfigError, RequestError
from engine.core.events import Arrived, Event, Finished, StepCommitted, StepPlanned, TokensEmitted
from engine.core.plan import StepPlan, StepResult
from engine.core.sampling import SamplingParams
from engine.tokenizer import Tokenizer
from tests.actors.harness import MODULE, children, engine_config, until
from tests.actors.scripted_worker import Script
from tests.test_tokenizer import byte_level_json

TEXT = "The cat 🐈 sat on the mat. "


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_json(), eos_token_ids=(1,))


def script_of(text: str, **values: object) -> Script:
    """A worker that says ``text`` over and over, one byte-level token at a time."""
    return Script(tokens=tuple(tokenizer().encode(text)), **values)  # type: ignore[arg-type]


def params(max_tokens: int = 10, **values: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **values)  # type: ignore[arg-type]


async def collect(engine: Gateway, generation: Generation) -> list[Output]:
    async with engine.generate(generation) as stream:
        return [output async for output in stream]


async def assert_all_free(engine: Gateway) -> None:
    """Every request is gone and every block is free or merely cached."""
    await until(lambda: engine.num_requests == 0)
    core = engine._scheduler.core
    await until(lambda: core.num_uncommitted == 0)
    core.check()
    for rank in core.stats().ranks:
        assert rank.num_running == 0
        assert rank.free_blocks + rank.cached_only_blocks == rank.total_blocks


async def test_text_usage_and_end() -> None:
    script = script_of(TEXT)
    async with open_engine(engine_config(script), tokenizer(), worker_module=MODULE) as engine:
        prompt = "Say: "
        num_prompt = len(tokenizer().encode(prompt))
        outputs = await collect(engine, Generation(prompt=prompt, params=params(30)))
        ids = [token for output in outputs for token in output.token_ids]
        expected = [script.tokens[position % len(script.tokens)] for position in range(num_prompt, num_prompt + 30)]
        assert ids == expected
        assert "".join(output.text for output in outputs) == "".join(_decoded(expected))
        assert all(output.text for output in outputs[:-1])  # no empty pieces on the way
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        usage = outputs[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (num_prompt, 30, 0)
        completion = await engine.complete(Generation(prompt=prompt, params=params(30)))
        assert completion.samples[0].text == "".join(output.text for output in outputs)
        assert completion.samples[0].token_ids == tuple(ids)
        await assert_all_free(engine)
    assert children() == []


def _decoded(ids: Sequence[int]) -> list[str]:
    decoder = tokenizer().decoder()
    return [*(decoder.push(token) for token in ids), decoder.flush()]


async def test_prefix_hit_is_reported() -> None:
    async with open_engine(engine_config(Script()), worker_module=MODULE) as engine:
        prompt = tuple(range(40))
        first = await engine.complete(Generation(prompt=prompt))
        second = await engine.complete(Generation(prompt=prompt))
        salted = await engine.complete(Generation(prompt=prompt, cache_salt="mine"))
        assert (first.usage.cached_tokens, second.usage.cached_tokens, salted.usage.cached_tokens) == (0, 36, 0)


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stop", ["sat", "t. T", "🐈", "mat. "])
async def test_stop_strings(stop: str, include_stop: bool) -> None:
    async with open_engine(engine_config(script_of(TEXT)), tokenizer(), worker_module=MODULE) as engine:
        whole = await engine.complete(Generation(prompt=(5,), params=params(120)))
        generation = Generation(prompt=(5,), params=params(120), stop=(stop, "never"), include_stop=include_stop)
        outputs = await collect(engine, generation)
        shown = "".join(output.text for output in outputs)
        end = whole.samples[0].text.index(stop) + (len(stop) if include_stop else 0)
        assert shown == whole.samples[0].text[:end]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
        assert outputs[-1].usage is not None
        assert outputs[-1].usage.completion_tokens == sum(len(output.token_ids) for output in outputs) < 60
        await assert_all_free(engine)


async def test_end_of_text_and_stop_tokens_are_not_text() -> None:
    ids = tokenizer().encode("abcdef")
    script = Script(tokens=(*ids, 1))
    config = engine_config(script, scheduler={"eos_token_ids": (1,)})
    async with open_engine(config, tokenizer(), worker_module=MODULE) as engine:
        ended = (await engine.complete(Generation(prompt=(ids[0],), params=params(50)))).samples[0]
        assert (ended.text, ended.finish_reason, ended.stop_reason) == ("bcdef", "stop", None)
        assert ended.token_ids[-1] == 1
        stopped = (await engine.complete(Generation(prompt=(ids[0],), params=params(50, stop_token_ids=(ids[-1],))))).samples[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", ids[-1])
        assert stopped.text == tokenizer().decode(ids[1:-1])
        ignored = (await engine.complete(Generation(prompt=(ids[0],), params=params(50, ignore_eos=True)))).samples[0]
        assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 50)


async def test_logprobs_travel_with_their_tokens() -> None:
    async with open_engine(engine_config(script_of(TEXT)), tokenizer(), worker_module=MODULE) as engine:
        for output in await collect(engine, Generation(prompt=(5,), params=params(40, logprobs=1), stop=("mat",))):
            assert [entry.top_ids[0] for entry in output.logprobs] == list(output.token_ids)


async def test_samples() -> None:
    async with open_engine(engine_config(script_of(TEXT)), tokenizer(), worker_module=MODULE) as engine:
        completion = await engine.complete(Generation(prompt="Say", params=params(20), n=3))
        assert len({sample.text for sample in completion.samples}) == 1
        assert completion.usage.completion_tokens == 60
        await assert_all_free(engine)


async def test_seeds_are_drawn_and_told() -> None:
    async with open_engine(engine_config(Script()), worker_module=MODULE) as engine:
        seeds = {(await engine.complete(Generation(prompt=(1,)))).seed for _ in range(4)}
        assert len(seeds) == 4
        assert (await engine.complete(Generation(prompt=(1,), params=params(seed=9)))).seed == 9
    told = []
    for _ in range(2):
        async with open_engine(engine_config(Script(), gateway=GatewayConfig(seed=3)), worker_module=MODULE) as engine:
            told.append([(await engine.complete(Generation(prompt=(1,)))).seed for _ in range(3)])
    assert told[0] == told[1]
    assert len(set(told[0])) == 3


async def test_without_a_tokenizer_tokens_still_flow() -> None:
    async with open_engine(engine_config(Script(tokens=(3, 4))), worker_module=MODULE) as engine:
        outputs = await collect(engine, Generation(prompt=(1, 2), params=params(5)))
        assert [token for output in outputs for token in output.token_ids] == [3, 4, 3, 4, 3]
        with pytest.raises(RequestError, match="tokenizer"):
            await engine.complete(Generation(prompt="text"))
        with pytest.raises(RequestError, match="tokenizer"):
            await engine.complete(Generation(prompt=(1,), stop=("x",)))


async def test_many_at_once_on_two_ranks() -> None:
    script = script_of(TEXT)
    cache = CacheConfig(num_blocks=40, block_size=4, max_running=4, max_batched_tokens=16, context_length=100)
    async with open_engine(engine_config(script, num_ranks=2, cache=cache), tokenizer(), worker_module=MODULE) as engine:
        results: dict[int, tuple[int, ...]] = {}

        async def one(index: int) -> None:
            prompt = tuple(range(2, 3 + index))
            completion = await engine.complete(Generation(prompt=prompt, params=params(20), n=1 + index % 2))
            for sample in completion.samples:
                results[index] = sample.token_ids
                assert sample.token_ids == tuple(script.tokens[(len(prompt) + i) % len(script.tokens)] for i in range(20))

        async with trio.open_nursery() as nursery:
            for index in range(40):
                nursery.start_soon(one, index)
        assert len(results) == 40
        await assert_all_free(engine)


async def test_long_prompts_are_tokenised_in_a_thread() -> None:
    cache = CacheConfig(num_blocks=8000, block_size=4, max_running=4, max_batched_tokens=8192, context_length=30_000)
    async with open_engine(engine_config(Script(vocab_size=500), cache=cache), tokenizer(), worker_module=MODULE) as engine:
        completion = await engine.complete(Generation(prompt="word " * 3000))
        assert completion.usage.prompt_tokens > 3000


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": (1, -1)}, "prompt"),
        ({"prompt": (1000,)}, "prompt"),
        ({"prompt": (2**63,)}, "prompt"),
        ({"prompt": (True,)}, "prompt"),
        ({"prompt": (1.5,)}, "prompt"),
        ({"prompt": tuple(range(200))}, "prompt"),
        ({"prompt": "x" * 2000}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 2000,)}, "stop"),
        ({"stop": ("x",) * 100}, "stop"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"params": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"params": SamplingParams(max_tokens=2**63)}, "max_tokens"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"params": SamplingParams(top_p=0.0)}, "top_p"),
        ({"params": SamplingParams(seed=-1)}, "seed"),
        ({"params": SamplingParams(stop_token_ids=(1000,))}, "stop_token_ids"),
    ],
)
async def test_bad_values_are_refused_by_name(refusing: Gateway, values: dict[str, object], param: str) -> None:
    generation = Generation(**({"prompt": (1, 2)} | values))  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        await refusing.complete(generation)
    assert caught.value.param == param
    assert refusing.num_requests == 0


@pytest.fixture
async def refusing(nursery: trio.Nursery) -> Gateway:
    """One engine for a test that only asks to be refused."""

    async def run(task_status: trio.TaskStatus[Gateway]) -> None:
        config = engine_config(Script(), gateway=GatewayConfig(max_prompt_chars=1000))
        async with open_engine(config, tokenizer(), worker_module=MODULE) as engine:
            task_status.started(engine)
            await trio.sleep_forever()

    engine: Gateway = await nursery.start(run)
    return engine


async def test_the_door_is_bounded() -> None:
    config = engine_config(Script(step_s=0.005), gateway=GatewayConfig(max_requests=3))
    async with open_engine(config, worker_module=MODULE) as engine, engine.generate(Generation(prompt=(1,), params=params(150), n=3)):
        with pytest.raises(CapacityError, match="3 requests are running or waiting; the limit is 3"):
            await engine.complete(Generation(prompt=(1,)))
    config = engine_config(Script(), scheduler={"max_waiting": 2})  # and 8 slots
    async with open_engine(config, worker_module=MODULE) as engine:
        refused = 0

        async def one() -> None:
            nonlocal refused
            try:
                assert (await engine.complete(Generation(prompt=(1,)))).usage.completion_tokens == 16
            except CapacityError:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(15):  # all before the first step
                nursery.start_soon(one)
        assert refused == 5


async def test_config_is_checked_before_anything_starts() -> None:
    good = engine_config(Script())
    bad = [
        msgspec.structs.replace(good, workers=()),
        msgspec.structs.replace(good, workers=good.workers * 2),
        msgspec.structs.replace(good, supervision=msgspec.structs.replace(good.supervision, step_timeout_s=0.0)),
        msgspec.structs.replace(good, supervision=msgspec.structs.replace(good.supervision, heartbeat_timeout_s=float("nan"))),
        msgspec.structs.replace(good, supervision=msgspec.structs.replace(good.supervision, shutdown_timeout_s=-1.0)),
        msgspec.structs.replace(good, gateway=GatewayConfig(max_requests=0)),
        msgspec.structs.replace(good, scheduler=msgspec.structs.replace(good.scheduler, max_waiting=0)),
    ]
    for config in bad:
        await _refused(config)
    assert children() == []


async def _refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError):
        async with open_engine(config, worker_module=MODULE):
            raise AssertionError("it opened")


# -- leaving ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_frees_everything(num_outputs: int, n: int) -> None:
    async with open_engine(engine_config(Script(step_s=0.002)), worker_module=MODULE) as engine:
        async with engine.generate(Generation(prompt=tuple(range(30)), params=params(150), n=n)) as stream:
            for _ in range(num_outputs):
                await stream.__anext__()
        await assert_all_free(engine)
        assert (await engine.complete(Generation(prompt=(1,)))).usage.completion_tokens == 16


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.004, 0.01, 0.03])
async def test_cancelled_at_any_moment(delay_s: float) -> None:
    cache = CacheConfig(num_blocks=64, block_size=4, max_running=2, max_batched_tokens=8, context_length=200)
    async with open_engine(engine_config(Script(step_s=0.003), cache=cache), tokenizer(), worker_module=MODULE) as engine:

        async def one(index: int) -> None:
            with trio.move_on_after(delay_s * (1 + index / 3)):  # some while waiting, some in a prompt's chunks, some decoding
                await engine.complete(Generation(prompt=tuple(range(60)), params=params(100), n=1 + index % 2))

        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(one, index)
        await assert_all_free(engine)


async def test_slow_reader_is_dropped_and_nobody_waits_for_it() -> None:
    config = engine_config(Script(), gateway=GatewayConfig(max_buffered_outputs=20))
    async with open_engine(config, worker_module=MODULE) as engine:
        async with engine.generate(Generation(prompt=(1,), params=params(190))) as slow:
            other = await engine.complete(Generation(prompt=(2,), params=params(190)))
            assert other.usage.completion_tokens == 190
            await assert_all_free(engine)  # its blocks are back though it is still there
            for _ in range(20):
                assert (await slow.__anext__()).token_ids
            with pytest.raises(CapacityError, match="20 outputs behind"):
                await slow.__anext__()
        await assert_all_free(engine)


async def test_body_error_comes_out_bare() -> None:
    async def body() -> None:
        config = engine_config(Script(step_s=0.01))
        async with (
            open_engine(config, worker_module=MODULE) as engine,
            engine.generate(Generation(prompt=(1,), params=params(150))) as stream,
        ):
            await stream.__anext__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert children() == []


# -- the log ------------------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.log: list[Event] = []
        self.planned_steps: list[int] = []
        self.committed_steps: list[int] = []

    def planned(self, plan: StepPlan, now_s: float) -> None:
        del now_s
        self.planned_steps.append(plan.step)

    def committed(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        del now_s
        assert result.step == plan.step
        assert result.forward_s > 0
        self.committed_steps.append(plan.step)

    def events(self, events: Sequence[Event]) -> None:
        self.log.extend(events)


async def test_observers_see_every_step_and_event_in_order() -> None:
    recorder = Recorder()
    async with open_engine(engine_config(Script(step_s=0.001)), worker_module=MODULE, observers=[recorder]) as engine:
        await engine.complete(Generation(prompt=(1,), params=params(30), n=2))
        async with engine.generate(Generation(prompt=(2,), params=params(30))) as stream:
            await stream.__anext__()
        await assert_all_free(engine)
    assert recorder.planned_steps == list(range(len(recorder.planned_steps)))
    assert recorder.committed_steps == recorder.planned_steps
    times = [event.now_s for event in recorder.log if not isinstance(event, StepPlanned)]
    assert times == sorted(times)
    assert sum(isinstance(event, StepCommitted) for event in recorder.log) == len(recorder.committed_steps)
    assert sum(len(event.tokens) for event in recorder.log if isinstance(event, TokensEmitted) and event.request < 2) == 60
    assert [event.reason for event in recorder.log if isinstance(event, Finished)] == ["length", "length", "abort"]
    assert json.dumps(len(recorder.log))


async def test_a_request_has_arrived_when_it_came_not_when_it_was_read() -> None:
    recorder = Recorder()
    async with open_engine(engine_config(Script(step_s=0.05)), worker_module=MODULE, observers=[recorder]) as engine:
        async with engine.generate(Generation(prompt=(1,), params=params(30))) as first:
            await first.__anext__()  # from now on a step is always under way
            async with engine.generate(Generation(prompt=(2,), params=params(3))) as second:
                entered_s = trio.current_time()
                await second.__anext__()
        arrived = [event for event in recorder.log if isinstance(event, Arrived)]
        assert arrived[1].now_s <= entered_s


async def test_progress_of_loading_and_signs_of_life() -> None:
    told: list[tuple[str, int, int]] = []
    async with open_engine(
        engine_config(Script()), worker_module=MODULE, loading=lambda name, done, total: told.append((name, done, total))
    ) as engine:
        assert told == [("worker-0", 0, 100), ("worker-0", 100, 100)]
        ages_s = engine.heartbeat_ages_s()
        assert set(ages_s) == {"scheduler", "worker-0"}
        assert ages_s["scheduler"] == 0.0
        # Between two answers it grows, and each answer takes it back.
        await until(lambda: engine.heartbeat_ages_s()["worker-0"] > 0.05)
        await until(lambda: engine.heartbeat_ages_s()["worker-0"] < 0.05)
