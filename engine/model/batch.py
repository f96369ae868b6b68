"""ForwardBatch: one step's work of one rank as packed tensors. Built by the runner, read by every model.

Shape legend (in all of engine/model and engine/kernels): T packed tokens of the step, B sequences of the step, R rows whose
logits are wanted, S sequence slots, M block-table entries, P tokens per block, N rows of a flat cache, D hidden, H heads,
K keys a query attends, V vocabulary, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.core.plan import StepPeers


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tensors are on the model's device, index tensors int64. Sequence b owns rows query_starts[b]:query_starts[b+1]."""

    token_ids_T: Tensor
    positions_T: Tensor  # absolute position of each token in its sequence
    seq_of_token_T: Tensor  # 0..B-1
    slots_B: Tensor  # per-sequence state slot
    query_starts_B1: Tensor  # [B+1]
    context_starts_B: Tensor  # tokens computed before this step
    context_lens_B: Tensor  # tokens present after this step (context_starts + new)
    block_table_BM: Tensor  # block ids, rows padded with 0
    kv_rows_T: Tensor  # flat row of each token in a P-rows-a-block cache: block * P + position % P
    logit_rows_R: Tensor  # indices into T
    token_history_SL: Tensor  # every known token of each slot; entries at and past context_lens are undefined
    tail_saves: tuple[tuple[int, int, int], ...]  # (index b, position, tail), see plan.TailSave
    num_sequences: int
    max_query_len: int  # Python ints, so that a model decides its path without reading the device
    max_context_len: int
    peers: StepPeers | None = None  # where the replica has several ranks

    @property
    def decode_only(self) -> bool:
        """Every sequence has exactly one new token."""
        return self.max_query_len == 1
