"""Engram's rows out of host memory: what ranks of one host share, and what of the gathering a step waits for.

Every rank gathers the rows of its tokens from the same tables. A rank alone goes at its own pace (a thread, a link); together they go no
faster than the host's memory gives rows out:

    seconds = max(bytes of a rank / rate of a rank, bytes of the host's ranks / rate of the host), the slowest host's

The rows travel while the layers before the first one that needs them are computed; the rest is waited for.
"""

from __future__ import annotations

import msgspec
import numpy as np

from calibration.features import Array
from engine.core.errors import ConfigError
from engine.core.specs import V41Spec
from engine.core.step_cost import Provenance

MAX_BYTES_PER_S = 1e15


class HostMemory(msgspec.Struct, frozen=True):
    """Bytes of rows a second, for a rank alone and for all ranks of a host together, as measured with up to ``measured_ranks`` of them at
    once; 0: from published figures."""

    rank_bytes_per_s: float
    host_bytes_per_s: float
    measured_ranks: int = 0

    def __post_init__(self) -> None:
        for name, value in (("rank_bytes_per_s", self.rank_bytes_per_s), ("host_bytes_per_s", self.host_bytes_per_s)):
            if not 0.0 < value <= MAX_BYTES_PER_S:
                raise ConfigError(f"{name} of a host's memory is {value:g}; needed: more than 0, up to {MAX_BYTES_PER_S:g}")

    def provenance(self, ranks_per_host: int) -> Provenance:
        if not self.measured_ranks:
            return "roofline"
        return "measured" if ranks_per_host <= self.measured_ranks else "scaled"


def measured_memory(rank_bytes_per_s: dict[int, float]) -> HostMemory:
    """Of what each rank got with so many at once. The host's rate is the most that all together got: where even the largest number was not
    slowed down the host may have more to give, and is said to have no more than was seen."""
    together = max(count * rate for count, rate in rank_bytes_per_s.items())
    return HostMemory(max(rank_bytes_per_s.values()), together, max(rank_bytes_per_s))


def row_bytes(spec: V41Spec, element_bytes: int) -> int:
    """Of one token, over all Engram layers. 0 for a model without tables."""
    if spec.engram is None:
        return 0
    return len(spec.engram.layer_ids) * spec.engram.num_columns * spec.engram.head_dim * element_bytes


def gather_seconds(bytes_of_rank: Array, ranks_per_host: int, memory: HostMemory) -> Array:
    """[N] until every rank has its rows; ``bytes_of_rank`` [N, W] of the world's ranks, of which each ``ranks_per_host`` share a host."""
    if ranks_per_host < 1:
        raise ConfigError(f"ranks per host are {ranks_per_host}; needed: 1 or more")
    seconds: Array = bytes_of_rank.max(axis=1) / memory.rank_bytes_per_s
    for first in range(0, bytes_of_rank.shape[1], ranks_per_host):
        of_host = bytes_of_rank[:, first : first + ranks_per_host].sum(axis=1)
        seconds = np.maximum(seconds, of_host / memory.host_bytes_per_s)
    return seconds


def waited_seconds(gather_s: Array, hidden_s: Array) -> Array:
    """What the layers before do not cover."""
    return np.maximum(0.0, gather_s - hidden_s)
