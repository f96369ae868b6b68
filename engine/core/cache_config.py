"""Sizes of everything a worker allocates once at start."""

from __future__ import annotations

import msgspec


class CacheConfig(msgspec.Struct, frozen=True):
    """The bounds of one rank's KV memory; core and worker are built from the same object.

    ``num_tails`` and ``num_host_states`` are 0 for models without per-sequence state (the dense family).
    """

    num_blocks: int
    block_size: int
    max_running: int
    max_batched_tokens: int
    context_length: int
    max_draft_tokens: int = 0
    num_tails: int = 0
    num_host_blocks: int = 0
    num_host_states: int = 0

    @property
    def max_blocks_per_sequence(self) -> int:
        return -(-self.context_length // self.block_size)
