"""Scatter of new cache rows."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.timing import component


@component("kv_write")
def kv_write(cache_ND: Tensor, rows_T: Tensor, values_TD: Tensor) -> None:
    """``cache[rows[t]] = values[t]`` in place. Rows may repeat only where the row's content does not matter (a dump row)."""
    cache_ND.index_copy_(0, rows_T, values_TD)
