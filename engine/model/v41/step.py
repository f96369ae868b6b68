"""Everything about a step that all layers share: row indices, masks and rotations, made once per forward.

Legend: T tokens, B sequences, W window columns (first one: the sink's), J compressed positions of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.core.specs import V41Spec
from engine.kernels.indexer import TokenGroups, token_groups
from engine.kernels.rope import rope_frequencies, rope_rotation
from engine.model.batch import ForwardBatch
from engine.model.v41.cache import V41Cache
from engine.parallel.groups import Group


@dataclass(slots=True)
class RatioStep:
    """What the layers of one compress ratio share."""

    write_rows_T: Tensor  # flat row of the group that a token completes, the dump row where it completes none
    visible_T: Tensor  # compressed positions a token may see: (position + 1) // ratio
    rows_BJ: Tensor  # flat row of compressed position j of a sequence
    max_visible: int
    zero_row: int


@dataclass(slots=True)
class Selection:
    """The row table of a compressed layer into the cache's whole row tensor: sink and window columns, then compressed rows.

    Layers that share a selection differ by where their window rows begin only, so the table is moved on from layer to layer.
    """

    rows_TX: Tensor
    bias_TX: Tensor
    layer: int  # whose window the table points into

    def for_layer(self, layer: int, num_window_columns: int, layer_rows: int) -> Tensor:
        if layer != self.layer:
            self.rows_TX[:, :num_window_columns].add_((layer - self.layer) * layer_rows)
            self.layer = layer
        return self.rows_TX


@dataclass(slots=True)
class StepIndex:
    num_tokens: int
    stage_start: int
    window_rows_TW: Tensor
    window_bias_TW: Tensor
    rotation_plain: Tensor
    rotation_compressed: Tensor
    rotation_pair: Tensor | None  # at the first token of a token's pair
    pair_previous_T: Tensor | None  # row of the token before, in the pair state
    ring_rows_T: Tensor
    pair_ring_rows_T: Tensor | None
    groups: TokenGroups
    ratios: dict[int, RatioStep]
    seq_of_token_T: Tensor
    token_kind_T: Tensor | None  # 1 for image tokens; None where a model has none
    selection: Selection | None = None  # of the nearest index source so far
    candidates_TJ: Tensor | None = None
    captures: dict[str, Tensor] = field(default_factory=dict)

    def narrowed(self, only_T: Tensor) -> StepIndex:
        """The query side for the tokens ``only_T`` alone (every token its own group); row writes stay those of the whole step."""
        selection = self.selection
        if selection is not None:
            selection = Selection(selection.rows_TX[only_T], selection.bias_TX[only_T], selection.layer)
        ratios = {number: replace(ratio, visible_T=ratio.visible_T[only_T]) for number, ratio in self.ratios.items()}
        return replace(
            self,
            window_rows_TW=self.window_rows_TW[only_T],
            window_bias_TW=self.window_bias_TW[only_T],
            rotation_plain=self.rotation_plain[only_T],
            rotation_compressed=self.rotation_compressed[only_T],
            groups=TokenGroups(self.seq_of_token_T[only_T], 1),
            ratios=ratios,
            seq_of_token_T=self.seq_of_token_T[only_T],
            token_kind_T=None if self.token_kind_T is None else self.token_kind_T[only_T],
            selection=selection,
            candidates_TJ=None if self.candidates_TJ is None else self.candidates_TJ[only_T],
        )


@dataclass(slots=True)
class Pass:
    """One forward in flight: what every layer needs beside its input and its weights."""

    spec: V41Spec
    cache: V41Cache
    step: StepIndex
    builder: StepBuilder
    rounding: bool
    capture: frozenset[str]
    tensor: Group | None = None  # the ranks among which heads and widths are split


class StepBuilder:
    """Builds StepIndex objects for one model on one device."""

    def __init__(self, spec: V41Spec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.plain_Q = rope_frequencies(spec.rope_dim, spec.rope_theta, None, device)
        self.compressed_Q = rope_frequencies(spec.rope_dim, spec.compress_rope_theta, spec.rope_scaling, device)
        self.ratios = tuple(sorted(set(spec.compress_ratios) - {0}))
        # The sink column comes first: a step back so long that its position is below 0 and its row the zero row.
        steps = torch.arange(spec.sliding_window - 1, -1, -1, device=device)
        self._steps_W = torch.cat((torch.full((1,), 1 << 40, device=device), steps))
        self._minus_inf = torch.tensor(float("-inf"), dtype=dtype, device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self.image_token_id = spec.image_token_id if spec.image_token_id is not None and spec.image_token_id < spec.vocab_size else None

    def window_steps(self, width: int) -> Tensor:
        """How far back each window column looks: the sink column, then ``width`` columns, oldest first."""
        if width == self.spec.sliding_window:
            return self._steps_W
        return torch.cat((self._steps_W[:1], self._steps_W[-width:]))

    def bias(self, valid: Tensor) -> Tensor:
        """0 where valid, -inf elsewhere, in the model's dtype."""
        return torch.where(valid, self._zero, self._minus_inf)

    def build(self, batch: ForwardBatch, cache: V41Cache) -> StepIndex:
        positions_T, seq_T = batch.positions_T, batch.seq_of_token_T
        num_tokens = positions_T.shape[0]
        slots_T = batch.slots_B[seq_T]
        starts_T = batch.context_starts_B[seq_T]
        width = min(self.spec.sliding_window, max(batch.max_context_len, 1))
        positions_TW = positions_T.unsqueeze(-1) - self.window_steps(width)
        window_rows_TW = cache.window_rows(positions_TW, slots_T, starts_T, batch.query_starts_B1[seq_T])
        rotation_compressed = rope_rotation(positions_T, self.compressed_Q)
        left_T = batch.context_lens_B[seq_T] - positions_T  # tokens from this one to the sequence's end, itself included
        ring_T = slots_T * cache.ring_rows + positions_T % cache.ring_rows
        step = StepIndex(
            num_tokens=num_tokens,
            stage_start=cache.stage_start,
            window_rows_TW=window_rows_TW,
            window_bias_TW=self.bias(positions_TW >= 0),
            rotation_plain=rope_rotation(positions_T, self.plain_Q),
            rotation_compressed=rotation_compressed,
            rotation_pair=None,
            pair_previous_T=None,
            ring_rows_T=torch.where(left_T <= cache.ring_rows, ring_T, cache.dump_row),
            pair_ring_rows_T=None,
            groups=token_groups(batch.query_starts_B1, seq_T, batch.num_sequences, batch.max_query_len),
            ratios={ratio: self._ratio_step(ratio, batch, cache) for ratio in self.ratios},
            seq_of_token_T=seq_T,
            token_kind_T=None if self.image_token_id is None else (batch.token_ids_T == self.image_token_id).long(),
        )
        if cache.pair_layers:
            rows = cache.pair_ring_rows
            previous_T = positions_T - 1
            stage_T = torch.arange(cache.pair_stage_start - 1, cache.pair_stage_start - 1 + num_tokens, device=positions_T.device)
            step.rotation_pair = rope_rotation(positions_T - positions_T % 2, self.compressed_Q)
            # Position -1 of a first token lands on a ring row of its own slot; its "pair" is never written.
            step.pair_previous_T = torch.where(previous_T >= starts_T, stage_T, slots_T * rows + previous_T % rows)
            step.pair_ring_rows_T = torch.where(left_T <= rows, slots_T * rows + positions_T % rows, cache.pair_dump_row)
        return step

    def _ratio_step(self, ratio: int, batch: ForwardBatch, cache: V41Cache) -> RatioStep:
        block_rows = cache.block_rows(ratio)
        num_blocks = -(-batch.max_context_len // cache.config.block_size)
        steps = torch.arange(block_rows, device=batch.positions_T.device)
        rows_BJ = (batch.block_table_BM[:, :num_blocks, None] * block_rows + steps).flatten(1)
        max_visible = batch.max_context_len // ratio
        next_T = batch.positions_T + 1
        write_rows_T = batch.kv_rows_T
        if ratio > 1:
            write_rows_T = torch.where(next_T % ratio == 0, write_rows_T // ratio, cache.main_dump_row(ratio))
        return RatioStep(
            write_rows_T=write_rows_T,
            visible_T=next_T // ratio,
            rows_BJ=rows_BJ[:, :max_visible],
            max_visible=max_visible,
            zero_row=cache.main_zero_row(ratio),
        )
