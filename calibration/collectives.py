"""Collective kernels across ranks: which ones are one operation, and how long each rank waited inside for the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibration.trace import KernelTable
from engine.core.specs import COMPONENTS

# What every rank of a group takes part in; its kernel ends when the last rank has come.
COLLECTIVES = ("dispatch", "combine", "all_reduce", "all_gather", "barrier_wait")


def groups(table: KernelTable) -> NDArray[np.int64]:
    """For each row the number of its collective operation, 0 where it is none.

    The i-th collective of a component in a step is one operation on all ranks that have as many of them; rows whose ranks disagree about
    the number are left out, and so is a table of one rank.
    """
    numbers = np.zeros(len(table), dtype=np.int64)
    codes = [COMPONENTS.index(name) for name in COLLECTIVES]
    rows = np.flatnonzero(np.isin(table.component, codes))
    if len(table.ranks) < 2 or not len(rows):
        return numbers
    step = np.where(table.in_step[rows], table.step[rows].astype(np.int64) + 1, 0)
    rank = table.rank[rows].astype(np.int64)
    _, kind = np.unique(step * len(COMPONENTS) + table.component[rows], return_inverse=True)
    order = np.lexsort((table.start_s[rows], rank, kind))
    # Position of a row among those of its (kind, rank), and how many those are.
    pair = kind[order] * (int(rank.max()) + 1) + rank[order]
    begins = np.flatnonzero(np.concatenate([[True], pair[1:] != pair[:-1]]))
    counts = np.diff(np.concatenate([begins, [len(pair)]]))
    place = np.arange(len(pair)) - np.repeat(begins, counts)
    count_of_row = np.repeat(counts, counts)
    kinds = kind[order]
    ranks_of_kind = np.bincount(kinds[begins], minlength=int(kind.max()) + 1)
    most, least = np.zeros(len(ranks_of_kind), dtype=np.int64), np.full(len(ranks_of_kind), np.iinfo(np.int64).max)
    np.maximum.at(most, kinds, count_of_row)
    np.minimum.at(least, kinds, count_of_row)
    good = ((most == least) & (ranks_of_kind > 1))[kinds]
    _, operation = np.unique(kinds[good] * (int(counts.max()) + 1) + place[good], return_inverse=True)
    numbers[rows[order[good]]] = operation + 1
    return numbers


def peer_waits(table: KernelTable) -> NDArray[np.float64]:
    """Seconds of each row that it waited for a peer: its duration beyond the shortest of its operation."""
    numbers = groups(table)
    shortest = np.full(int(numbers.max(initial=0)) + 1, np.inf)
    np.minimum.at(shortest, numbers, table.duration_s)
    return np.where(numbers > 0, table.duration_s - shortest[numbers], 0.0)
