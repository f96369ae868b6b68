"""Paged KV memory of a dense model."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.errors import InvariantError
from engine.core.specs import DenseSpec


class DenseCache:
    """Implements base.KVCache: ``kv_L2NJPd`` [layers, key/value, blocks, kv heads, tokens per block, head_dim]; no per-sequence state."""

    def __init__(
        self, spec: DenseSpec, config: CacheConfig, *, dtype: torch.dtype, device: torch.device, num_kv_heads: int | None = None
    ) -> None:
        """``num_kv_heads`` where this rank has not all of them."""
        self.config = config
        self._num_kv_heads = num_kv_heads = num_kv_heads or spec.num_kv_heads
        shape = (spec.num_layers, 2, config.num_blocks, num_kv_heads, config.block_size, spec.head_dim)
        # Zeros, not empty: a masked position still meets weight 0, and 0 times a stray NaN would be NaN.
        self._kv_L2NJPd = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = list(self._kv_L2NJPd)
        self._rows = [layer.view(-1, spec.head_dim) for layer in self._layers]
        host_shape = (spec.num_layers, 2, config.num_host_blocks, *shape[3:])
        self._host_L2NJPd = torch.zeros(host_shape, dtype=dtype, pin_memory=device.type == "cuda" and config.num_host_blocks > 0)
        rows_per_block = num_kv_heads * config.block_size
        side_2 = torch.arange(2, device=device) * (config.num_blocks * rows_per_block)
        self._head_offsets_2J = side_2.unsqueeze(1) + torch.arange(num_kv_heads, device=device) * config.block_size

    def layer(self, index: int) -> Tensor:
        """The pool [2, N, J, P, d] of one layer."""
        layer: Tensor = self._layers[index]
        return layer

    def layers(self) -> Tensor:
        """The pools [L, 2, N, J, P, d] of all layers."""
        return self._kv_L2NJPd

    def write_rows(self, kv_rows_T: Tensor) -> Tensor:
        """Where ``write`` puts a step's tokens: rows [T * 2J] of a layer's pool seen as rows of one head; shared by all layers."""
        block_T = kv_rows_T.div(self.config.block_size, rounding_mode="floor")
        # block * J * P + offset, where kv_rows is block * P + offset
        base_T = kv_rows_T + block_T * ((self._num_kv_heads - 1) * self.config.block_size)
        return (base_T.view(-1, 1, 1) + self._head_offsets_2J).reshape(-1)

    def write(self, index: int, rows: Tensor, kv_THd: Tensor) -> None:
        """Store keys and values [T, 2J, d] of one layer."""
        self._rows[index].index_copy_(0, rows, kv_THd.reshape(-1, kv_THd.shape[-1]))

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        self._kv_L2NJPd[:, :, destinations] = self._kv_L2NJPd[:, :, sources]

    def clear_blocks(self, blocks: list[int]) -> None:
        self._kv_L2NJPd[:, :, blocks] = 0

    def reset_state(self, slots: list[int]) -> None:
        """Nothing: positions past a sequence's length are never attended."""

    def copy_state(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Nothing: a fork shares or copies blocks."""

    def load_tails(self, tails: list[int], slots: list[int], positions: list[int]) -> None:  # noqa: ARG002
        raise InvariantError("a dense model stores no window tails")

    def swap_out(self, slot: int, blocks: list[int], host_blocks: list[int], host_state: int) -> None:  # noqa: ARG002
        self._host_L2NJPd[:, :, host_blocks] = self._kv_L2NJPd[:, :, blocks].to("cpu")

    def swap_in(self, host_blocks: list[int], blocks: list[int]) -> None:
        self._kv_L2NJPd[:, :, blocks] = self._host_L2NJPd[:, :, host_blocks].to(self._kv_L2NJPd.device)

    def restore_state(self, host_state: int, slot: int) -> None:
        """Nothing: there is no state beside the blocks."""

    def num_bytes(self) -> int:
        return self._kv_L2NJPd.numel() * self._kv_L2NJPd.element_size()
