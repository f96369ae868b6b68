"""The KV memory of one rank for a V4.1 model: compressed rows and index keys in blocks, window rings and pair state per slot.

Window rows of all layers (backbone, then draft) lie in one tensor [L, N, C]; the N rows of a layer are

    slots * R    rings: the row of position p in slot s is s * R + p % R
    stage        rows of the step in flight, in packed token order; attention reads them here, rings take them over afterwards
    tails * W    stored window tails: the k-th row of a tail that ends at position e (exclusive) holds position e - W + k
    1 + 1        a row of zeros (masked columns, the sink column) and a dump row (writes that must not land anywhere)

so that one row index, made once per step, serves every layer. R = W + max_draft + 2: a step may write max_draft rows past the
last one that survives verification without overwriting a row the next step needs, also when a fork lags one token behind.

A ratio-2 KV source keeps the float32 (kv, gate) projection of recent tokens the same way: slots * G ring rows by position, a
stage, a dump row. Rejected drafts are overwritten by position; a start at a block boundary needs none of it.

Legend: L window layers, N rows, C head dimension, S slots, R ring rows, G pair-ring rows, W window, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.specs import V41Spec
from engine.kernels.timing import component


@dataclass(frozen=True, slots=True)
class _HostState:
    window_HLRC: Tensor
    pairs_HLGU: Tensor


class V41Cache:
    """Implements base.KVCache. All storage is allocated here, once."""

    def __init__(self, spec: V41Spec, config: CacheConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError where the block size is not a multiple of every compress ratio."""
        for ratio in set(spec.compress_ratios) - {0}:
            if config.block_size % ratio:
                raise ConfigError(f"block_size {config.block_size} is not a multiple of the compress ratio {ratio}")
        self.spec = spec
        self.config = config
        self.device = device
        self.window = spec.sliding_window
        self.num_layers = spec.num_window_layers
        self.ring_rows = self.window + config.max_draft_tokens + 2
        self.pair_ring_rows = config.max_draft_tokens + 2
        draft_rows = config.max_running * spec.dspark.block_size if spec.dspark else 0
        self.stage_rows = max(config.max_batched_tokens, draft_rows)
        self.stage_start = config.max_running * self.ring_rows
        self.tail_start = self.stage_start + self.stage_rows
        self.zero_row = self.tail_start + config.num_tails * self.window
        self.dump_row = self.zero_row + 1
        self.layer_rows = self.dump_row + 1
        sources = spec.kv_source_layer_ids
        main_rows = [self.block_rows(spec.compress_ratios[layer]) * config.num_blocks + 2 for layer in sources]
        window_rows = self.num_layers * self.layer_rows
        # Window rows of all layers, then the main rows of each source, in one tensor: a layer gathers both kinds with one row table.
        self.rows_NC = torch.zeros((window_rows + sum(main_rows), spec.head_dim), dtype=dtype, device=device)
        self.window_LNC = self.rows_NC[:window_rows].view(self.num_layers, self.layer_rows, spec.head_dim)

        self.pair_layers = tuple(layer for layer in spec.kv_source_layer_ids if spec.compress_ratios[layer] == 2)
        self.pair_stage_start = config.max_running * self.pair_ring_rows
        self.pair_dump_row = self.pair_stage_start + config.max_batched_tokens
        pair_rows = self.pair_dump_row + 1 if self.pair_layers else 0
        self.pairs_LNU = torch.zeros((len(self.pair_layers), pair_rows, 2 * spec.head_dim), device=device)

        # Compressed rows and index keys of each KV source; the last two rows are zeros and dump, as above.
        self.main: dict[int, Tensor] = {}
        self.main_start: dict[int, int] = {}  # where a source's rows begin in rows_NC
        self.keys: dict[int, Tensor] = {}
        start = window_rows
        for layer, rows in zip(sources, main_rows, strict=True):
            self.main_start[layer] = start
            self.main[layer] = self.rows_NC[start : start + rows]
            self.keys[layer] = torch.zeros((rows, spec.index_head_dim), dtype=dtype, device=device)
            start += rows
        pinned = device.type == "cuda"
        self._host_blocks = [
            torch.zeros((config.num_host_blocks, *view.shape[1:]), dtype=dtype, pin_memory=pinned) for view in self._block_views()
        ]
        states = config.num_host_states
        self._host_state = _HostState(
            torch.zeros((states, self.num_layers, self.ring_rows, spec.head_dim), dtype=dtype, pin_memory=pinned),
            torch.zeros((states, len(self.pair_layers), self.pair_ring_rows, 2 * spec.head_dim), pin_memory=pinned),
        )

    def block_rows(self, ratio: int) -> int:
        """Compressed rows a block holds for a layer of this ratio."""
        return self.config.block_size // ratio

    def main_dump_row(self, ratio: int) -> int:
        return self.block_rows(ratio) * self.config.num_blocks + 1

    def main_zero_row(self, ratio: int) -> int:
        return self.block_rows(ratio) * self.config.num_blocks

    def num_bytes(self) -> int:
        tensors = [self.rows_NC, self.pairs_LNU, *self.keys.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # -- blocks

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        if not sources:
            return
        source, destination = self._index(sources), self._index(destinations)
        for view in self._block_views():
            view.index_copy_(0, destination, view.index_select(0, source))

    def clear_blocks(self, blocks: list[int]) -> None:
        index = self._index(blocks)
        for view in self._block_views():
            view.index_fill_(0, index, 0)

    def swap_out(self, slot: int, blocks: list[int], host_blocks: list[int], host_state: int) -> None:
        """Copy ``blocks`` and the state of ``slot`` to the host; returns when the bytes are there."""
        if blocks:
            index = self._index(blocks)
            for view, host in zip(self._block_views(), self._host_blocks, strict=True):
                host[host_blocks] = view.index_select(0, index).cpu()
        self._host_state.window_HLRC[host_state] = self._rings()[:, slot].cpu()
        self._host_state.pairs_HLGU[host_state] = self._pair_rings()[:, slot].cpu()

    def swap_in(self, host_blocks: list[int], blocks: list[int]) -> None:
        if not blocks:
            return
        index = self._index(blocks)
        for view, host in zip(self._block_views(), self._host_blocks, strict=True):
            view.index_copy_(0, index, host[host_blocks].to(self.device))

    # -- per-sequence state

    def reset_state(self, slots: list[int]) -> None:
        """Nothing to clear: a row is read only at a position its sequence has written (positions below 0 read the zero row)."""

    def copy_state(self, source_slots: list[int], destination_slots: list[int]) -> None:
        if not source_slots:
            return
        source, destination = self._index(source_slots), self._index(destination_slots)
        for view in (self._rings(), self._pair_rings()):
            if view.numel():
                view.index_copy_(1, destination, view.index_select(1, source))

    def restore_state(self, host_state: int, slot: int) -> None:
        self._rings()[:, slot] = self._host_state.window_HLRC[host_state].to(self.device)
        self._pair_rings()[:, slot] = self._host_state.pairs_HLGU[host_state].to(self.device)

    def load_tails(self, tails: list[int], slots: list[int], positions: list[int]) -> None:
        """Rows of positions [position - W, position) from the tail into the slot's ring.

        Those below 0 land on ring rows of later positions, which the sequence writes before it reads them.
        """
        if not tails:
            return
        steps_W = torch.arange(self.window, device=self.device)
        positions_AW = self._index(positions).unsqueeze(-1) - self.window + steps_W
        ring_AW = self._index(slots).unsqueeze(-1) * self.ring_rows + positions_AW % self.ring_rows
        self._copy_rows(self._tail_rows(self._index(tails)).flatten(), ring_AW.flatten())

    @component("kv_write")
    def save_tails(self, tails: list[int], positions: list[int], slots_A: Tensor, context_starts_A: Tensor, query_starts_A: Tensor) -> None:
        """Keep the rows of positions [position - W, position); to be called after the layers and before ``commit_window``.

        Positions from ``context_starts`` on are taken from the stage (row ``query_starts + position - context_starts``), earlier ones
        from the ring.
        """
        steps_W = torch.arange(self.window, device=self.device)
        positions_AW = self._index(positions).unsqueeze(-1) - self.window + steps_W
        rows_AW = self.window_rows(positions_AW, slots_A, context_starts_A, query_starts_A)
        self._copy_rows(rows_AW.flatten(), self._tail_rows(self._index(tails)).flatten())

    def window_rows(self, positions_XW: Tensor, slots_X: Tensor, context_starts_X: Tensor, query_starts_X: Tensor) -> Tensor:
        """The row of each position during a step: stage if it belongs to the step, ring if older, the zero row below 0."""
        ring_XW = (slots_X * self.ring_rows).unsqueeze(-1) + positions_XW % self.ring_rows
        stage_XW = (query_starts_X - context_starts_X + self.stage_start).unsqueeze(-1) + positions_XW
        rows_XW = torch.where(positions_XW >= context_starts_X.unsqueeze(-1), stage_XW, ring_XW)
        return rows_XW.masked_fill_(positions_XW < 0, self.zero_row)

    @component("kv_write")
    def commit_window(self, ring_rows_T: Tensor) -> None:
        """Take the step's staged rows over into the rings, all layers at once; the dump row takes what no later step needs."""
        num_tokens = ring_rows_T.shape[0]
        staged = self.window_LNC[:, self.stage_start : self.stage_start + num_tokens].clone()
        self.window_LNC.index_copy_(1, ring_rows_T, staged)

    @component("kv_write")
    def commit_pairs(self, pair_rows_T: Tensor) -> None:
        """The same for the pair state."""
        num_tokens = pair_rows_T.shape[0]
        staged = self.pairs_LNU[:, self.pair_stage_start : self.pair_stage_start + num_tokens].clone()
        self.pairs_LNU.index_copy_(1, pair_rows_T, staged)

    # -- views

    def _copy_rows(self, source: Tensor, destination: Tensor) -> None:
        self.window_LNC.index_copy_(1, destination, self.window_LNC.index_select(1, source))

    def _tail_rows(self, tails_A: Tensor) -> Tensor:
        steps_W = torch.arange(self.window, device=self.device)
        return (tails_A * self.window + self.tail_start).unsqueeze(-1) + steps_W

    def _rings(self) -> Tensor:
        rings = self.window_LNC[:, : self.stage_start]
        return rings.view(self.num_layers, self.config.max_running, self.ring_rows, -1)

    def _pair_rings(self) -> Tensor:
        rings = self.pairs_LNU[:, : self.pair_stage_start]
        return rings.view(len(self.pair_layers), -1 if self.pair_layers else 0, self.pair_ring_rows, self.pairs_LNU.shape[-1])

    def _block_views(self) -> list[Tensor]:
        """Every block-paged tensor as [blocks, rows of a block, width]."""
        views = []
        for layer in self.spec.kv_source_layer_ids:
            rows = self.block_rows(self.spec.compress_ratios[layer])
            for tensor in (self.main[layer], self.keys[layer]):
                views.append(tensor[:-2].view(self.config.num_blocks, rows, -1))
        return views

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
