"""Cost models, workloads and an observer for the tests of the simulator."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.core.cache_config import CacheConfig
from engine.core.events import Event, LogEvent, encode_lines, expand
from engine.core.plan import StepPlan, StepResult
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step_cost import StepPrice
from twin.config import TwinConfig
from twin.workload.types import SimRequest

CACHE = {"num_blocks": 64, "block_size": 4, "max_running": 4, "max_batched_tokens": 64, "context_length": 128, "max_draft_tokens": 4}


def scheduler_config(**changes: Any) -> SchedulerConfig:
    cache = {**CACHE, **{name: changes.pop(name) for name in list(changes) if name in CacheConfig.__struct_fields__}}
    return SchedulerConfig(cache=CacheConfig(**cache), **changes)


def twin_config(**changes: Any) -> TwinConfig:
    own = {name: changes.pop(name) for name in list(changes) if name in TwinConfig.__struct_fields__}
    return TwinConfig(scheduler=scheduler_config(**changes), **own)


class Cost:
    """``seconds`` of a plan, and bounds a tenth around it."""

    def __init__(self, seconds: Callable[[StepPlan], float]) -> None:
        self._seconds = seconds

    def price(self, plan: StepPlan) -> StepPrice:
        step_s = self._seconds(plan)
        return StepPrice(step_s, 0.9 * step_s, 1.1 * step_s, {})


def constant(step_s: float) -> Cost:
    return Cost(lambda _plan: step_s)


class GivenWorkload:
    """Requests as listed; ``following`` are those that the end of a request brings, by its index, ``pause_s`` later."""

    def __init__(self, requests: Sequence[SimRequest], following: dict[int, SimRequest] | None = None, pause_s: float = 0.0) -> None:
        self._requests = requests
        self._following = following or {}
        self._pause_s = pause_s
        self.num_requests = len(requests) + len(self._following)

    def arrivals(self) -> Iterator[SimRequest]:
        yield from self._requests

    def follow_up(self, request: SimRequest, end_s: float) -> SimRequest | None:
        given = self._following.get(request.index)
        return None if given is None else at(given, end_s + self._pause_s)


class ClosedLoop:
    """``concurrency`` at any time, all alike."""

    def __init__(self, num_requests: int, concurrency: int, num_prompt: int, output_tokens: int) -> None:
        self.num_requests = num_requests
        self._concurrency = min(concurrency, num_requests)
        self._num_prompt, self._output_tokens = num_prompt, output_tokens
        self._next = self._concurrency

    def arrivals(self) -> Iterator[SimRequest]:
        return (sim_request(index, 0.0, self._num_prompt, self._output_tokens) for index in range(self._concurrency))

    def follow_up(self, _request: SimRequest, end_s: float) -> SimRequest | None:
        if self._next == self.num_requests:
            return None
        self._next += 1
        return sim_request(self._next - 1, end_s, self._num_prompt, self._output_tokens)


def sim_request(
    index: int, arrival_s: float, num_prompt: int, output_tokens: int, max_tokens: int | None = None, **more: Any
) -> SimRequest:
    """A prompt that begins with its index, so that no two share anything; an answer that ends by length unless ``max_tokens`` is given."""
    prompt = more.pop("prompt", None) or array("i", [index + 2, *[1] * (num_prompt - 1)])
    return SimRequest(index, arrival_s, prompt, output_tokens, output_tokens if max_tokens is None else max_tokens, **more)


def at(request: SimRequest, arrival_s: float) -> SimRequest:
    return SimRequest(
        request.index, arrival_s, request.prompt, request.output_tokens, request.max_tokens, cancel_after_s=request.cancel_after_s
    )


class Log:
    """What every replica says; ``committed_s`` are the times of the first one's commits."""

    def __init__(self) -> None:
        self.by_replica: dict[int, list[Event]] = defaultdict(list)
        self.plans: dict[int, list[StepPlan]] = defaultdict(list)
        self.planned_s: dict[int, list[float]] = defaultdict(list)
        self.committed_s: list[float] = []

    def planned(self, replica: int, plan: StepPlan, now_s: float) -> None:
        self.plans[replica].append(plan)
        self.planned_s[replica].append(now_s)

    def committed(self, replica: int, _plan: StepPlan, _result: StepResult, now_s: float) -> None:
        if replica == 0:
            self.committed_s.append(now_s)

    def events(self, replica: int, events: Sequence[LogEvent]) -> None:
        self.by_replica[replica].extend(expand(events))

    @property
    def all(self) -> list[Event]:
        return [event for replica in sorted(self.by_replica) for event in self.by_replica[replica]]

    def encoded(self) -> bytes:
        return b"".join(encode_lines(self.by_replica[replica]) for replica in sorted(self.by_replica))
