"""A campaign: which ranks to measure on which cores, in what order, until the answers are steady or the time is up.

Measuring processes run side by side, pinned as the engine pins its workers: a rank is timed with its neighbours as busy as it is. Shapes
come in random order, round after round, each once or a few times a round, so that a slow minute does not fall on one shape alone; a
shape whose median is known well enough drops out. Points are appended to a file as they come, and a campaign that finds them there goes
on from them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from calibration.cost_model import RESOURCE_OF_COMPONENT
from calibration.probe import Probe, ratios
from calibration.shapes import Collectives, Command, Failure, Gather, Job, Measure, Measured, Reply, Shape
from calibration.speed_meter import SpeedMeter
from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, WorkerError
from engine.core.layout import parse_layout

_ROOT = Path(__file__).resolve().parents[1]
STEADY = 0.015  # relative standard error of a median below which a shape is not measured again
_MAX_SAMPLES = 60
_MANY_TOKENS = 64  # from here on a step's time goes by its tokens
_FIRST_ROUND_SHARE = 0.4  # of the time; what it has not come to by then is left out, so that the rest is measured more than once
_MIN_SHAPES = 16
_MAX_OVERTIME = 3.0  # times the time given, until there are so many: on a busy machine, a late fit rather than none
_GATHERED_TOKENS, _GATHERS = 512, 15
_EXIT_TIMEOUT_S = 10.0
COLLECTIVE_SIZES = (8, 256, 1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20)
_NO_CACHE = CacheConfig(num_blocks=1, block_size=1, max_running=1, max_batched_tokens=1, context_length=2)
Progress = Callable[[str, int, int], None]


class Point(msgspec.Struct, frozen=True):
    """One shape on one kind of rank: seconds of every plain execution, mean over the processes, and components scaled to the median; all
    of it at the speed ``probe`` (None: nobody looked)."""

    model: str
    layout: str
    cores: int
    busy_neighbours: int
    shape: Shape
    forward_s: tuple[float, ...]
    components: dict[str, float]
    probe: Probe | None = None

    @property
    def median_s(self) -> float:
        return float(np.median(self.forward_s))

    def at(self, probe: Probe | None) -> Point:
        """As it would have been at another speed, by what slows each component down."""
        if probe is None or self.probe is None:
            return self
        slower = ratios(self.probe, probe)
        components = {name: seconds * slower.of(RESOURCE_OF_COMPONENT.get(name, "host")) for name, seconds in self.components.items()}
        whole = sum(components.values()) / sum(self.components.values()) if self.components else slower.host
        forward_s = tuple(seconds * whole for seconds in self.forward_s)
        return msgspec.structs.replace(self, forward_s=forward_s, components=components, probe=probe)


class CollectivePoint(msgspec.Struct, frozen=True):
    num_ranks: int
    bytes_sent: int
    seconds: float


class GatherPoint(msgspec.Struct, frozen=True):
    """Engram rows of ``num_tokens`` tokens, out of host memory, by each of ``num_ranks`` processes at once."""

    num_ranks: int
    num_tokens: int
    seconds: float


def rank_cores(num_ranks: int) -> list[tuple[int, ...]]:
    """The cores of each rank, as the engine shares them out; one share for all where there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_ranks
    if share == 0:
        raise ConfigError(f"{num_ranks} ranks need as many cores; this process may use {len(cores)}")
    return [tuple(cores[rank * share : (rank + 1) * share]) for rank in range(num_ranks)] if num_ranks > 1 else [tuple(cores)]


class Measurers:
    """Some measuring processes that get the same commands at the same time."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)

    def start(self, jobs: Sequence[Job]) -> None:
        """Returns when all are ready. Raises WorkerError where one is not."""
        environment = dict(os.environ) | {"PYTHONPATH": str(_ROOT)}
        environment.setdefault("GOMP_SPINCOUNT", "2000")  # as the engine starts its workers
        command = [sys.executable, "-P", "-m", "calibration.microbench"]
        for job in jobs:
            # In a group of its own: Ctrl-C is for who started this, who ends it.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=_ROOT, process_group=0)
            self._processes.append(process)
            self._write(process, job)
        for process in self._processes:
            self._read(process)

    def ask(self, command: Command, count: int | None = None) -> list[Measured]:
        """Of the first ``count`` processes, or all. Raises WorkerError where a process fails."""
        asked = self._processes[:count]
        for process in asked:
            self._write(process, command)
        return [self._read(process) for process in asked]

    def _write(self, process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError("measuring process", "ended before its work was done; see above") from None

    def _read(self, process: subprocess.Popen[bytes]) -> Measured:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise WorkerError("measuring process", f"ended with code {process.wait()}; see above")
        reply = self._decoder.decode(line)
        if isinstance(reply, Failure):
            raise WorkerError("measuring process", reply.message)
        return reply

    def close(self, *, at_once: bool) -> None:
        """``at_once``: whatever they are doing."""
        for process in self._processes:
            if at_once:
                process.kill()
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # half a message to one that is gone
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def measurers(jobs: Sequence[Job]) -> Iterator[Measurers]:
    found, is_done = Measurers(), False
    try:
        found.start(jobs)
        yield found
        is_done = True
    finally:
        found.close(at_once=not is_done)


class PointFile:
    """Points as JSON lines, appended as they come. None as path: kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.points: dict[tuple[str, str, int, int, Shape], Point] = {}
        if path is not None and path.exists():
            decoder = msgspec.json.Decoder(Point)
            for line in path.read_bytes().splitlines():
                try:
                    self._keep(decoder.decode(line))
                except msgspec.MsgspecError:  # the last line of an interrupted run
                    continue

    def add(self, point: Point) -> None:
        self._keep(point)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(point) + b"\n")

    def _keep(self, point: Point) -> None:
        key = (point.model, point.layout, point.cores, point.busy_neighbours, point.shape)
        before = self.points.get(key)
        if before is not None:
            point = _merged(before, point)
        self.points[key] = point

    def total(self, point: Point) -> Point:
        """Everything measured so far of the shape and rank that ``point`` is of."""
        return self.points[(point.model, point.layout, point.cores, point.busy_neighbours, point.shape)]


def _merged(one: Point, two: Point) -> Point:
    two = two.at(one.probe)
    total = len(one.forward_s) + len(two.forward_s)
    names = dict.fromkeys((*one.components, *two.components))
    components = {
        name: (one.components.get(name, 0.0) * len(one.forward_s) + two.components.get(name, 0.0) * len(two.forward_s)) / total
        for name in names
    }
    forward_s = (*one.forward_s, *two.forward_s)
    # Together as long as the median, which a disturbed sample does not move as it moves their mean.
    scale = float(np.median(forward_s)) / max(sum(components.values()), 1e-12)
    return msgspec.structs.replace(one, forward_s=forward_s, components={name: seconds * scale for name, seconds in components.items()})


def measure_ranks(
    jobs: Sequence[Job],
    model: str,
    shapes: Sequence[Shape],
    budget_s: float,
    points: PointFile,
    meter: SpeedMeter,
    progress: Progress,
    seed: int = 0,
) -> None:
    """Time ``shapes`` on the rank the jobs name, all processes at once, for about ``budget_s``. Raises WorkerError where a process or the
    meter ends early."""
    draw = random.Random(seed)
    first = jobs[0]
    num_ranks = parse_layout(first.layout).decode.unit.dp
    label = f"{model} {first.layout} on {len(first.cores)} of {len(first.cores) * len(jobs)} cores"
    with measurers(jobs) as processes:
        begin_s = time.monotonic()
        # The first round goes in the order given (corners first); how long steps take then decides which are worth repeating.
        open_shapes, order, per_token_s, known = list(shapes), list(shapes), list[float](), dict[Shape, float]()
        while order and time.monotonic() - begin_s < budget_s:
            is_first = not known
            for shape in order:
                spent_s = time.monotonic() - begin_s
                is_short = is_first and len(known) < _MIN_SHAPES
                left_s = (_MAX_OVERTIME if is_short else 1.0) * budget_s - spent_s
                if left_s <= 0 or (is_first and not is_short and spent_s > budget_s * _FIRST_ROUND_SHARE):
                    break
                if _is_too_long(shape, per_token_s, left_s):
                    continue
                began_s = time.perf_counter()
                point = _measure(processes, model, first, len(jobs) - 1, shape, num_ranks, _repeats(known.get(shape)))
                meter.check()
                point = msgspec.structs.replace(point, probe=meter.between(began_s, time.perf_counter()))
                points.add(point)
                known[shape] = point.median_s
                if shape.num_tokens >= _MANY_TOKENS:
                    per_token_s.append(point.median_s / shape.num_tokens)
                if _is_steady(points.total(point)):
                    open_shapes.remove(shape)
                progress(label, min(int(time.monotonic() - begin_s), int(budget_s)), int(budget_s))
            if is_first:
                open_shapes = [shape for shape in open_shapes if shape in known]
            left_s = budget_s - (time.monotonic() - begin_s)
            order = [shape for shape in draw.sample(open_shapes, len(open_shapes)) if not _is_too_long(shape, per_token_s, left_s)]


def _is_too_long(shape: Shape, per_token_s: Sequence[float], left_s: float) -> bool:
    """Whether measuring it once would take more than a fifth of the time that is left, by what the longer shapes took so far."""
    if shape.num_tokens < _MANY_TOKENS:
        return False
    if not per_token_s:
        return shape.num_tokens > 4 * _MANY_TOKENS
    return 4 * shape.num_tokens * float(np.median(per_token_s)) > left_s / 5


def _repeats(step_s: float | None) -> int:
    """Plain executions in one go: little at first, then more of short steps, which are cheap and noisy."""
    return 1 if step_s is None or step_s > 0.05 else 2 if step_s > 0.02 else 4


def _measure(processes: Measurers, model: str, job: Job, neighbours: int, shape: Shape, num_ranks: int, repeats: int) -> Point:
    replies = processes.ask(Measure(shape, repeats=repeats, warm_ups=1, num_ranks=num_ranks))
    plain = np.mean([reply.forward_s for reply in replies], axis=0)
    names = dict.fromkeys(name for reply in replies for components in reply.components for name in components)
    # Medians of each component, together as long as a step without timers.
    medians = {
        name: float(np.median([components.get(name, 0.0) for reply in replies for components in reply.components])) for name in names
    }
    scale = float(np.median(plain)) / max(sum(medians.values()), 1e-12)
    return Point(
        model=model,
        layout=job.layout,
        cores=len(job.cores),
        busy_neighbours=neighbours,
        shape=shape,
        forward_s=tuple(float(value) for value in plain),
        components={name: seconds * scale for name, seconds in medians.items()},
    )


def _is_steady(point: Point) -> bool:
    count = len(point.forward_s)
    if count < 4:
        return False
    spread = 1.4826 * float(np.median(np.abs(np.array(point.forward_s) - point.median_s)))
    error = 1.2533 * spread / point.median_s / float(np.sqrt(count))  # of a median
    return count >= _MAX_SAMPLES or (count >= 16 and error < STEADY)


def measure_together(model: str, num_ranks: int, sizes: Sequence[int], repeats: int) -> tuple[list[CollectivePoint], list[GatherPoint]]:
    """All-to-all among ``num_ranks`` processes pinned as ranks, by size sent to each peer, and gathers out of the memory they share, by
    one of them and by all at once; the slowest process counts."""
    with tempfile.TemporaryDirectory(prefix="twinfer-") as folder:
        cores = rank_cores(num_ranks)
        jobs = [
            Job(
                model=model,
                dtype="float32",
                layout=f"tp{num_ranks}dp1ep1",
                rank=rank,
                cores=cores[rank],
                num_threads=max(1, len(cores[rank])),
                cache=_NO_CACHE,
                load_format="auto",
                stand_in=False,
                rendezvous=str(Path(folder, "rendezvous")),
            )
            for rank in range(num_ranks)
        ]
        with measurers(jobs) as processes:
            replies = processes.ask(Collectives(tuple(sizes), repeats))
            gather = Gather(_GATHERED_TOKENS, _GATHERS)
            gathered = {count: processes.ask(gather, count) for count in (1, num_ranks)}
    collectives = [
        CollectivePoint(num_ranks, size * (num_ranks - 1), max(reply.forward_s[index] for reply in replies))
        for index, size in enumerate(sizes)
    ]
    gathers = [
        GatherPoint(count, _GATHERED_TOKENS, max(float(np.median(reply.forward_s)) for reply in replies))
        for count, replies in gathered.items()
        if all(reply.forward_s for reply in replies)
    ]
    return collectives, gathers
