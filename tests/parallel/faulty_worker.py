"""A worker process that serves the real model and can be made to fail: somewhere in a step, in one of four ways.

The fault lies as JSON in ``armed``, in the folder that ``TWINFER_TEST_FAULTS`` names; the rank it happens on moves it to ``fired`` first.
Points of a step are the kinds of collectives, and "step" (its begin), "sampling" and "draft".
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.actors.config import WorkerConfig
from engine.actors.worker_main import LoadReport, Runner, run_worker
from engine.core.errors import ConfigError
from engine.core.plan import RankPlan, RankResult, StepPeers

FOLDER = "TWINFER_TEST_FAULTS"
Action = Literal["kill", "stop", "raise", "slow", "config"]


class Fault(msgspec.Struct, frozen=True):
    """Happens once, on ``rank``, at the first ``point`` of a step that is, as that rank sees it, ``when``. "load" is before any step."""

    action: Action
    point: str
    when: Literal["load", "first", "prefill", "decode", "idle"] = "decode"
    rank: int = 1


class Injector:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = Path(os.environ[FOLDER])
        self._fault: Fault | None = None  # armed for the present step

    def begin(self, step: int, plan: RankPlan) -> None:
        """Look for a fault that belongs into this step."""
        prompt = any(item.num_new_tokens - item.num_draft_tokens > 1 for item in plan.items)
        kinds = {"prefill" if prompt else "decode" if plan.items else "idle"} | ({"first"} if step == 0 else set())
        self._fault = self._armed(kinds)
        self.point("step")

    def point(self, name: str) -> None:
        fault = self._fault
        if fault is None or fault.point != name:
            return
        self._fault = None
        (self._folder / "armed").rename(self._folder / "fired")
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("injected failure")
            case "config":
                raise ConfigError("injected mistake")
            case "slow":
                time.sleep(60.0)

    def load(self) -> None:
        self._fault = self._armed({"load"})
        self.point("load")

    def _armed(self, kinds: set[str]) -> Fault | None:
        try:
            fault = msgspec.json.decode((self._folder / "armed").read_bytes(), type=Fault)
        except FileNotFoundError:
            return None
        return fault if fault.rank == self._rank and fault.when in kinds else None


def before(injector: Injector, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        injector.point(name)
        return function(*args, **kwargs)

    return wrapped


def build(config: WorkerConfig, report: LoadReport) -> Runner:
    from engine.model.build import build_runner
    from engine.parallel.groups import Group, Pending

    injector = Injector(config.rank)
    start = Group.start_all_to_all

    def start_all_to_all(group: Group, kind: str, *args: Any) -> Pending:
        injector.point(kind)
        return start(group, kind, *args)

    Group.start_all_to_all = start_all_to_all  # type: ignore[method-assign,assignment]
    injector.load()
    runner = build_runner(config, report)
    execute = runner.execute

    def execute_faultily(step: int, plan: RankPlan, peers: StepPeers | None) -> RankResult:
        injector.begin(step, plan)
        return execute(step, plan, peers)

    runner.execute = execute_faultily  # type: ignore[method-assign,assignment]
    runner.sampler.sample = before(injector, "sampling", runner.sampler.sample)  # type: ignore[method-assign]
    for name in ("draft", "join_draft"):
        setattr(runner.model, name, before(injector, "draft", getattr(runner.model, name)))
    return runner


if __name__ == "__main__":
    run_worker(build)
