"""Collectives of tensor parallelism: sums of partial products, and a vocabulary split over the tensor ranks.

Each does nothing for a step without tokens: the tensor ranks of a data rank have the same tokens, so all of them know.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.timing import component
from engine.parallel.groups import Group


@component("all_reduce")
def all_reduce(group: Group, partial_TD: Tensor) -> Tensor:
    """The sum over the group, bit-equal on every rank; may overwrite its input."""
    return group.all_reduce("all_reduce", partial_TD) if partial_TD.numel() else partial_TD


@component("all_gather")
def all_gather_vocabulary(group: Group, logits_RV: Tensor, vocab_size: int) -> Tensor:
    """Logits [R, vocab_size] from every rank's part of the vocabulary."""
    num_rows = logits_RV.shape[0]
    if num_rows == 0:
        return logits_RV.new_empty((0, vocab_size))
    widths = [stop - start for start, stop in (vocabulary_range(group, vocab_size, index) for index in range(group.size))]
    flat = group.all_gather_rows("all_gather", logits_RV.reshape(-1), [num_rows * width for width in widths])
    parts = flat.split_with_sizes([num_rows * width for width in widths])
    return torch.cat([part.view(num_rows, width) for part, width in zip(parts, widths, strict=True)], dim=1)


def embedding(group: Group, token_ids_T: Tensor, table_VD: Tensor, vocab_size: int) -> Tensor:
    """Rows [T, D] of a table whose rows are split over the group."""
    start, stop = vocabulary_range(group, vocab_size, group.index)
    outside_T = (token_ids_T < start) | (token_ids_T >= stop)
    rows_TD = functional.embedding((token_ids_T - start).masked_fill(outside_T, 0), table_VD)
    return all_reduce(group, rows_TD.masked_fill(outside_T.unsqueeze(-1), 0.0))


def vocabulary_range(group: Group, vocab_size: int, index: int) -> tuple[int, int]:
    """Rows of member ``index``, as ``core.sharding`` splits them."""
    return index * vocab_size // group.size, (index + 1) * vocab_size // group.size
