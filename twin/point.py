"""One point of a sweep: a question in bytes, simulated, and its answer in bytes. ``python -m twin.point`` answers the question on its
standard input: what the processes of ``executors`` run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Union

import msgspec

from calibration.cost_model import CalibratedCost, ModelFit, ProbeFactors
from calibration.imbalance import ExpertBalance
from engine.core.errors import ConfigError, DomainError, InvariantError, OutputError, RequestError, TwinferError
from engine.core.events import Finished, LogEvent, encode_lines
from engine.core.layout import parse_layout
from engine.core.metrics import Slo
from engine.core.sharding import EngramPlacement
from engine.core.specs import ModelSpec
from engine.core.step_cost import StepCost
from engine.writing import whole_file
from twin.cluster import Cluster
from twin.config import TwinConfig
from twin.given_cost import GivenCost
from twin.observation import Observation
from twin.workload.spec import WorkloadSpec, make_workload

if TYPE_CHECKING:
    from twin.result import SimResult

# (requests that have ended, of so many)
Watch = Callable[[int, int], None]
NUM_QUANTILES = 501
_EXIT_INTERRUPTED = 130
_RAISED = {kind.__name__: kind for kind in (ConfigError, DomainError, InvariantError, OutputError, RequestError)}


class FittedCost(msgspec.Struct, frozen=True, tag="fitted"):
    """A calibration's prices of one layout."""

    fit: ModelFit
    probe: ProbeFactors | None
    engram: EngramPlacement
    draft_tokens: int
    redundant_experts: int
    expert_balance: ExpertBalance
    expert_rebalancing: bool

    def cost(self, spec: ModelSpec, layout: str) -> StepCost:
        """Raises DomainError where the calibration has nothing to go by."""
        unit = parse_layout(layout).decode.unit
        return CalibratedCost(
            self.fit,
            spec,
            unit,
            probe=self.probe,
            engram=self.engram,
            draft_tokens=self.draft_tokens,
            redundant_experts=self.redundant_experts,
            expert_balance=self.expert_balance,
            expert_rebalancing=self.expert_rebalancing,
        )


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a simulation needs, as data. ``name``, ``request_rate`` and ``concurrency`` label its answer."""

    name: str
    layout: str
    request_rate: float | str | None
    concurrency: int | None
    spec: ModelSpec
    config: TwinConfig
    cost: Union[GivenCost, FittedCost]
    workload: WorkloadSpec
    slo: Slo | None
    wants_details: bool = False
    events_path: str | None = None


class _Watcher:
    """A listener that tells how many requests have ended."""

    def __init__(self, watch: Watch, num_requests: int) -> None:
        self._watch, self._num_requests, self._num_ended = watch, num_requests, 0

    def events(self, replica: int, events: Sequence[LogEvent]) -> None:  # noqa: ARG002 (a listener's)
        ended = sum(type(event) is Finished for event in events)
        if ended:
            self._num_ended += ended
            self._watch(self._num_ended, self._num_requests)


class EventFile:
    """A listener that writes the event log as JSON Lines."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def events(self, replica: int, events: Sequence[LogEvent]) -> None:  # noqa: ARG002 (a listener's)
        for event in events:  # one by one: a stretch is long
            self._file.write(encode_lines((event,)))


@contextmanager
def _event_file(path: str | None) -> Iterator[EventFile | None]:
    """The file is in its place once the simulation is through. Raises OutputError."""
    if path is None:
        yield None
        return
    with whole_file("--events", Path(path)) as beside, beside.open("wb") as file:
        yield EventFile(file)


def encode(question: Question) -> bytes:
    return msgspec.msgpack.encode(question)


def answer(question: bytes, watch: Watch | None = None) -> bytes:
    """MessagePack (JSON has no infinite rate) of ``{"point": ..., "details": ...}``, or of ``{"error": {"type", "message"}}`` for what is
    wrong with the question."""
    try:
        return msgspec.msgpack.encode(simulate_point(msgspec.msgpack.decode(question, type=Question), watch))
    except TwinferError as error:
        return msgspec.msgpack.encode({"error": {"type": type(error).__name__, "message": str(error)}})


def decode(found: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """(point, details). Raises the error that the answer is, as what it was."""
    fields: dict[str, Any] = msgspec.msgpack.decode(found)
    if "error" in fields:
        raise _RAISED.get(fields["error"]["type"], TwinferError)(fields["error"]["message"])
    return fields["point"], fields["details"]


def simulate_point(question: Question, watch: Watch | None = None) -> dict[str, Any]:
    """Raises TwinferError for what cannot be simulated."""
    begin_s = time.perf_counter()
    question.config.validate()
    cost = question.cost if isinstance(question.cost, GivenCost) else question.cost.cost(question.spec, question.layout)
    workload = make_workload(question.workload)
    observation = Observation() if question.wants_details else None
    watcher = None if watch is None else _Watcher(watch, workload.num_requests)
    observers = [] if observation is None else [observation]
    with _event_file(question.events_path) as events:
        cluster = Cluster(question.config, workload, cost, observers, [one for one in (events, watcher) if one is not None])
        if observation is not None:
            observation.bind(cluster)
        cluster.run()
    result = cluster.result(time.perf_counter() - begin_s)
    details = {} if observation is None else {"quantiles": cluster.fold.quantiles(NUM_QUANTILES), **observation.details()}
    return {"point": point_of(question, result), "details": details}


def point_of(question: Question, result: SimResult) -> dict[str, Any]:
    """A result under the names of the command line's contract."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    goodput, kv_peak, step_time = fields.pop("goodput"), fields.pop("kv_peak"), fields.pop("step_time")
    deployment = parse_layout(question.layout)
    per_s = fields["output_tokens_per_s"]
    return {
        "name": question.name,
        "layout": question.layout,
        "num_gpus": deployment.num_gpus,
        "request_rate": question.request_rate,
        "concurrency": question.concurrency,
        **fields,
        # Without a limit every request would be a good one.
        "goodput": None if question.slo is None else goodput["per_s"],
        "goodput_share": None if question.slo is None else goodput["share"],
        "kv_peak": kv_peak["share"],
        "kv_peak_blocks": kv_peak["blocks"],
        "kv_peak_tokens": kv_peak["tokens"],
        "kv_blocks": question.config.scheduler.cache.num_blocks,
        "context_tokens": question.config.scheduler.context_tokens,
        "output_tokens_per_s_per_gpu": None if per_s is None else per_s / deployment.num_gpus,
        # Of the mean step.
        "components": {
            name: {"seconds": part["seconds"] / fields["steps"], "provenance": part["provenance"]}
            for name, part in sorted(step_time.pop("components").items())
        },
        **step_time,
    }


def main() -> int:
    try:
        sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
