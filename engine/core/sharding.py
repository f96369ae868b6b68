"""Who holds what: the place of one process in a replica, and the part of every tensor that is there.

World ranks of a unit tpXdpYepZ, r = 0 .. tp*dp - 1: the tp ranks of a data rank are neighbours, and so are the tp*dp/ep ranks that
share an expert. The loader reads by this table and ``core.memory`` adds it up, so that the prediction is what is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from engine.core.errors import ConfigError
from engine.core.expert_map import ExpertMap, even_map
from engine.core.layout import Layout
from engine.core.specs import DenseSpec, ModelSpec, V41Spec
from engine.core.tensors import TensorSpec, expected_tensors

EngramPlacement = Literal["gpu", "replicated", "host"]


class Part(msgspec.Struct, frozen=True):
    """Indices [start, stop) along dimension ``dim``."""

    dim: int
    start: int
    stop: int


class RankPlace(msgspec.Struct, frozen=True):
    """One process of a replica, and how the replica places what may lie in several ways. The default is a replica of one process."""

    layout: Layout = Layout()
    rank: int = 0
    engram: EngramPlacement = "gpu"
    redundant_experts: int = 0
    draft_redundant_experts: int = 0

    @property
    def num_ranks(self) -> int:
        return self.layout.tp * self.layout.dp

    @property
    def data_rank(self) -> int:
        return self.rank // self.layout.tp

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def expert_rank(self) -> int:
        return self.rank // self.layout.expert_tp

    @property
    def expert_tensor_rank(self) -> int:
        return self.rank % self.layout.expert_tp

    @property
    def shards_engram(self) -> bool:
        """Whether a table's rows are spread over the ranks."""
        return self.engram == "gpu" and self.num_ranks > 1

    def expert_map(self, num_experts: int, *, draft: bool = False) -> ExpertMap:
        """The placement a replica starts with."""
        return even_map(num_experts, self.draft_redundant_experts if draft else self.redundant_experts, self.layout.ep)

    def validate_for(self, spec: ModelSpec) -> None:
        """Raise ConfigError where ``spec`` cannot be cut so."""
        layout = self.layout
        layout.validate_for(spec)
        if layout.pp > 1:
            raise ConfigError(f"layout {layout}: pipeline parallelism is not run by this release")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"layout {layout}: rank is {self.rank}; allowed: 0 to {self.num_ranks - 1}")
        has_draft = isinstance(spec, V41Spec) and spec.dspark is not None
        has_experts = isinstance(spec, V41Spec) or spec.moe is not None
        for name, count, possible in (
            ("redundant_experts", self.redundant_experts, has_experts),
            ("draft_redundant_experts", self.draft_redundant_experts, has_draft),
        ):
            if count and not (possible and layout.ep > 1):
                raise ConfigError(f"{name} is {count}; {spec.name} under layout {layout} has no experts to spread; use 0")
            if not 0 <= count <= 1 << 20 or count % layout.ep:
                raise ConfigError(f"{name} is {count}; needed: a multiple of ep = {layout.ep}")


def held_part(spec: ModelSpec, place: RankPlace, name: str, tensor: TensorSpec) -> Part | None:
    """What of a tensor a rank holds of those it holds at all; None for the whole of it. Which *experts* it holds is the expert map's."""
    if place.num_ranks == 1:
        return None
    part = _dense_part(spec, place, name) if isinstance(spec, DenseSpec) else _v41_part(place, name)
    if part is None:
        return None
    dim, index, degree = part
    size = tensor.shape[dim]
    return Part(dim, index * size // degree, (index + 1) * size // degree) if degree > 1 else None


def holds(spec: ModelSpec, place: RankPlace, name: str) -> bool:
    """False for a bias that is added behind a sum over the ranks, but on the first of them. Experts count as held here."""
    biased_sum = isinstance(spec, DenseSpec) and name.endswith(("o_proj.bias", "down_proj.bias"))
    return not biased_sum or place.tensor_rank == 0


def held_tensors(spec: ModelSpec, place: RankPlace) -> Iterator[tuple[str, TensorSpec]]:
    """Names and held shapes of everything a rank loads; an expert with two slots on the rank comes twice."""
    expert_counts: dict[str, dict[int, int]] = {}
    for name, tensor in expected_tensors(spec).items():
        if not holds(spec, place, name):
            continue
        copies = 1
        if place.num_ranks > 1 and ".experts." in name:
            kind = "mtp." if name.startswith("mtp.") else ""
            if kind not in expert_counts:
                expert_counts[kind] = _slots_per_expert(spec, place, draft=bool(kind))
            expert = int(name.split(".experts.")[1].split(".")[0])
            copies = expert_counts[kind].get(expert, 0)
        part = held_part(spec, place, name, tensor)
        if part is not None:
            shape = list(tensor.shape)
            shape[part.dim] = part.stop - part.start
            tensor = TensorSpec(tuple(shape), tensor.kind)
        for _ in range(copies):
            yield name, tensor


def held_kv_heads(spec: DenseSpec, place: RankPlace) -> int:
    """Key/value heads of a rank: a head has several holders where tp exceeds their number."""
    return max(1, spec.num_kv_heads // place.layout.tp)


def num_routed_experts(spec: ModelSpec, *, draft: bool = False) -> int:
    """0 for a model without."""
    if isinstance(spec, V41Spec):
        if not draft:
            return spec.num_experts
        return spec.dspark.num_experts if spec.dspark else 0
    return 0 if draft or spec.moe is None else spec.moe.num_experts


def _slots_per_expert(spec: ModelSpec, place: RankPlace, *, draft: bool) -> dict[int, int]:
    counts: dict[int, int] = {}
    for expert in place.expert_map(num_routed_experts(spec, draft=draft), draft=draft).of_rank(place.expert_rank):
        counts[expert] = counts.get(expert, 0) + 1
    return counts


def _v41_part(place: RankPlace, name: str) -> tuple[int, int, int] | None:
    """(dimension, index, degree) of a split tensor. Latent KV, compressor, indexer and the Markov head are whole on every rank."""
    tensor = (place.tensor_rank, place.layout.tp)
    if ".experts." in name:
        return (1 if name.endswith(".w2.weight") else 0, place.expert_tensor_rank, place.layout.expert_tp)
    if ".shared_experts." in name:
        return (1 if name.endswith(".w2.weight") else 0, *tensor)
    if name in ("embed.weight", "head.weight") or name.endswith(("attn.wq_b.weight", "attn.attn_sink", "attn.wo_a.weight")):
        return (0, *tensor)
    if name.endswith("attn.wo_b.weight"):
        return (1, *tensor)
    if name.endswith("engram.embed.weight") and place.shards_engram:
        return (0, place.rank, place.num_ranks)
    return None


def _dense_part(spec: DenseSpec, place: RankPlace, name: str) -> tuple[int, int, int] | None:
    tensor = (place.tensor_rank, place.layout.tp)
    if ".experts." in name:
        return (1 if name.endswith("down_proj.weight") else 0, place.expert_tensor_rank, place.layout.expert_tp)
    if name.endswith((".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias")):
        degree = min(place.layout.tp, spec.num_kv_heads)
        return (0, place.tensor_rank * degree // place.layout.tp, degree)
    rows = (".q_proj.weight", ".q_proj.bias", ".gate_proj.weight", ".gate_proj.bias", ".up_proj.weight", ".up_proj.bias")
    if name in ("model.embed_tokens.weight", "lm_head.weight") or name.endswith(rows):
        return (0, *tensor)
    if name.endswith((".o_proj.weight", ".down_proj.weight")):
        return (1, *tensor)
    return None
