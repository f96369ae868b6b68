"""A trace played again from its table: what each kernel waited for, and when everything ends if they last as given.

A kernel starts when the one before it on its stream has ended, and a recorded delay after the latest end that came before it on any
stream of its rank (what the host needed to launch it, or the other stream's event). Kernels that ran at the same time do not wait for
each other. A collective ends on a rank when the last rank has come and then its own time there has passed.

Before anything is predicted from a table it must reproduce the span it was recorded with: ``checked_replay``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.collectives import groups
from calibration.errors import ReplayError
from calibration.trace import KernelTable

Floats = NDArray[np.float64]
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Replay:
    """Dependencies of a table's rows (in its order). Rows point to earlier rows; ``len(table)`` stands for the start of the trace."""

    on_stream: NDArray[np.int64]  # the row before on the same stream
    after: NDArray[np.int64]  # the row of the rank whose end came last before this start
    delay_s: Floats  # from that end to this start
    operation: NDArray[np.int64]  # the collective this row belongs to, 0 for none
    own_s: Floats  # duration; of a collective from the moment the last of its ranks had come
    recorded_span_s: float

    def run(self, own_s: Floats | None = None) -> tuple[Floats, Floats]:
        """Start and end of every row, with durations ``own_s`` (waits for peers not included) in place of the recorded ones."""
        durations = (self.own_s if own_s is None else own_s).tolist()
        count = len(durations)
        start, end = [0.0] * (count + 1), [0.0] * (count + 1)
        members, last = self._members()
        on_stream, after, delay = self.on_stream.tolist(), self.after.tolist(), self.delay_s.tolist()
        for row, operation in enumerate(self.operation.tolist()):
            begin = max(end[on_stream[row]], end[after[row]] + delay[row])
            start[row] = begin
            end[row] = begin + durations[row]
            if operation and last[operation] == row:
                complete = max(start[member] for member in members[operation])
                for member in members[operation]:
                    end[member] = complete + durations[member]
        return np.array(start[:count]), np.array(end[:count])

    def span_s(self, own_s: Floats | None = None) -> float:
        start, end = self.run(own_s)
        return float(end.max() - start.min())

    def _members(self) -> tuple[dict[int, list[int]], dict[int, int]]:
        members: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.operation).tolist():
            members.setdefault(int(self.operation[row]), []).append(row)
        return members, {operation: max(rows) for operation, rows in members.items()}


def build_replay(table: KernelTable) -> Replay:
    """Read the dependencies off a checked table."""
    count = len(table)
    start, end = table.start_s, table.end_s
    on_stream, after = np.full(count, count), np.full(count, count)
    delay_s = start.copy()
    for rank in table.ranks:
        rows = np.flatnonzero(table.rank == rank)
        for stream in np.unique(table.stream[rows]):
            own = rows[table.stream[rows] == stream]
            on_stream[own[1:]] = own[:-1]
        by_end = rows[np.argsort(end[rows], kind="stable")]
        place = np.searchsorted(end[by_end], start[rows], side="right") - 1
        before = by_end[np.maximum(place, 0)]
        # A row of no length at this very instant may stand later in the table; only earlier rows have been played by then.
        found = (place >= 0) & (before < rows)
        after[rows[found]] = before[found]
        delay_s[rows[found]] = start[rows[found]] - end[before[found]]
    operation, complete_s = _synchronised(groups(table), start, end)
    own_s = np.where(operation > 0, end - complete_s, table.duration_s)
    return Replay(on_stream, after, delay_s, operation, own_s, table.span_s)


def _synchronised(operation: NDArray[np.int64], start: Floats, end: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Operations during which all their ranks were there at one time (the clocks of the others do not belong together), and for each row
    when the last rank had come."""
    size = int(operation.max(initial=0)) + 1
    latest_start, earliest_end = np.full(size, -np.inf), np.full(size, np.inf)
    np.maximum.at(latest_start, operation, start)
    np.minimum.at(earliest_end, operation, end)
    return np.where(latest_start[operation] < earliest_end[operation], operation, 0), latest_start[operation]


def checked_replay(table: KernelTable) -> Replay:
    """The table's replay. Raises ReplayError with the figures where it misses the recorded span by more than ``TOLERANCE``."""
    replay = build_replay(table)
    span_s, recorded_s = replay.span_s(), replay.recorded_span_s
    if abs(span_s - recorded_s) > TOLERANCE * recorded_s:
        source = ", ".join(item.source for item in table.sources)
        raise ReplayError(
            f"{source}: replayed, the {len(table)} kernels span {span_s:.6g} s; recorded were {recorded_s:.6g} s "
            f"({span_s / recorded_s - 1:+.1%}, allowed {TOLERANCE:.0%}), so nothing is predicted from them. "
            "Kernels of one stream overlap, or ranks' clocks differ; record one stream a track, and ranks with one clock"
        )
    return replay
