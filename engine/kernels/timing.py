"""Component timers: who spends a step's time, by the closed list of names in ``core.specs.COMPONENTS``.

A function marked ``@component(name)`` charges its own time to ``name``; what it calls and is marked itself is charged there instead
(self time), so the components of a step add up to the step. Without an active timer the mark costs one comparison a call.

On a GPU the spans are CUDA events, so nothing waits until ``take`` synchronises once a step; on a CPU they are clock readings.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_active: ComponentTimer | None = None


class ComponentTimer:
    """Accumulates self time per component between two calls of ``take``."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        # The instant up to which time has been charged, and what has been charged so far.
        self._mark: float | torch.cuda.Event | None = None
        self._seconds: dict[str, float] = {}
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def enter(self, name: str) -> None:
        self._charge()
        self._stack.append(name)

    def leave(self) -> None:
        self._charge()
        self._stack.pop()

    def take(self) -> tuple[tuple[str, float], ...]:
        """Seconds per component since the last call, sorted by name; waits for the device."""
        if self._spans:
            self._spans[-1][2].synchronize()
            for name, start, end in self._spans:
                self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) * 1e-3
            self._spans.clear()
        taken = tuple(sorted(self._seconds.items()))
        self._seconds = {}
        self._mark = None
        return taken

    def _charge(self) -> None:
        now: float | torch.cuda.Event
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        else:
            now = time.perf_counter()
        if self._stack and self._mark is not None:
            name = self._stack[-1]
            if isinstance(now, float):
                assert isinstance(self._mark, float)
                self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
            else:
                assert isinstance(self._mark, torch.cuda.Event)
                self._spans.append((name, self._mark, now))
        self._mark = now


def component(name: str, *, whole: bool = False) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark a function. ``whole`` charges everything inside to ``name``, marked or not (the draft is one component)."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def marked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            global _active
            timer = _active
            if timer is None:
                return function(*args, **kwargs)
            timer.enter(name)
            if whole:
                _active = None
            try:
                return function(*args, **kwargs)
            finally:
                _active = timer
                timer.leave()

        return marked

    return decorate


@contextmanager
def timing(timer: ComponentTimer | None) -> Iterator[None]:
    """Make ``timer`` the one that marked functions charge. One worker process runs one model, so it is a module's state."""
    global _active
    before, _active = _active, timer
    try:
        yield
    finally:
        _active = before
