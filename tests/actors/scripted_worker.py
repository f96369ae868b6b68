"""A worker process without a model: the product's worker loop around a runner that follows a script. Starts in tens of milliseconds.

The script is JSON in ``WorkerConfig.model``. Tokens are the script's ``tokens`` in turn, by position; every fault that a test
needs is a step number or a request's prompt token.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence

import msgspec

from engine.actors.config import WorkerConfig
from engine.actors.worker_main import LoadReport, run_worker
from engine.core.errors import ConfigError
from engine.core.expert_map import ExpertMap
from engine.core.plan import ItemResult, RankPlan, RankResult, RequestId, StepPeers, TokenLogprobs
from engine.core.rank_counters import RankCounters
from engine.core.sampling import SamplingParams


class Script(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...] = (7,)
    step_s: float = 0.0
    token_s: float = 0.0  # more, for each token of the rank with most: ranks that exchange experts wait for it
    vocab_size: int = 1000
    start_s: float = 0.0
    start_error: str = ""  # a ConfigError
    raise_at_step: int | None = None
    kill_at_step: int | None = None
    stop_at_step: int | None = None  # SIGSTOP
    hang_at_step: int | None = None
    exit_at_step: int | None = None
    fault_rank: int = 0  # the data rank that the faults happen on
    once_file: str = ""  # a fault happens only while this file does not exist, and creates it
    hang_at_close: bool = False
    expert_choices: tuple[tuple[int, ...], ...] = ()  # reported each time
    rebalanced_file: str = ""  # one line for each command to move experts
    error_token: int | None = None  # requests with this prompt token fail at their first token
    prepared_file: str = ""  # grammars announced, one a line
    accepted: tuple[int, ...] = (0,)  # drafts, in turn by position
    components: tuple[tuple[str, float], ...] = (("other", 0.25),)  # seconds reported of each step
    timed_components: tuple[tuple[str, float], ...] = ()  # of a step that is to be timed


class ScriptedRunner:
    def __init__(self, config: WorkerConfig, report: LoadReport) -> None:
        self.script = msgspec.json.decode(config.model, type=Script)
        report(0, 100)
        time.sleep(self.script.start_s)
        report(100, 100)
        if self.script.start_error:
            raise ConfigError(self.script.start_error)
        self.vocab_size = self.script.vocab_size
        self.context_length = config.cache.context_length
        self.weight_bytes = 10
        self.cache_bytes = config.cache.num_blocks * 1000
        self._data_rank = config.data_rank
        self._faulty = config.data_rank == self.script.fault_rank
        self._params: dict[RequestId, SamplingParams] = {}
        self._doomed: set[RequestId] = set()
        self._num_tokens: dict[int, int] = {}
        self.timer: object = None

    def register(self, request: RequestId, tokens: Sequence[int], params: SamplingParams, seed: int) -> None:
        assert request not in self._params
        assert params.seed is not None
        assert tokens
        assert seed >= 0
        self._params[request] = params
        if self.script.error_token in tokens:
            self._doomed.add(request)

    def prepare(self, grammar: str) -> None:
        if self.script.prepared_file:
            with open(self.script.prepared_file, "a") as file:
                file.write(grammar + "\n")

    def forget(self, request: RequestId) -> None:
        del self._params[request]
        self._doomed.discard(request)

    def execute(self, step: int, plan: RankPlan, peers: StepPeers | None) -> RankResult:
        assert peers is None or peers.num_tokens[self._data_rank] == plan.num_tokens
        self._fault(step)
        script = self.script
        if script.step_s:
            most_tokens = plan.num_tokens if peers is None else max(peers.num_tokens)
            time.sleep(script.step_s + script.token_s * most_tokens)
        items = []
        for item in plan.items:
            params = self._params[item.request]
            if item.emits and item.request in self._doomed:
                items.append(ItemResult(item.request, (), error="scripted failure of one request"))
            elif item.emits:
                position = item.num_computed_tokens + item.num_new_tokens - item.num_draft_tokens
                token = script.tokens[position % len(script.tokens)]
                count = 1 + min(script.accepted[position % len(script.accepted)], item.num_draft_tokens)
                logprobs = () if params.logprobs is None else (TokenLogprobs(-0.5, (token,), (-0.5,)),) * count
                items.append(ItemResult(item.request, (token,) * count, logprobs))
        return RankResult(tuple(items))

    def take_counters(self) -> RankCounters:
        return RankCounters(expert_choices=self.script.expert_choices, traffic=(("dispatch", 10, 1),), engram_hits=1)

    def rebalance(self, maps: Sequence[ExpertMap]) -> None:
        with open(self.script.rebalanced_file, "a") as file:
            file.write(json.dumps([placement.logical for placement in maps]) + "\n")

    def time_components(self, timer: object) -> object:
        before, self.timer = self.timer, timer
        return before

    def take_components(self) -> tuple[tuple[str, float], ...]:
        return self.script.components if self.timer is None else self.script.timed_components

    def close(self) -> None:
        while self.script.hang_at_close:
            time.sleep(1)

    def _fault(self, step: int) -> None:
        script = self.script
        if not self._faulty or step not in (
            script.raise_at_step,
            script.kill_at_step,
            script.stop_at_step,
            script.hang_at_step,
            script.exit_at_step,
        ):
            return
        if script.once_file:
            try:
                os.close(os.open(script.once_file, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if step == script.raise_at_step:
            raise ValueError(f"scripted failure in step {step}")
        if step == script.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == script.stop_at_step:
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == script.exit_at_step:
            os._exit(7)
        while step == script.hang_at_step:
            time.sleep(0.01)


if __name__ == "__main__":
    run_worker(ScriptedRunner)
