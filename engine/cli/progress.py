"""How far a start is: a bar on a terminal, elsewhere a line at every quarter."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

import tqdm

_log = logging.getLogger("twinfer.serve")
_QUARTERS = 4


class Progress:
    """One phase after another. ``update`` may be called with any numbers in any order; it shows what is new."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._on_terminal = sys.stderr.isatty()
        self._phase = ""
        self._quarter = 0
        self._bar: tqdm.tqdm[None] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close_bar()

    def update(self, phase: str, done: int, total: int) -> None:
        if not self._enabled or total <= 0:
            return
        if phase != self._phase:
            self._close_bar()
            self._phase, self._quarter = phase, 0
        done = min(done, total)
        if self._on_terminal:
            self._draw(phase, done, total)
        elif done * _QUARTERS // total > self._quarter:
            self._quarter = done * _QUARTERS // total
            percent = self._quarter * 100 // _QUARTERS
            _log.info("%s: %d %%", phase, percent, extra={"fields": {"phase": phase, "percent": percent}})

    def _draw(self, phase: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm.tqdm(total=total, desc=phase, file=sys.stderr, leave=False, unit_scale=True, dynamic_ncols=True)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LoadProgress:
    """Adds up the workers' reports: all of them load at the same time."""

    def __init__(self, progress: Progress, num_workers: int) -> None:
        self._progress = progress
        self._num_workers = num_workers
        self._reports: dict[str, tuple[int, int]] = {}

    def __call__(self, worker: str, done: int, total: int) -> None:
        self._reports[worker] = (done, total)
        done_by_all = sum(done for done, _ in self._reports.values())
        total_of_all = sum(total for _, total in self._reports.values())
        self._progress.update("loading", done_by_all * len(self._reports) // self._num_workers, total_of_all)
