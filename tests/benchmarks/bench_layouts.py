"""Step times over layouts, what the lock-step protocol adds to them, and bytes sent against the formula.

    .venv/bin/python tests/benchmarks/bench_layouts.py [--model tiny-v41|v41-100m] [--rounds 3] [--batch 4] [--draft-tokens 0 3]

Layouts take turns over the rounds, so that a busy minute of the machine does not fall on one of them; figures are medians over the steps of
all rounds. What is printed, in milliseconds:

step      commit to commit
forward   the slowest rank's own time from its command to its result, collectives included
parent    from the last rank's result to the first rank's next command (commit, plan, encode); 0 where that had been sent before, as it is
          without drafts
protocol  step less the *quickest* rank's forward: parent, both ways through the sockets, and waking up. Ranks wait for each other in their
          collectives, so the last to be told ends last and is the quickest by its own clock
skew      slowest less quickest forward of a step
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import trio

from engine.actors.supervisor import open_engine
from engine.actors.worker import RankWorker
from engine.actors.worker_group import WorkerGroup
from engine.cli.step_bench import Recording, StepLoad, StepRecorder, record_in, with_room
from engine.config import ENGINE_OPTIONS
from engine.core.layout import parse_layout
from engine.core.plan import StepPlan, StepResult, step_peers
from engine.core.sharding import RankPlace
from engine.core.traffic import step_traffic
from engine.launch import Launch, open_model, plan_launch
from engine.options import resolve

LAYOUTS = ("tp1dp1ep1", "tp1dp2ep2", "tp2dp1ep1", "tp2dp1ep2")
Samples = dict[str, list[float]]


class Stopwatch:
    """Times at the parent's side of the workers, by step."""

    def __init__(self) -> None:
        self.sent_s: dict[int, float] = {}
        self.received_s: dict[int, float] = {}
        self.forward_s: dict[int, list[float]] = {}

    def install(self) -> None:
        send, receive, receive_one = WorkerGroup.send_plan, WorkerGroup.receive_result, RankWorker.receive_executed

        async def send_plan(group: WorkerGroup, plan: StepPlan, **options: Any) -> None:
            self.sent_s[plan.step] = time.perf_counter()
            await send(group, plan, **options)

        async def receive_result(group: WorkerGroup, plan: StepPlan) -> StepResult:
            result = await receive(group, plan)
            self.received_s[plan.step] = time.perf_counter()
            return result

        async def receive_executed(worker: RankWorker, step: int) -> Any:
            executed = await receive_one(worker, step)
            self.forward_s.setdefault(step, []).append(executed.forward_s)
            return executed

        WorkerGroup.send_plan = send_plan  # type: ignore[method-assign,assignment]
        WorkerGroup.receive_result = receive_result  # type: ignore[method-assign,assignment]
        RankWorker.receive_executed = receive_executed  # type: ignore[method-assign,assignment]

    def clear(self) -> None:
        for table in (self.sent_s, self.received_s, self.forward_s):
            table.clear()


def plan(model: str, layout: str, batch: int, draft_tokens: int) -> tuple[Launch, StepLoad]:
    load = StepLoad(batch // parse_layout(layout).decode.unit.dp, 64, 16)
    values = {"layout": layout, "draft_tokens": draft_tokens, "dtype": "float32", "device": "cpu"}
    if model != "tiny-v41":
        values["load_format"] = "random"
    options = resolve(ENGINE_OPTIONS, values, {}, None)
    launch = plan_launch(with_room(options, load), open_model(model).spec, model)
    return launch, load


async def measure(launch: Launch, load: StepLoad) -> Recording:
    recorder = StepRecorder()
    config = msgspec.structs.replace(launch.config, report_steps=1)
    async with open_engine(config, None, observers=(recorder,)) as engine:
        return await record_in(engine, recorder, config.scheduler.num_ranks, load)


def add_samples(samples: Samples, recording: Recording, watch: Stopwatch) -> None:
    for index in recording.chosen:
        forwards = watch.forward_s[index]
        values = {
            "step": recording.step_s(index),
            "forward": max(forwards),
            "parent": max(0.0, watch.sent_s[index] - watch.received_s[index - 1]),
            "protocol": recording.step_s(index) - min(forwards),
            "skew": max(forwards) - min(forwards),
        }
        for name, value in values.items():
            samples.setdefault(name, []).append(value)


def traffic(launch: Launch, recording: Recording, draft_tokens: int) -> list[str]:
    """Measured and predicted bytes a step of all ranks together, by kind."""
    unit = launch.layout.decode.unit
    sent: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for index in recording.chosen:
        counters, peers = recording.recorder.results[index].counters, step_peers(recording.recorder.plans[index])
        for kind, num_bytes, _ in counters.traffic if counters else ():
            sent[kind] = sent.get(kind, 0.0) + num_bytes
        for rank in range(unit.tp * unit.dp):
            place = RankPlace(layout=unit, rank=rank)
            for kind, expected in step_traffic(launch.spec, place, peers, 4, draft_tokens).items():
                predicted[kind] = predicted.get(kind, 0.0) + expected
    count = len(recording.chosen)
    return [
        f"{kind} {sent.get(kind, 0) / count:,.0f} B ({sent.get(kind, 0) / predicted[kind] - 1:+.2%} of {predicted[kind] / count:,.0f})"
        for kind in sorted(predicted)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["tiny-v41", "v41-100m"])
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="requests of the replica (default 4)")
    parser.add_argument("--draft-tokens", nargs="+", type=int, default=[0, 3])
    arguments = parser.parse_args()
    watch = Stopwatch()
    watch.install()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, batch {arguments.batch}, {arguments.rounds} rounds")
    for model in arguments.model:
        for draft_tokens in arguments.draft_tokens:
            found: dict[str, Samples] = {layout: {} for layout in arguments.layout}
            lines: dict[str, list[str]] = {}
            for _ in range(arguments.rounds):
                for layout in arguments.layout:
                    launch, load = plan(model, layout, arguments.batch, draft_tokens)
                    watch.clear()
                    recording = trio.run(measure, launch, load)
                    add_samples(found[layout], recording, watch)
                    lines[layout] = traffic(launch, recording, draft_tokens)
            print(f"\n{model}, {draft_tokens} draft tokens, load {os.getloadavg()[0]:.1f}")
            for layout, samples in found.items():
                medians = "  ".join(f"{name} {statistics.median(values) * 1e3:7.2f}" for name, values in samples.items())
                low = sorted(samples["step"])[len(samples["step"]) // 10]
                print(f"  {layout}  {medians}  step p10 {low * 1e3:.2f}  n {len(samples['step'])}")
                for line in lines[layout]:
                    print(f"      {line}")


if __name__ == "__main__":
    main()
