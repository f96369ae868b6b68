"""What the runner asks of a model and of its KV cache; both families implement these protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.expert_map import ExpertMap
from engine.core.plan import StepPeers
from engine.core.rank_counters import RankCounters
from engine.core.specs import ModelSpec
from engine.model.batch import ForwardBatch


class WeightSource(Protocol):
    """Named tensors of a checkpoint, already verified against ``core.tensors.expected_tensors``."""

    def get(self, name: str) -> Tensor:
        """The tensor under its official name, on the CPU, in its stored dtype."""
        ...

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Indices [start, stop) of dimension ``dim`` of it, without reading the rest where the format allows that."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """``logits_RV`` float32 for the rows the batch asked for; ``draft_features_TF`` what the model's draft needs, None without one.

    ``captures`` holds what a caller asked for by name (tests and ``twinfer logits`` read selections and streams from it).
    """

    logits_RV: Tensor
    draft_features_TF: Tensor | None = None
    captures: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One draft round for A sequences, after the target emitted their newest token.

    ``positions_A`` is the position of the newest token (whose KV is not computed yet); rows of the main model are valid
    below it. ``uniforms_AK`` drives sampled drafts (inverse CDF); ``temperatures_A`` 0 drafts greedily.
    """

    slots_A: Tensor
    tokens_A: Tensor
    positions_A: Tensor
    temperatures_A: Tensor
    top_k_A: Tensor
    top_p_A: Tensor
    min_p_A: Tensor
    uniforms_AK: Tensor
    num_tokens: int  # K, at most the draft's block size
    all_greedy: bool
    peers: StepPeers | None = None  # where the replica has several ranks


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """``tokens_AK`` drafts; ``probs_AKV`` the exact distribution each was drawn from (None where all are greedy);
    ``confidences_AK`` the draft's own estimate that the token is accepted."""

    tokens_AK: Tensor
    probs_AKV: Tensor | None
    confidences_AK: Tensor


class KVCache(Protocol):
    """The KV memory of one rank. Block, slot, tail and host indices are the core's; the cache never allocates one itself."""

    config: CacheConfig

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None: ...

    def clear_blocks(self, blocks: list[int]) -> None:
        """Overwrite with zeros what ``blocks`` held: masked positions still meet weight 0, and 0 times a stray NaN would be NaN."""
        ...

    def reset_state(self, slots: list[int]) -> None:
        """Begin cold sequences."""
        ...

    def copy_state(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Fork per-sequence state."""
        ...

    def load_tails(self, tails: list[int], slots: list[int], positions: list[int]) -> None:
        """Begin sequences at a block boundary from stored window rows; ``positions`` are the boundaries."""
        ...

    def swap_out(self, slot: int, blocks: list[int], host_blocks: list[int], host_state: int) -> None: ...

    def swap_in(self, host_blocks: list[int], blocks: list[int]) -> None: ...

    def restore_state(self, host_state: int, slot: int) -> None: ...

    def num_bytes(self) -> int:
        """Device bytes held, for the comparison with the prediction of ``core.counts``."""
        ...


class Model(Protocol):
    """A loaded model. ``forward`` writes the batch's KV into ``cache`` and returns the logits of the wanted rows."""

    device: torch.device
    dtype: torch.dtype

    @property
    def spec(self) -> ModelSpec: ...

    def new_cache(self, config: CacheConfig) -> KVCache: ...

    def forward(self, batch: ForwardBatch, cache: KVCache, capture: frozenset[str] = frozenset()) -> ForwardOutput: ...

    def num_bytes(self) -> int:
        """Device bytes of the weights as held."""
        ...

    def draft(self, request: DraftRequest, cache: KVCache) -> DraftOutput:
        """Raises ConfigError where the model has no draft."""
        ...

    def join(self, peers: StepPeers) -> None:
        """Take part in the collectives of a forward that other ranks of the replica make, with no tokens of one's own."""
        ...

    def join_draft(self, peers: StepPeers) -> None:
        """The same for a draft round."""
        ...

    def rebalance(self, maps: Sequence[ExpertMap]) -> int:
        """Take up other expert placements between two steps, one for each layer with spread experts, backbone before draft; a collective
        of all ranks. Returns how many experts this rank received."""
        ...

    def take_expert_counts(self) -> list[list[int]]:
        """How often this rank's tokens chose each expert of these layers since the last call; empty where experts are not spread."""
        ...

    def take_counters(self) -> RankCounters:
        """What was sent and waited for since the last call."""
        ...
