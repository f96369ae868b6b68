"""What ranks send each other: the choices that decide it, and the bytes that follow. Bytes are those a rank sends to *other* ranks.

Experts under data-parallel attention. A token travels to an expert rank once, with its expert ids and weights beside it, however many of
its experts are there, and one row of partial sums travels back. Where nearly every token goes nearly everywhere (as many experts a token
as expert ranks, or more) every row is sent to every rank: then all sizes follow from the step's plan and the exchange of counts, a
message's latency in each layer, is saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.layout import Layout

ONE_SHOT_BYTES = 32768  # CPU: up to here a sum of three or more ranks is one exchange of whole tensors, above it two of pieces
ROUTE_BYTES = 8  # an int32 expert slot and a float32 weight


def sends_everything(layout: Layout, experts_per_token: int) -> bool:
    """Whether tokens are dispatched to all ranks instead of to those of their experts."""
    return layout.ep <= experts_per_token


def token_shares(layout: Layout, num_tokens: Sequence[int]) -> tuple[int, ...]:
    """Tokens each world rank dispatches, where data rank d has ``num_tokens[d]``: its tensor ranks split them."""
    tp = layout.tp
    return tuple((index + 1) * count // tp - index * count // tp for count in num_tokens for index in range(tp))


def share_start(layout: Layout, tensor_rank: int, num_tokens: int) -> int:
    """Where a tensor rank's share begins among the tokens of its data rank."""
    return tensor_rank * num_tokens // layout.tp


def dispatch_row_bytes(hidden_size: int, experts_per_token: int, element_bytes: int) -> int:
    return hidden_size * element_bytes + experts_per_token * ROUTE_BYTES


def all_gather_bytes(num_bytes: int, num_ranks: int) -> int:
    """Of one rank, for ``num_bytes`` of its own."""
    return num_bytes * (num_ranks - 1)


def all_reduce_bytes(num_bytes: int, element_bytes: int, num_ranks: int) -> int:
    """Of one rank on CPUs; a GPU's ring sends 2 (n - 1) / n of the tensor."""
    if num_ranks == 2 or num_bytes <= ONE_SHOT_BYTES:
        return num_bytes * (num_ranks - 1)
    elements = num_bytes // element_bytes
    return 2 * -(-elements // num_ranks) * element_bytes * (num_ranks - 1)
