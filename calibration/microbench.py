"""The measuring process: one rank's real steps, timed. ``python -m calibration.microbench``, told what to do in JSON lines on stdin.

What predicts a step is a step: components are timed inside ``Runner.execute``, with the caches as warm and the neighbours as busy as in
service, not as kernels on their own. Sequences start with any number of tokens "in cache" (their rows are zeros: time does not depend on
values), prompts are random tokens, and a decode advances as it would, so that routing changes from step to step.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from calibration.shapes import BLOCK_SIZE, MARGIN, Collectives, Command, Failure, Gather, Job, Measure, Measured, Reply, Shape
from engine.core.errors import TwinferError
from engine.core.layout import parse_layout
from engine.core.plan import PlanItem, RankPlan, SequenceStart, StepPlan, step_peers
from engine.core.sampling import SamplingParams
from engine.core.sharding import RankPlace
from engine.core.specs import ModelSpec, V41Spec
from engine.kernels.timing import ComponentTimer
from engine.model.build import DTYPES
from engine.model.files import read_model_files
from engine.model.load import load_model
from engine.model.runner import Runner
from engine.parallel.groups import Group, ParallelGroups, Pending, Traffic

_TABLE_BYTES = 256 << 20  # of Engram tables that are gathered from
_WORK_SIZE = 192  # of the matrix product between two measured collectives: some tenths of a millisecond


class _Arrived(Pending):
    """A collective that is over."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def is_done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._received


class StandInGroup(Group):
    """Peers that answer at once, with this rank's own rows in place of theirs."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.index, self.size = self.ranks.index(rank), len(self.ranks)
        self.is_nccl = False

    def start_all_to_all(self, kind: str, send: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Pending:  # noqa: ARG002
        count = sum(receive_rows)
        if send.shape[0] == 0:
            return _Arrived(send.new_zeros((count, *send.shape[1:])))
        times = -(-count // send.shape[0])
        return _Arrived(send.repeat(times, *[1] * (send.dim() - 1))[:count])

    def barrier(self, kind: str) -> None:
        """Nobody else is there."""


class StandInGroups(ParallelGroups):
    """The groups of one rank whose peers are not running."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.traffic = Traffic()
        self.world = StandInGroup(range(place.num_ranks), place.rank)
        tp, first = place.layout.tp, place.data_rank * place.layout.tp
        self.tensor = StandInGroup(range(first, first + tp), place.rank) if tp > 1 else None

    def close(self) -> None:
        """Nothing was opened."""


class Bench:
    """One loaded rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        os.sched_setaffinity(0, job.cores)
        torch.set_num_threads(job.num_threads)
        self.place = RankPlace(layout=parse_layout(job.layout).decode.unit, rank=job.rank)
        groups = StandInGroups(self.place) if job.stand_in and self.place.num_ranks > 1 else None
        loaded = load_model(job.model, dtype=DTYPES[job.dtype], load_format=job.load_format, place=self.place, groups=groups)
        self.timer = ComponentTimer(torch.device("cpu"))
        self.runner = Runner(loaded.model, job.cache)
        self._step, self._request = 0, 0
        self._draw = random.Random(job.rank)

    def measure(self, command: Measure) -> Measured:
        shape, count = command.shape, command.warm_ups + 2 * command.repeats
        advances = shape.kind == "decode"  # the others are computed anew each time, by new requests
        requests: list[int] = []
        plain: list[float] = []
        timed: list[float] = []
        components: list[dict[str, float]] = []
        for index in range(count):
            begins = index == 0 or not advances
            if begins:
                self._forget(requests)
                requests = self._register(shape, count if advances else 0)
            starts = self._starts(shape, requests) if begins else {}
            if starts and shape.draft_tokens:
                self._prepare(shape, requests, starts, command.num_ranks)
            plan = RankPlan(starts=tuple(starts.values()), items=self._items(shape, requests, index if advances else 0))
            with_timer = index >= command.warm_ups and (index - command.warm_ups) % 2 == 1
            self.runner.time_components(self.timer if with_timer else None)
            seconds = self._execute(plan, command.num_ranks)
            if with_timer:
                components.append(dict(self.timer.take()))
                timed.append(seconds)
            elif index >= command.warm_ups:
                plain.append(seconds)
        self._forget(requests)
        return Measured(tuple(plain), tuple(timed), tuple(components))

    def _execute(self, plan: RankPlan, num_ranks: int) -> float:
        """Seconds of the step, in which the other data ranks have the same to do."""
        peers = step_peers(StepPlan(0, (plan,) * num_ranks)) if self.place.num_ranks > 1 else None
        begin_s = time.perf_counter()
        self.runner.execute(self._step, plan, peers)
        seconds = time.perf_counter() - begin_s
        self._step += 1
        return seconds

    def _register(self, shape: Shape, margin: int) -> list[int]:
        """A request for every item, with a prompt as long as it will be read."""
        size, requests = self.runner.vocab_size, []
        for computed, new in shape.items:
            self._request += 1
            prompt = self._draw.choices(range(size), k=computed + new + margin)
            self.runner.register(self._request, prompt, SamplingParams(max_tokens=1 << 20, ignore_eos=True), seed=self._request)
            requests.append(self._request)
        return requests

    def _forget(self, requests: Sequence[int]) -> None:
        for request in requests:
            self.runner.forget(request)

    def _starts(self, shape: Shape, requests: Sequence[int]) -> dict[int, SequenceStart]:
        """By slot; every item has blocks of its own."""
        starts, block = {}, 0
        for slot, ((computed, new), request) in enumerate(zip(shape.items, requests, strict=True)):
            needed = -(-(computed + new + (MARGIN if shape.kind == "decode" else 0)) // BLOCK_SIZE)
            starts[slot] = SequenceStart(slot, request, computed, tuple(range(block, block + needed)))
            block += needed
        return starts

    def _items(self, shape: Shape, requests: Sequence[int], advanced: int) -> tuple[PlanItem, ...]:
        drafts = shape.draft_tokens
        return tuple(
            PlanItem(slot, request, computed + advanced, new, drafts if new == 1 + drafts else 0, True)
            for slot, ((computed, new), request) in enumerate(zip(shape.items, requests, strict=True))
        )

    def _prepare(self, shape: Shape, requests: Sequence[int], starts: dict[int, SequenceStart], num_ranks: int) -> None:
        """A step of one token each, whose drafts the measured one verifies; the sequences in it are started by it."""
        items, first = [], []
        for slot, ((computed, new), request) in enumerate(zip(shape.items, requests, strict=True)):
            if new == 1 + shape.draft_tokens:
                first.append(msgspec.structs.replace(starts.pop(slot), num_computed_tokens=computed - 1))
                items.append(PlanItem(slot, request, computed - 1, 1, 0, True))
        if items:
            self._execute(RankPlan(starts=tuple(first), items=tuple(items)), num_ranks)


def measure_collectives(groups: ParallelGroups, command: Collectives) -> Measured:
    """Median seconds of an all-to-all of each size, in order."""
    group, medians = groups.world, []
    work = torch.randn(_WORK_SIZE, _WORK_SIZE)
    for size in command.sizes:
        send = torch.zeros((group.size, max(1, size)), dtype=torch.uint8)
        rows, times = [1] * group.size, []
        for _ in range(command.repeats):
            work = work @ work
            work /= work.abs().amax()
            begin_s = time.perf_counter()
            group.all_to_all("all_reduce", send, rows, rows)
            times.append(time.perf_counter() - begin_s)
        times.sort()
        medians.append(times[len(times) // 2])
    return Measured(tuple(medians))


def measure_gather(spec: ModelSpec, command: Gather) -> Measured:
    """Seconds of each repeat, over all Engram layers. Tables are of their own size, up to a bound that is far beyond any cache."""
    engram = spec.engram if isinstance(spec, V41Spec) else None
    if engram is None:
        return Measured(())
    most = _TABLE_BYTES // len(engram.layer_ids) // (4 * engram.head_dim)
    tables = [torch.ones((min(rows, most), engram.head_dim)) for rows in engram.num_rows]
    times = []
    for _ in range(command.repeats):
        ids = [torch.randint(len(table), (command.num_tokens * engram.num_columns,)) for table in tables]
        begin_s = time.perf_counter()
        for table, wanted in zip(tables, ids, strict=True):
            table.index_select(0, wanted)
        times.append(time.perf_counter() - begin_s)
    return Measured(tuple(times))


def main() -> int:
    """Load what the first line says, answer "ready", then a reply for every command until the input ends, be it in the middle of a line."""
    torch.set_grad_enabled(False)
    first = sys.stdin.buffer.readline()
    if not first.endswith(b"\n"):
        return 1
    job = msgspec.json.decode(first, type=Job)
    commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply

    def reply(message: Reply) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    try:
        bench = groups = None
        if job.rendezvous is None:
            bench = Bench(job)
        else:
            os.sched_setaffinity(0, job.cores)
            torch.set_num_threads(job.num_threads)
            place = RankPlace(layout=parse_layout(job.layout).decode.unit, rank=job.rank)
            groups = ParallelGroups(place, rendezvous=job.rendezvous, device=torch.device("cpu"))
        reply(Measured(()))
        for line in sys.stdin.buffer:
            if not line.endswith(b"\n"):
                return 1
            command = commands.decode(line)
            if isinstance(command, Measure):
                assert bench is not None
                reply(bench.measure(command))
            elif isinstance(command, Gather):
                reply(measure_gather(read_model_files(job.model).spec, command))
            else:
                assert groups is not None
                reply(measure_collectives(groups, command))
    except TwinferError as error:
        reply(Failure(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BrokenPipeError:  # whoever asked is gone
        code = 1
    sys.stdout.flush()
    # Not sys.exit: threads of a numeric library may hold up the interpreter's own end.
    os._exit(code)
