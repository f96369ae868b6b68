"""What each component of a step has to do, from shapes alone: counts of work for the fit to price. No device, no engine internals.

A *term* is a count per step and rank (rows, pairs, messages) times a unit of work (FLOP or bytes of one of them on this rank). A component
costs the sum of its terms, each at fitted rates. Terms are chosen so that every one is >= 0 and grows with tokens and context: whatever
non-negative rates the fit finds, the price is monotone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calibration.expert_work import ExpertShape, ExpertWork, expert_shape, expert_work, reach
from calibration.features import Array, FeatureTable
from calibration.imbalance import ExpertLoads
from engine.core.sharding import RankPlace, held_kv_heads
from engine.core.specs import AttentionRole, DenseSpec, ModelSpec, V41Spec
from engine.core.traffic import ID_BYTES, dispatch_row_bytes, sends_everything

Resource = Literal["compute", "memory", "host"]
ROW_KNOTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class Term:
    """``count`` [N, R] times ``unit``. ``knots``: counts at which the cost of one more may change, both ways."""

    name: str
    count: Array
    unit: float = 1.0
    knots: tuple[float, ...] = ()
    resource: Resource = "compute"


@dataclass(frozen=True, slots=True)
class Messages:
    """One kind of collective in a step: ``calls`` of ``bytes_each`` that a rank sends to others, [N, R] each."""

    component: str
    calls: Array
    bytes_each: Array


Terms = dict[str, list[Term]]  # by component


def terms(
    spec: ModelSpec,
    place: RankPlace,
    table: FeatureTable,
    element_bytes: int,
    draft_tokens: int = 0,
    loads: ExpertLoads | None = None,
) -> Terms:
    """Terms of every component that runs under ``place``, but for what ranks send each other (``messages``).

    ``loads``: experts' work is the busiest rank's, on every rank, since all wait for it in each layer; None: the mean rank's, which is what
    one measured rank has.
    """
    shape = expert_shape(spec)
    work = None if shape is None else expert_work(place, shape, _effective_rows(table, spec.num_layers), loads)
    if isinstance(spec, DenseSpec):
        found = _dense_terms(spec, place, table, element_bytes, work)
    else:
        assert work is not None
        found = _V41(spec, place, table, element_bytes, draft_tokens, work).terms()
    return found | _packing_terms(spec, place, table, work)


def _packing_terms(spec: ModelSpec, place: RankPlace, table: FeatureTable, work: ExpertWork | None) -> Terms:
    """A rank's own part of its collectives: copying rows together, adding up what came."""
    layout, found = place.layout, Terms()

    def packing(count: Array) -> list[Term]:
        return [Term(LAUNCH, _some(count), 1.0, (), "host"), Term("rows", count, float(spec.hidden_size), ROW_KNOTS, "memory")]

    if layout.tp > 1:
        found["all_reduce"] = packing(_effective_rows(table, spec.num_layers))
        found["all_gather"] = packing(table.emitting_rows)
    if layout.dp > 1 and work is not None:
        found["dispatch"], found["combine"] = packing(work.rows), packing(work.rows)
    return found


def _some(count: Array) -> Array:
    return (count > 0).astype(np.float64)


def _effective_rows(table: FeatureTable, num_layers: int) -> Array:
    """Rows a layer has on average: the last one computes those with logits only."""
    return (table.tokens * (num_layers - 1) + np.minimum(table.tokens, table.emitting_rows)) / num_layers


class _V41:
    def __init__(
        self, spec: V41Spec, place: RankPlace, table: FeatureTable, element_bytes: int, draft_tokens: int, work: ExpertWork
    ) -> None:
        self.spec, self.place, self.table, self.element_bytes, self.draft_tokens = spec, place, table, element_bytes, draft_tokens
        self.work = work
        self.rows = _effective_rows(table, spec.num_layers)
        self.launch = Term(LAUNCH, _some(table.tokens), 1.0, (), "host")

    def terms(self) -> Terms:
        spec, table, layers = self.spec, self.table, self.spec.num_layers
        result: Terms = {
            "embed": [self.launch, self._rows("rows", table.tokens, spec.hc_mult * spec.hidden_size * 4, "memory")],
            "norm": [self.launch, self._rows("rows", self.rows, 3 * layers * spec.hidden_size, "host")],
            "mhc": [self.launch, self._rows("rows", self.rows, 2 * layers * spec.hc_mult * spec.hidden_size * 8)],
            "projection": [self.launch, self._rows("flops", self.rows, layers * self._projection_flops())],
            "kv_write": [
                self.launch,
                self._rows("rows", table.tokens, layers * spec.head_dim * self.element_bytes, "host"),
                Term(
                    "tails",
                    table.saved_tails,
                    spec.num_window_layers * spec.sliding_window * spec.head_dim * self.element_bytes,
                    (),
                    "memory",
                ),
            ],
            "router": [self.launch, self._rows("flops", self.rows, 2 * layers * spec.hidden_size * spec.num_experts, "host")],
            "lm_head": [
                self.launch,
                self._rows("flops", table.emitting_rows, 2 * spec.hidden_size * spec.vocab_size / self.place.layout.tp),
            ],
            "other": [
                self.launch,
                self._rows("rows", table.tokens, spec.sliding_window * 8, "host"),
                Term("requests", table.requests, 1.0, (), "host"),
                Term("starts", table.started_requests, 1.0, (), "host"),
                Term("tables", table.requests * table.longest_context_tokens, 8.0, (), "host"),
            ],
            "sampler": [self.launch, self._rows("rows", table.emitting_rows, spec.vocab_size * 4, "host")],
        }
        result |= self._attention() | self._experts()
        if spec.engram is not None:
            width = spec.engram.num_columns * spec.engram.head_dim
            engram_layers = len(spec.engram.layer_ids)
            gate = 2 * width * (spec.hc_mult + 1) * spec.hidden_size
            result["engram.fetch"] = [self.launch, self._rows("rows", table.tokens, engram_layers * width * self.element_bytes, "memory")]
            result["engram.gate"] = [self.launch, self._rows("flops", table.tokens, engram_layers * gate)]
        if spec.dspark is not None and self.draft_tokens:
            result["draft"] = self._draft()
        return result

    def _rows(self, name: str, count: Array, unit: float, resource: Resource = "compute") -> Term:
        return Term(name, count, unit, ROW_KNOTS, resource)

    def _projection_flops(self) -> float:
        spec, tp = self.spec, self.place.layout.tp
        width = spec.num_heads * spec.head_dim
        whole = spec.hidden_size * spec.q_lora_rank + spec.hidden_size * spec.head_dim
        split = spec.q_lora_rank * width + width * spec.o_lora_rank + spec.o_groups * spec.o_lora_rank * spec.hidden_size
        return 2 * (whole + split / tp)

    def _attention(self) -> Terms:
        """Attention reads a padded table: as many columns for every token as the longest sequence of the step needs."""
        spec, table, tp = self.spec, self.table, self.place.layout.tp
        longest = table.longest_context_tokens
        window = np.minimum(longest, spec.sliding_window) + 1
        pair_flops = 4 * spec.num_heads / tp * spec.head_dim
        several = (table.longest_query_tokens > 1).astype(np.float64)
        plain, sparse, scored, grouped, listed, written = (np.zeros_like(longest) for _ in range(6))
        for layer, ratio in enumerate(spec.compress_ratios):
            role, rows = spec.role(layer), table.tokens if layer < spec.num_layers - 1 else np.minimum(table.tokens, table.emitting_rows)
            if ratio == 0:
                plain = plain + rows * window
                continue
            visible = np.floor(longest / ratio)
            chosen = np.minimum(visible, spec.index_top_k)
            sparse = sparse + rows * (window + chosen)
            if role in (AttentionRole.FULL, AttentionRole.REINDEX):
                looked_at = np.where(self._scores(layer, visible), visible, 0.0)
                scored = scored + rows * looked_at
                grouped = grouped + several * table.requests * looked_at
                listed = listed + rows * (window + chosen)
            if role is AttentionRole.FULL:
                written = written + table.tokens
        index_flops = 2 * spec.index_num_heads * spec.index_head_dim
        result: Terms = {}
        if 0 in spec.compress_ratios:
            result["attention.window"] = [self.launch, self._rows("rows", table.tokens, 1.0, "memory"), Term("pairs", plain, pair_flops)]
        if any(spec.compress_ratios):
            result["attention.sparse"] = [self.launch, self._rows("rows", table.tokens, 1.0, "memory"), Term("pairs", sparse, pair_flops)]
        if any(spec.compress_ratios):
            result["indexer"] = [
                self.launch,
                Term("scoring", _some(scored), 1.0, (), "host"),
                self._rows("rows", table.tokens, 1.0, "host"),
                Term("scored", scored, index_flops),
                # Tokens of a sequence are scored together; where it has several, its last group is filled up.
                Term("groups", grouped, index_flops),
                Term(
                    "scored_rows",
                    np.where(scored > 0, table.tokens, 0.0),
                    2 * spec.q_lora_rank * spec.index_num_heads * spec.index_head_dim,
                ),
                Term("listed", listed, 8.0, (), "memory"),
            ]
            unit = 4 * spec.hidden_size * spec.head_dim
            result["compressor"] = [self.launch, self._rows("flops", written, unit)]
        return result

    def _scores(self, layer: int, visible: Array) -> NDArray[np.bool_]:
        """Whether a layer scores its keys: where not all are chosen anyway, or blocks of candidates are to be found."""
        spec = self.spec
        beyond = visible > spec.index_top_k
        if layer == spec.candidate_source_layer_id:
            beyond |= np.ceil(visible / spec.candidate_block_size) > spec.candidate_top_k_blocks
        return beyond

    def _experts(self) -> Terms:
        """Routed experts: every one a rank holds and its tokens touch is read once; few tokens may be given to all of them instead."""
        spec, layout, layers = self.spec, self.place.layout, self.spec.num_layers
        rows, per_expert = self.work.rows, 3 * spec.hidden_size * spec.moe_intermediate_size / layout.expert_tp
        flops = 2 * per_expert * spec.experts_per_token * layers / layout.ep
        launch = Term(LAUNCH, _some(rows), 1.0, (), "host")
        result: Terms = {
            "expert_gemm": [
                launch,
                Term("many", (rows > 1).astype(np.float64), 1.0, (), "host"),
                Term("weights", self.work.touched, per_expert * self.element_bytes * layers, (), "memory"),
                self._rows("flops", self.work.tokens, flops),
            ]
        }
        if layout.num_gpus > 1:
            shared = 6 * spec.num_shared_experts * spec.moe_intermediate_size / layout.tp * spec.hidden_size * layers
            result["shared_expert"] = [self.launch, self._rows("flops", self.rows, shared)]
        else:  # one with the routed ones where they are few
            shared = 6 * spec.num_shared_experts * spec.moe_intermediate_size * spec.hidden_size * layers
            result["shared_expert"] = [
                Term(LAUNCH, (self.rows > 8).astype(np.float64), 1.0, (), "host"),
                Term("flops", np.maximum(0.0, self.rows - 8), shared, ROW_KNOTS),
            ]
        return result

    def _draft(self) -> list[Term]:
        spec, dspark = self.spec, self.spec.dspark
        assert dspark is not None
        drafting = self.table.emitting_rows - self.table.draft_rows
        block_flops = 2 * dspark.block_size * dspark.num_layers * spec.hidden_size * (spec.q_lora_rank + spec.head_dim)
        head = 2 * self.draft_tokens * spec.hidden_size * spec.vocab_size / self.place.layout.tp
        return [
            Term(LAUNCH, _some(drafting), 1.0, (), "host"),
            self._rows("blocks", drafting, block_flops),
            Term("head", drafting, head),
            Term("main_rows", self.table.tokens, 2.0 * len(dspark.target_layer_ids) * spec.hidden_size * spec.hidden_size),
        ]


def _dense_terms(spec: DenseSpec, place: RankPlace, table: FeatureTable, element_bytes: int, work: ExpertWork | None) -> Terms:
    """The dense family has no marks inside a layer on CPUs, where a decode step is one compiled call: its work is one component, whose two
    forms (every sequence one token; anything else) have rates of their own."""
    tp, layers = place.layout.tp, spec.num_layers
    rows = _effective_rows(table, layers)
    width, kv_width = spec.num_heads * spec.head_dim / tp, held_kv_heads(spec, place) * spec.head_dim
    macs = spec.hidden_size * (2 * width + 2 * kv_width)
    if spec.moe is None or work is None:
        macs += 3 * spec.hidden_size * spec.intermediate_size / tp
    else:  # other ranks' tokens for the experts here are as many more rows
        own = 3 * spec.hidden_size * spec.moe.intermediate_size * spec.moe.experts_per_token / place.layout.ep / place.layout.expert_tp
        rows = (rows * macs + work.tokens * own) / (macs + own)
        macs += own
    row_flops = 2.0 * layers * macs
    head_flops = 2.0 * spec.hidden_size * spec.vocab_size / tp
    kv_bytes = 2.0 * layers * kv_width * element_bytes
    pair_flops = 4.0 * layers * width
    decode = ((table.longest_query_tokens <= 1) & (table.tokens > 0)).astype(np.float64)
    mixed = _some(table.tokens) - decode
    padded = table.requests * table.longest_context_tokens
    return {
        "other": [
            Term("decode.launch", decode, 1.0, (), "memory"),
            Term("decode.flops", decode * rows, row_flops, ROW_KNOTS),
            Term("decode.kv", decode * table.context_tokens, kv_bytes, (), "memory"),
            Term("decode.padded", decode * padded, kv_bytes, (), "memory"),
            Term("mixed.launch", mixed, 1.0, (), "memory"),
            Term("mixed.flops", mixed * rows, row_flops, ROW_KNOTS),
            Term("mixed.head", mixed * table.emitting_rows, head_flops, (1.0, 4.0, 16.0)),
            Term("mixed.pairs", mixed * table.context_pairs, pair_flops),
            Term("mixed.padded", mixed * padded, kv_bytes, (), "memory"),
            Term("mixed.squares", mixed * table.longest_query_tokens * table.longest_context_tokens, pair_flops),
            Term("mixed.requests", mixed * table.requests, 1.0, (), "host"),
            Term("starts", table.started_requests, 1.0, (), "host"),
        ]
    }


# --- what ranks send each other -----------------------------------------------------------------------------------------------


def messages(
    spec: ModelSpec,
    place: RankPlace,
    table: FeatureTable,
    element_bytes: int,
    draft_tokens: int = 0,
    loads: ExpertLoads | None = None,
) -> list[Messages]:
    """Every collective of a step, by kind and size, as ``core.traffic`` counts their bytes; with ``loads``, what the busiest expert rank
    receives and returns where that is more."""
    layout, found = place.layout, list[Messages]()
    if place.num_ranks == 1:
        return found
    tokens, rows = table.tokens, np.minimum(table.tokens, table.emitting_rows)
    row_bytes = spec.hidden_size * element_bytes
    if layout.tp > 1:
        busy, emits = _some(tokens), _some(rows)
        others = layout.tp - 1
        found.append(Messages("all_reduce", busy * (2 * spec.num_layers - 1), tokens * row_bytes * others))
        found.append(Messages("all_reduce", emits * 2, rows * row_bytes * others))
        found.append(Messages("all_gather", emits, rows * spec.vocab_size / layout.tp * 4 * others))
    experts = expert_shape(spec)
    if layout.dp > 1 and experts is not None:
        found += _expert_messages(spec, place, table, element_bytes, experts, loads)
    if isinstance(spec, V41Spec):
        found += _v41_messages(spec, place, table, element_bytes, draft_tokens)
    return found


def _expert_messages(
    spec: ModelSpec, place: RankPlace, table: FeatureTable, element_bytes: int, shape: ExpertShape, loads: ExpertLoads | None
) -> list[Messages]:
    others = place.num_ranks - 1
    mine = _effective_rows(table, shape.num_layers) / place.layout.tp
    total = mine.sum(axis=1, keepdims=True) * place.layout.tp
    theirs = total - mine
    any_rows = np.broadcast_to(_some(table.tokens.sum(axis=1, keepdims=True)), mine.shape) * shape.num_layers
    everything, share = sends_everything(place.layout, shape.top_k), reach(place, shape.top_k, loads)
    out_rows, back_rows = mine * others * share, theirs * share
    if loads is not None and not everything:
        busiest = loads.rows(total) * theirs / np.maximum(total, 1e-12)
        out_rows, back_rows = np.maximum(out_rows, busiest), np.maximum(back_rows, busiest)
    found = [
        Messages("dispatch", any_rows, out_rows * dispatch_row_bytes(spec.hidden_size, shape.top_k, element_bytes)),
        Messages("combine", any_rows, back_rows * spec.hidden_size * element_bytes),
    ]
    if not everything:
        found.append(Messages("dispatch", any_rows, np.full_like(mine, 8.0 * others)))
    return found


def _v41_messages(spec: V41Spec, place: RankPlace, table: FeatureTable, element_bytes: int, draft_tokens: int) -> list[Messages]:
    found: list[Messages] = []
    layout, others = place.layout, place.num_ranks - 1
    busy = np.broadcast_to(_some(table.tokens.sum(axis=1, keepdims=True)), table.tokens.shape)
    if spec.engram is not None and place.shards_engram:
        ids = table.tokens / layout.tp * spec.engram.num_columns * len(spec.engram.layer_ids)
        away = others / place.num_ranks
        found.append(Messages("engram.fetch", busy, ids * others * ID_BYTES))
        found.append(Messages("engram.fetch", busy, ids * away * spec.engram.head_dim * element_bytes))
        if layout.tp > 1:
            gathered = ids * spec.engram.head_dim * element_bytes * (layout.tp - 1)
            found.append(Messages("engram.fetch", _some(table.tokens), gathered))
    if draft_tokens and spec.dspark is not None:
        drafting = table.emitting_rows - table.draft_rows
        block = drafting * spec.dspark.block_size
        row_bytes = spec.hidden_size * element_bytes
        if layout.tp > 1:
            found.append(Messages("draft", _some(drafting) * (1 + 2 * spec.dspark.num_layers), block * row_bytes * (layout.tp - 1)))
            found.append(Messages("draft", _some(drafting), drafting * draft_tokens * spec.vocab_size / layout.tp * 4 * (layout.tp - 1)))
        if layout.dp > 1:
            any_block = np.broadcast_to(_some(block.sum(axis=1, keepdims=True)), block.shape) * spec.dspark.num_layers
            found.append(Messages("draft", 2 * any_block, block / layout.tp * row_bytes * others))
    return found
