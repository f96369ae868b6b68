"""The V4.1 forward on packed ragged batches and the paged cache; prefill, decode and verification are the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, InvariantError
from engine.core.expert_map import ExpertMap
from engine.core.plan import StepPeers
from engine.core.rank_counters import RankCounters
from engine.core.sharding import RankPlace
from engine.core.specs import V41Spec
from engine.kernels.engram import engram_classes, engram_gate, engram_hash
from engine.kernels.mhc import mhc_collapse
from engine.kernels.norm import rms_norm
from engine.kernels.timing import component
from engine.model.base import DraftOutput, DraftRequest, ForwardOutput, KVCache, WeightSource
from engine.model.batch import ForwardBatch
from engine.model.v41.attention import attention
from engine.model.v41.block import block
from engine.model.v41.cache import V41Cache
from engine.model.v41.draft import DraftHead
from engine.model.v41.hashing import hash_constants
from engine.model.v41.step import Pass, StepBuilder, StepIndex
from engine.model.v41.weights import EngramWeights, LayerWeights, Loader, load_engram_tables, load_layer
from engine.parallel.engram import EngramStats
from engine.parallel.experts import RoutedExperts, Routing, rebalance
from engine.parallel.groups import ParallelGroups
from engine.parallel.tensor import all_gather_vocabulary, embedding


class V41Model:
    """Implements base.Model.

    ``cache_rounding`` rounds window rows, compressed rows, index queries and index keys to the formats of the packed cache (values stay
    in ``dtype``). ``token_map`` [vocab] is the token class of every id, needed where the spec has Engram (``build_token_map``).
    ``groups`` where a replica has several ranks: this model is then one rank's part of it, and all ranks call ``forward`` and ``draft``
    (``join`` and ``join_draft`` where they have no tokens) in the same order.
    """

    def __init__(
        self,
        spec: V41Spec,
        weights: WeightSource,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cache_rounding: bool = True,
        token_map: Tensor | None = None,
        place: RankPlace | None = None,
        groups: ParallelGroups | None = None,
        routing: Routing = "model",
    ) -> None:
        """Raises ConfigError for a token map that is missing or does not fit the spec, and for a spec that cannot be cut so."""
        self.place = place or (groups.place if groups else RankPlace())
        self.place.validate_for(spec)
        self.groups = groups
        self.tensor = groups.tensor if groups else None
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.cache_rounding = cache_rounding
        load = Loader(weights, spec, dtype, self.device, self.place, groups, routing)
        self.embed_VD = load.weight("embed.weight")
        self.layers: list[LayerWeights] = [load_layer(load, spec, layer) for layer in range(spec.num_layers)]
        self.norm_D = load.weight("norm.weight")
        self.head_VD = load.wide("head.weight")  # logits are a float32 product whatever the model's dtype
        # The reference stores the streams in the model's dtype; on a CPU the conversions around every mix cost more than the bytes saved.
        self.stream_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self.builder = StepBuilder(spec, dtype, self.device)
        self.first_pre_S = torch.zeros(spec.hc_mult, device=self.device)
        self.first_pre_S[0] = 1.0
        self.draft_head = DraftHead(spec, load, self) if spec.dspark else None
        if spec.engram is not None:
            self.token_map_V = self._checked_token_map(token_map)
            self.hash_constants = hash_constants(spec.engram, self.device)
            self.pad_class = int(self.token_map_V[spec.engram.pad_token_id])
            self.engram_tables = load_engram_tables(load, spec.engram)

    def _checked_token_map(self, token_map: Tensor | None) -> Tensor:
        engram = self.spec.engram
        assert engram is not None
        if token_map is None:
            raise ConfigError(f"{self.spec.name}: the model has Engram layers {engram.layer_ids}, so it needs its tokenizer's token map")
        if token_map.shape[0] < self.spec.vocab_size:  # a tokenizer may leave out the tail of a padded vocabulary
            missing = self.spec.vocab_size - token_map.shape[0]
            token_map = functional.pad(token_map, (0, missing), value=int(token_map[engram.pad_token_id]))
        if int(token_map.max()) >= engram.num_classes:
            raise ConfigError(f"{self.spec.name}: the token map has {int(token_map.max()) + 1} classes, the config {engram.num_classes}")
        return token_map.to(device=self.device, dtype=torch.int64)

    def num_bytes(self) -> int:
        """Bytes of all weights as held: fused and folded tensors, each storage once."""
        seen: dict[int, int] = {}
        stack: list[object] = [self.embed_VD, self.norm_D, self.head_VD, *self.layers]
        if self.draft_head is not None:
            stack += self.draft_head.parameters()
        if self.spec.engram is not None:
            stack += self.engram_tables.held()
        while stack:
            item = stack.pop()
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
            elif is_dataclass(item):
                stack += [getattr(item, entry.name) for entry in fields(item)]
        return sum(seen.values())

    def new_cache(self, config: CacheConfig) -> V41Cache:
        return V41Cache(self.spec, config, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache, capture: frozenset[str] = frozenset()) -> ForwardOutput:
        """Logits of ``batch.logit_rows_R``. Captures: "topk.layer{i}", "streams.after_layer" [T, L, S, D], "engram.row_ids" [T, E, C]."""
        assert isinstance(cache, V41Cache)
        num_tokens, num_rows = self._peers_of(batch)
        step = self.builder.build(batch, cache)
        row_ids_TEC = self._engram_rows(batch)
        if row_ids_TEC is not None:
            self.engram_tables.begin(row_ids_TEC, num_tokens)
        streams_TSD = self.embed(batch.token_ids_T)
        pre_TS = self.first_pre_S.expand(step.num_tokens, -1)
        run = Pass(self.spec, cache, step, self.builder, self.cache_rounding, capture, self.tensor)
        # Without a draft budget nobody will ask for drafts, so their main rows are not kept.
        drafts = self.draft_head if cache.config.max_draft_tokens else None
        features: list[Tensor] = []
        after_layer: list[Tensor] = []
        wants_streams = "streams.after_layer" in capture
        rows_R = batch.logit_rows_R
        # The last layer writes its rows for every token, but only the tokens that have logits need its output.
        narrow = rows_R.shape[0] < step.num_tokens and not wants_streams
        for layer in self.layers:
            if layer.engram is not None:
                streams_TSD = self._engram(streams_TSD, layer.layer, layer.engram, step)
            if drafts is not None and layer.layer in drafts.target_layers:
                features.append(streams_TSD.float().mean(1).to(self.dtype))

            only_T = rows_R if narrow and layer is self.layers[-1] else None

            def attend(x_TD: Tensor, layer: LayerWeights = layer, only_T: Tensor | None = only_T) -> Tensor:
                return attention(x_TD, layer, run, only_T)

            count = num_rows if layer is self.layers[-1] else num_tokens
            streams_TSD, pre_TS = block(streams_TSD, pre_TS, layer, self.spec, attend, step.token_kind_T, only_T, count)
            if wants_streams:
                after_layer.append(streams_TSD)
        if drafts is not None:
            drafts.stage_main_rows(torch.cat(features, dim=-1), step, cache)
        self._commit(batch, step, cache)
        if not narrow:
            streams_TSD, pre_TS = streams_TSD[rows_R], pre_TS[rows_R]
        logits_RV = self.logits(streams_TSD, pre_TS, self.norm_D)
        if after_layer:
            step.captures["streams.after_layer"] = torch.stack(after_layer, dim=1)
        if "engram.row_ids" in capture and row_ids_TEC is not None:
            step.captures["engram.row_ids"] = row_ids_TEC
        return ForwardOutput(logits_RV, captures=step.captures or None)

    @component("embed")
    def embed(self, token_ids_T: Tensor) -> Tensor:
        """All streams of a token begin as its embedding."""
        if self.tensor is None:
            embedded_TD = functional.embedding(token_ids_T, self.embed_VD)
        else:
            embedded_TD = embedding(self.tensor, token_ids_T, self.embed_VD, self.spec.vocab_size)
        return embedded_TD.to(self.stream_dtype).unsqueeze(1).expand(-1, self.spec.hc_mult, -1)

    @component("lm_head")
    def logits(self, streams_RSD: Tensor, pre_RS: Tensor, norm_D: Tensor) -> Tensor:
        hidden_RD = rms_norm(mhc_collapse(pre_RS, streams_RSD), norm_D, self.spec.rms_norm_eps)
        return self.head(hidden_RD.float())

    def head(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R, V] of normed float32 hidden states, the same on all tensor ranks."""
        logits_RV = functional.linear(hidden_RD, self.head_VD)
        return logits_RV if self.tensor is None else all_gather_vocabulary(self.tensor, logits_RV, self.spec.vocab_size)

    @torch.inference_mode()
    def join(self, peers: StepPeers) -> None:
        """Take part in the collectives of a forward of other data ranks."""
        if self.spec.engram is not None and any(peers.num_tokens):
            engram = self.spec.engram
            no_ids = torch.empty((0, len(engram.layer_ids), engram.num_columns), dtype=torch.int64, device=self.device)
            self.engram_tables.join(no_ids, peers.num_tokens)
        for layer in self.layers:
            if layer.moe.spread is not None:
                layer.moe.spread.join(peers.num_logit_rows if layer is self.layers[-1] else peers.num_tokens)

    @torch.inference_mode()
    def join_draft(self, peers: StepPeers) -> None:
        """The same for a draft round."""
        if self.draft_head is not None:
            self.draft_head.join(peers)

    def rebalance(self, maps: Sequence[ExpertMap]) -> int:
        """See ``base.Model``."""
        return rebalance(self._spread_layers(), maps)

    def take_expert_counts(self) -> list[list[int]]:
        """See ``base.Model``; the backbone's layers, then the draft's."""
        return [layer.take_counts() for layer in self._spread_layers()]

    def take_counters(self) -> RankCounters:
        """See ``base.Model``."""
        stats = self.engram_tables.stats.take() if self.spec.engram is not None else EngramStats()
        return RankCounters(
            traffic=self.groups.traffic.take() if self.groups else (),
            engram_hits=stats.hits,
            engram_misses=stats.misses,
            engram_wait_s=stats.wait_s,
        )

    def _spread_layers(self) -> list[RoutedExperts]:
        layers = self.layers + (self.draft_head.layers if self.draft_head else [])
        return [layer.moe.spread for layer in layers if layer.moe.spread is not None]

    def _peers_of(self, batch: ForwardBatch) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens of every data rank in this step, and rows with logits, which are what is left of them in the last layer."""
        if self.groups is None:
            return (), ()
        peers, me = batch.peers, self.place.data_rank
        mine = (batch.token_ids_T.shape[0], batch.logit_rows_R.shape[0])
        if peers is None or len(peers.num_tokens) != self.place.layout.dp or (peers.num_tokens[me], peers.num_logit_rows[me]) != mine:
            raise InvariantError(f"rank {self.place.rank} was given {mine} tokens and rows with logits, its peers know {peers}")
        return peers.num_tokens, peers.num_logit_rows

    def draft(self, request: DraftRequest, cache: KVCache) -> DraftOutput:
        """One DSpark round; see ``draft.DraftHead``. Raises ConfigError where the model or the cache has no draft."""
        if self.draft_head is None:
            raise ConfigError(f"{self.spec.name} has no draft layers")
        assert isinstance(cache, V41Cache)
        if cache.config.max_draft_tokens == 0:
            raise ConfigError(f"{self.spec.name}: the cache was made with max_draft_tokens 0, so it keeps no rows for the draft")
        return self.draft_head.draft(request, cache)

    @component("engram.fetch")
    def _engram_rows(self, batch: ForwardBatch) -> Tensor | None:
        """Row ids of all Engram layers [T, E, C]: they depend on token ids only, so they are known before the first layer."""
        engram = self.spec.engram
        if engram is None:
            return None
        classes_TG = engram_classes(
            batch.token_history_SL,
            batch.slots_B[batch.seq_of_token_T],
            batch.positions_T,
            self.token_map_V,
            self.pad_class,
            engram.max_ngram,
            self.builder.image_token_id,
        )
        constants = self.hash_constants
        return engram_hash(classes_TG, constants.multipliers_EG, constants.primes_EC, constants.offsets_EC)

    @component("engram.gate")
    def _engram(self, streams_TSD: Tensor, layer: int, weights: EngramWeights, step: StepIndex) -> Tensor:
        assert self.spec.engram is not None
        rows_TX = self.engram_tables.rows(self.spec.engram.layer_ids.index(layer))
        open_T = None if step.token_kind_T is None else (step.token_kind_T == 0).float()
        return engram_gate(streams_TSD, functional.linear(rows_TX, weights.wkv), weights.qk_weight, self.spec.rms_norm_eps, open_T)

    def _commit(self, batch: ForwardBatch, step: StepIndex, cache: V41Cache) -> None:
        """After the layers: tails first (they may need rows the rings are about to lose), then rings and pair state."""
        if batch.tail_saves:
            sequences, positions, tails = (list(column) for column in zip(*batch.tail_saves, strict=True))
            index = torch.tensor(sequences, device=self.device)
            cache.save_tails(tails, positions, batch.slots_B[index], batch.context_starts_B[index], batch.query_starts_B1[index])
        cache.commit_window(step.ring_rows_T)
        if step.pair_ring_rows_T is not None:
            cache.commit_pairs(step.pair_ring_rows_T)
