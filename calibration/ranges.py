"""Labelled ranges on threads and streams: which one is innermost at an instant.

Ranges of one thread nest. A label is a component or a step; code 0 is "none", code i + 1 the i-th label.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.errors import TraceError
from calibration.trace import MAX_KERNELS, MAX_STEP
from engine.core.specs import COMPONENTS

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
# torch.profiler's own name for a step of its schedule, and ours (calibration.recorder).
STEP_LABEL = re.compile(r"(?:ProfilerStep|twinfer\.step)#(\d{1,10})")
_COMPONENT_CODES = {name: index + 1 for index, name in enumerate(COMPONENTS)}


def step_of(label: str) -> int | None:
    """The number in a step's label; None for any other label."""
    match = STEP_LABEL.fullmatch(label)
    if match is None:
        return None
    if int(match[1]) >= MAX_STEP:
        raise TraceError(f"step label {label!r} is out of range; allowed: numbers below {MAX_STEP}")
    return int(match[1])


def component_code(label: str) -> int:
    """1 + index in COMPONENTS; 0 for a label that names no component."""
    return _COMPONENT_CODES.get(label, 0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Piecewise constant: ``codes[i]`` holds from ``edges[i]`` up to ``edges[i + 1]``; 0 before the first edge and after the last."""

    edges: Floats
    codes: Codes

    def at(self, instants: Floats) -> Codes:
        if not len(self.edges):
            return np.zeros(len(instants), dtype=np.int64)
        index = np.searchsorted(self.edges, instants, side="right") - 1
        return np.where(index >= 0, self.codes[np.maximum(index, 0)], 0)


class Ranges:
    """Collects ranges by track (a thread or a stream, any integer) in 24 bytes each."""

    def __init__(self) -> None:
        self._track, self._code, self._start, self._end = array("q"), array("q"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self._track)

    def add(self, track: int, start: float, end: float, code: int) -> None:
        if len(self) >= MAX_KERNELS:
            raise TraceError(f"more than {MAX_KERNELS} labelled ranges; record fewer steps")
        self._track.append(track)
        self._start.append(start)
        self._end.append(end)
        self._code.append(code)

    def timelines(self) -> dict[int, Timeline]:
        """The innermost code over time, for each track."""
        track, code = np.array(self._track, dtype=np.int64), np.array(self._code, dtype=np.int64)
        start, end = np.array(self._start, dtype=np.float64), np.array(self._end, dtype=np.float64)
        return {int(key): _sweep(start[track == key], end[track == key], code[track == key]) for key in np.unique(track)}

    def timeline(self) -> Timeline:
        """The same with all tracks taken as one: for steps, which one thread marks for all."""
        return _sweep(np.array(self._start), np.array(self._end), np.array(self._code, dtype=np.int64))


def innermost(timelines: dict[int, Timeline], tracks: Codes, instants: Floats) -> Codes:
    """The code of the innermost range on ``tracks[i]`` at ``instants[i]``; 0 where there is none."""
    codes = np.zeros(len(instants), dtype=np.int64)
    for track, timeline in timelines.items():
        chosen = tracks == track
        codes[chosen] = timeline.at(instants[chosen])
    return codes


def join_ids(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Index into ``keys`` of each wanted number, and whether it is there; 0 stands for "no number"."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.bool_)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    index = order[place]
    return index, (keys[index] == wanted) & (wanted > 0)


def _sweep(start: Floats, end: Floats, code: Codes) -> Timeline:
    order = np.lexsort((-end, start))
    edges: list[float] = []
    codes: list[int] = []
    stack: list[tuple[float, int]] = []

    def mark(instant: float) -> None:
        current = stack[-1][1] if stack else 0
        if edges and edges[-1] == instant:
            codes[-1] = current
        else:
            edges.append(instant)
            codes.append(current)

    for index in order:
        while stack and stack[-1][0] <= start[index]:
            ended, _ = stack.pop()
            mark(ended)
        # A range that sticks out of the one around it (clock jitter) ends with it: ranges of a thread nest.
        inner_end = min(float(end[index]), stack[-1][0]) if stack else float(end[index])
        stack.append((inner_end, int(code[index])))
        mark(float(start[index]))
    while stack:
        ended, _ = stack.pop()
        mark(ended)
    return Timeline(np.array(edges), np.array(codes, dtype=np.int64))


def pieces(timeline: Timeline, hole_start: Floats, hole_end: Floats) -> Iterator[tuple[float, float, int]]:
    """(start, end, code) of the labelled time that the holes (sorted, apart from each other) leave; neighbours of one code are joined."""
    cuts = np.unique(np.concatenate([timeline.edges, hole_start, hole_end]))
    if len(cuts) < 2:
        return
    middle = (cuts[:-1] + cuts[1:]) / 2
    codes = timeline.at(middle)
    if len(hole_start):
        hole = np.searchsorted(hole_start, middle, side="right") - 1
        codes = np.where((hole >= 0) & (middle < hole_end[np.maximum(hole, 0)]), 0, codes)
    changes = np.flatnonzero(np.diff(codes)) + 1
    begins = np.concatenate([[0], changes])
    ends = np.concatenate([changes, [len(codes)]])
    for begin, end in zip(begins, ends, strict=True):
        if codes[begin]:
            yield float(cuts[begin]), float(cuts[end]), int(codes[begin])
