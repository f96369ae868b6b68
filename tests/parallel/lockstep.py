"""The ranks of a replica as processes of their own: ``python -m tests.parallel.lockstep NUM_RANKS FOLDER``.

They read ``cases.json`` in FOLDER and serve each case's requests: every rank runs the whole scheduler, executes its own RankPlan, and reads
the others' results from a store, which stands for the actors. What came out goes to ``result-RANK.json``, the ranks' exit codes to stdout.
The ranks are forked from a process that has imported torch, which takes longer than all the cases.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import FileStore

from engine.core.cache_config import CacheConfig
from engine.core.errors import CollectiveError
from engine.core.events import Event, TokensEmitted
from engine.core.expert_map import ExpertMap
from engine.core.memory import plan_memory
from engine.core.plan import RankResult, StepPlan, StepResult, TokenLogprobs, step_peers
from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sharding import RankPlace
from engine.core.specs import DenseSpec, ModelSpec
from engine.core.tensors import BIAS, TensorSpec
from engine.kernels import experts
from engine.model.dense import DenseModel
from engine.model.load import RandomWeights
from engine.model.runner import Runner
from engine.model.v41 import V41Model
from engine.parallel.experts import Routing
from engine.parallel.groups import ParallelGroups

TIMEOUT_S = 30.0
EXIT_PEER = 7
CACHE = CacheConfig(num_blocks=64, block_size=16, max_running=8, max_batched_tokens=64, context_length=256)


class Job(msgspec.Struct, frozen=True):
    """A request: ``length`` random prompt tokens."""

    length: int
    seed: int
    max_tokens: int = 12
    temperature: float = 0.0


class Fault(msgspec.Struct, frozen=True):
    """``rank`` sends itself ``signal`` instead of its ``call``-th collective of a kind."""

    rank: int
    kind: str
    call: int
    signal: int


class Case(msgspec.Struct, frozen=True):
    name: str
    place: RankPlace
    spec: ModelSpec
    jobs: tuple[Job, ...]
    draft_tokens: int = 0
    grouped: bool = False  # the grouped form of the expert products, which tiny experts do not get by themselves
    rebalance: dict[int, tuple[ExpertMap, ...]] = {}  # before which step, and the maps of all layers
    routing: Routing = "model"
    fault: Fault | None = None
    timeout_s: float = TIMEOUT_S


class Outcome(msgspec.Struct, frozen=True):
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    plans: list[StepPlan]
    traffic: tuple[tuple[str, int, int], ...]
    held_bytes: int
    predicted_bytes: int
    cache_bytes: int
    predicted_cache_bytes: int
    moved_experts: int
    expert_counts: tuple[tuple[int, ...], ...]
    step_s: float  # median


def prompt(job: Job, vocab_size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(job.seed)
    return tuple(torch.randint(3, vocab_size, (job.length,), generator=generator).tolist())


class Weights(RandomWeights):
    """Random biases too, so that adding one twice shows."""

    def _values(self, name: str, spec: TensorSpec) -> torch.Tensor:
        values = super()._values(name, spec)
        if spec.kind != BIAS:
            return values
        return torch.randn(spec.shape, generator=torch.Generator().manual_seed(len(name) + spec.shape[0])) * 0.3


def build_model(spec: ModelSpec, groups: ParallelGroups | None, place: RankPlace, routing: Routing = "model") -> V41Model | DenseModel:
    weights = Weights(spec, 0)
    if isinstance(spec, DenseSpec):
        return DenseModel(spec, weights, dtype=torch.float32, device="cpu", groups=groups)
    assert spec.engram is not None
    token_map = torch.arange(spec.vocab_size) % spec.engram.num_classes
    return V41Model(
        spec, weights, dtype=torch.float32, cache_rounding=False, token_map=token_map, place=place, groups=groups, routing=routing
    )


class Replica:
    """The lock-step of one rank. Without ``groups`` it is the whole replica: the witness."""

    def __init__(self, case: Case, groups: ParallelGroups | None, store: FileStore | None, rank: int) -> None:
        self.case = case
        self.place = msgspec.structs.replace(case.place, rank=rank) if groups else RankPlace(engram=case.place.engram)
        self.groups, self.store = groups, store
        self.model = build_model(case.spec, groups, self.place, case.routing)
        num_tails = 8 if case.spec.has_sequence_state else 0
        cache = msgspec.structs.replace(CACHE, max_draft_tokens=case.draft_tokens, num_tails=num_tails)
        self.scheduler = Scheduler(
            SchedulerConfig(
                cache=cache,
                num_ranks=self.place.layout.dp,
                has_sequence_state=case.spec.has_sequence_state,
                draft_tokens=case.draft_tokens,
            )
        )
        self.runner = Runner(self.model, cache)
        self.predicted = plan_memory(case.spec, cache, "float32", self.place)
        self.requests = []
        for index, job in enumerate(case.jobs):
            params = SamplingParams(max_tokens=job.max_tokens, temperature=job.temperature, ignore_eos=True, logprobs=3)
            self.requests.append(Request(id=index, prompt=prompt(job, case.spec.vocab_size), params=params, sample_ids=(index,)))

    def run(self) -> Outcome:
        for request in self.requests:
            self.scheduler.submit(request, 0.0)
        events: list[Event] = []
        plans: list[StepPlan] = []
        times: list[float] = []
        moved = 0
        logprobs: list[list[TokenLogprobs]] = [[] for _ in self.requests]
        registered: set[int] = set()
        while (plan := self.scheduler.plan(0.0)) is not None:
            if plan.step in self.case.rebalance and self.groups is not None:
                moved += self.model.rebalance(self.case.rebalance[plan.step])
            plans.append(plan)
            mine = plan.ranks[self.place.data_rank]
            for start in mine.starts:
                if start.request not in registered:
                    registered.add(start.request)
                    request = self.requests[start.request]
                    self.runner.register(start.request, request.prompt, request.params, 11 + start.request)
            begin_s = time.perf_counter()
            result = self.runner.execute(plan.step, mine, step_peers(plan) if self.groups else None)
            times.append(time.perf_counter() - begin_s)
            results = self._exchange(plan.step, result)
            for rank_result in results:
                for item in rank_result.items:
                    logprobs[item.request] += item.logprobs
            events += self.scheduler.commit(plan, StepResult(plan.step, results), 0.0)
            self.scheduler.check()
        tokens: list[list[int]] = [[] for _ in self.requests]
        for event in events:
            if isinstance(event, TokensEmitted):
                tokens[event.request].extend(event.tokens)
        counters = self.runner.take_counters()
        return Outcome(
            tokens=tokens,
            logprobs=logprobs,
            plans=plans,
            traffic=counters.traffic,
            held_bytes=self.model.num_bytes(),
            predicted_bytes=self.predicted.weight_bytes,
            cache_bytes=self.runner.cache_bytes,
            predicted_cache_bytes=self.predicted.cache_bytes,
            moved_experts=moved,
            expert_counts=counters.expert_choices,
            step_s=sorted(times)[len(times) // 2],
        )

    def _exchange(self, step: int, result: RankResult) -> tuple[RankResult, ...]:
        if self.groups is None or self.store is None:
            return (result,)
        self.store.set(f"{self.case.name}/{step}/{self.place.rank}", msgspec.json.encode(result).decode())
        everyone = [
            msgspec.json.decode(self.store.get(f"{self.case.name}/{step}/{rank}"), type=RankResult) for rank in range(self.place.num_ranks)
        ]
        tp = self.place.layout.tp
        for data_rank in range(self.place.layout.dp):
            same = everyone[data_rank * tp : (data_rank + 1) * tp]
            assert all(other == same[0] for other in same), f"{self.case.name}: tensor ranks disagree at step {step}"
        return tuple(everyone[::tp])


def run_case(case: Case, groups: ParallelGroups | None, store: FileStore | None, rank: int) -> Outcome:
    few = dict(experts._DENSE_MACS)
    if case.grouped:
        experts._DENSE_MACS[torch.float32] = 0
    try:
        return Replica(case, groups, store, rank).run()
    finally:
        experts._DENSE_MACS.update(few)


def arm(fault: Fault | None, groups: ParallelGroups) -> None:
    if fault is None or fault.rank != groups.place.rank:
        return
    left, start = fault.call, groups.world.start_all_to_all

    def faulty(kind: str, *arguments: Any) -> Any:
        nonlocal left
        left -= kind == fault.kind
        if left == 0:
            os.kill(os.getpid(), fault.signal)
        return start(kind, *arguments)

    groups.world.start_all_to_all = faulty  # type: ignore[method-assign, assignment]


def main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    cases = msgspec.json.decode((folder / "cases.json").read_bytes(), type=list[Case])
    store = FileStore(str(folder / "results"), num_ranks)
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    outcomes: dict[str, Any] = {}
    groups: ParallelGroups | None = None
    for index, case in enumerate(cases):
        if groups is None or msgspec.structs.replace(case.place, rank=rank) != groups.place:
            if groups is not None:
                groups.close()
            place = msgspec.structs.replace(case.place, rank=rank)
            groups = ParallelGroups(place, rendezvous=str(folder / f"meet-{index}"), device=torch.device("cpu"), timeout_s=case.timeout_s)
        arm(case.fault, groups)
        outcomes[case.name] = run_case(case, groups, store, rank)
    (folder / f"result-{rank}.json").write_bytes(msgspec.json.encode(outcomes))
    if groups is not None:
        groups.close()


def run(rank: int, num_ranks: int, folder: Path) -> int:
    """The exit code."""
    try:
        main(rank, num_ranks, folder)
    except CollectiveError as error:
        sys.stderr.write(f"CollectiveError: {error}\n")
        return EXIT_PEER
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def fork(num_ranks: int, folder: Path) -> list[int]:
    """Exit codes of the ranks (minus the signal's number where one ended them); when the first rank has ended, stopped ones are killed."""
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            code = run(rank, num_ranks, folder)
            sys.stderr.flush()
            os._exit(code)  # as the worker does: gloo's threads may not outlive the interpreter
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])]
    for pid in pids[1:]:
        if codes[0] != 0:
            os.kill(pid, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


if __name__ == "__main__":
    print(json.dumps(fork(int(sys.argv[1]), Path(sys.argv[2]))))
