"""Engram's constants and hashes: which table rows belong to the n-grams that end at a position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.specs import EngramSpec
from engine.model.tiny_v41.maths import next_primes


@dataclass(frozen=True)
class EngramTables:
    """Derived from a config and the number of token classes. Columns are order-major (2, 3, ...), then head."""

    layer_ids: tuple[int, ...]
    primes: Tensor  # int64 [layers, columns]
    offsets: Tensor  # int64 [layers, columns]
    multipliers: Tensor  # int64 [layers, max_ngram]
    pad_class: int
    token_map: Tensor  # int32 [vocab]: token id -> class


def derive_tables(
    layer_ids: tuple[int, ...], max_ngram: int, heads: int, start: int, pad_token_id: int, num_classes: int, token_map: Tensor
) -> EngramTables:
    """Primes never repeat; every (layer, order) starts its search again just below ``start``."""
    taken: set[int] = set()
    primes = [[p for _ in range(2, max_ngram + 1) for p in next_primes(start - 1, heads, taken)] for _ in layer_ids]
    offsets = [[0, *np.cumsum(row)[:-1].tolist()] for row in primes]
    bound = ((2**63 - 1) // num_classes) // 2
    draws = [np.random.default_rng(10007 * layer).integers(0, bound, max_ngram, dtype=np.int64) * 2 + 1 for layer in layer_ids]
    return EngramTables(
        layer_ids=layer_ids,
        primes=torch.tensor(primes),
        offsets=torch.tensor(offsets),
        multipliers=torch.from_numpy(np.stack(draws)),
        pad_class=int(token_map[pad_token_id]),
        token_map=token_map,
    )


def tables_of(spec: EngramSpec, token_map: Tensor) -> EngramTables:
    tables = derive_tables(
        spec.layer_ids, spec.max_ngram, spec.heads_per_order, spec.prime_search_start, spec.pad_token_id, spec.num_classes, token_map
    )
    rows = tuple(int(row.sum()) for row in tables.primes)
    if rows != spec.num_rows:
        raise ValueError(f"engram_num_embeddings is {spec.num_rows}; the primes give {rows}")
    return tables


def row_ids(tables: EngramTables, ids: Tensor) -> Tensor:
    """Rows (offsets included) of the n-grams ending at each position: int64 [B, L, layers, columns] for ``ids`` [B, L]."""
    classes = tables.token_map.long()[ids]
    max_ngram = tables.multipliers.shape[1]
    heads = tables.primes.shape[1] // (max_ngram - 1)
    pad = torch.full((ids.shape[0], max_ngram - 1), tables.pad_class, dtype=torch.int64)
    padded = torch.cat((pad, classes), 1)
    layers = []
    for multiplier, primes, offsets in zip(tables.multipliers, tables.primes, tables.offsets, strict=True):
        hashed = classes * multiplier[0]
        columns = []
        for back in range(1, max_ngram):
            start = max_ngram - 1 - back
            hashed = hashed ^ (padded[:, start : start + ids.shape[1]] * multiplier[back])
            chosen = slice((back - 1) * heads, back * heads)
            columns.append(hashed[..., None] % primes[chosen] + offsets[chosen])
        layers.append(torch.cat(columns, -1))
    return torch.stack(layers, 2)
