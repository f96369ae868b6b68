"""Causal grouped-query attention over a paged KV cache, for packed batches of decodes, prompts and prompt chunks.

Legend: T packed tokens, B sequences, M block-table entries, P tokens per block, N blocks of the pool, H query heads, J key/value
heads, G = H / J query heads per key/value head, d head dimension. One layer's pool is ``kv_2NJPd`` (keys, then values): a block's
rows of one head are contiguous, so scores of whole blocks are batched products on the pool itself.

A step is planned once (``plan_attention``) and run per layer (``attend``). Sequences with one new token form the *decode* part;
they attend *units*, the pool's blocks: where the units in use lie close together the products run over that range of the pool
in place, because copying KV together costs as much memory traffic as attending it. The others, *chunks*, run one by one: the
new tokens among themselves from the packed keys, and all of the past without a mask, merged by their log-sum-exp.
On CPUs with a C compiler decode steps in bfloat16 take ``decode_cpu`` instead, to which this module is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Sequences with one new token, B of them. ``rows_B`` are their rows of T (None: all of T, in order).

    ``units`` is a range (first, count) of the pool, or the block ids to gather. Unit u belongs to sequence ``owner_U[u]`` as its
    ``entry_U[u]``-th block; ``unit_BM`` is the inverse, of no meaning where ``valid_BM1`` is 0, and None where unit b * M + m is
    entry m of sequence b. ``mask_B1MP`` float32 is 0 for visible
    positions, else -inf.
    """

    rows_B: Tensor | None
    units: tuple[int, int] | Tensor
    owner_U: Tensor
    entry_U: Tensor
    unit_BM: Tensor | None
    valid_BM1: Tensor | None
    mask_B1MP: Tensor
    scores_BHMP: Tensor  # scratch, shared by the layers


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) of T, whose first token is at position ``num_past``; ``past_blocks`` hold the tokens before it."""

    start: int
    stop: int
    num_past: int
    past_blocks: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decode: DecodePart | None
    chunks: tuple[Chunk, ...]


def plan_attention(
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
    block_table_BM: Tensor,
    *,
    block_size: int,
    num_heads: int,
    decode_only: bool,
    dtype: torch.dtype,
) -> AttentionPlan:
    """What all layers of a step share. Reads lengths on the host unless ``decode_only`` on an accelerator."""
    if decode_only:
        return AttentionPlan(_plan_decode(None, context_lens_B, block_table_BM, block_size, num_heads, dtype), ())
    starts, lens = query_starts_B1.tolist(), context_lens_B.tolist()
    chunks: list[Chunk] = []
    singles: list[int] = []
    for index, context_len in enumerate(lens):
        start, stop = starts[index], starts[index + 1]
        if stop - start == 1:
            singles.append(index)
        else:
            num_past = context_len - (stop - start)
            chunks.append(Chunk(start, stop, num_past, block_table_BM[index, : -(-num_past // block_size)]))
    decode = None
    if singles:
        index_b = torch.tensor(singles, device=block_table_BM.device)
        columns = -(-max(lens[index] for index in singles) // block_size)
        decode = _plan_decode(
            query_starts_B1[index_b], context_lens_B[index_b], block_table_BM[index_b, :columns], block_size, num_heads, dtype
        )
    return AttentionPlan(decode, tuple(chunks))


def _plan_decode(
    rows_B: Tensor | None, context_lens_B: Tensor, table_BM: Tensor, block_size: int, num_heads: int, dtype: torch.dtype
) -> DecodePart:
    device = table_BM.device
    num_sequences, columns = table_BM.shape
    entry_M = torch.arange(columns, device=device)
    positions_MP = (entry_M.unsqueeze(1) * block_size) + torch.arange(block_size, device=device)
    mask_B1MP = torch.zeros((num_sequences, 1, columns, block_size), device=device)
    mask_B1MP.masked_fill_(positions_MP >= context_lens_B.view(-1, 1, 1, 1), -torch.inf)
    valid_BM = entry_M * block_size < context_lens_B.unsqueeze(1)
    # Padding reads the sequence's own first block: what it reads is multiplied by 0, but another sequence's might be NaN.
    table_BM = torch.where(valid_BM, table_BM, table_BM[:, :1])
    on_cpu = device.type == "cpu"
    unit_range = _compact_range(table_BM, valid_BM) if on_cpu else None
    units: tuple[int, int] | Tensor
    if unit_range is None:
        units = table_BM.reshape(-1)
        unit_BM = torch.arange(num_sequences * columns, device=device).view(num_sequences, columns)
        owner_U = torch.arange(num_sequences, device=device).repeat_interleave(columns)
        entry_U = entry_M.repeat(num_sequences)
        valid_BM1 = None  # padding has a unit of its own here, with weights 0
        num_units = num_sequences * columns
    else:
        first, num_units = units = unit_range
        unit_BM = table_BM - first
        owner_U = torch.zeros(num_units, dtype=torch.int64, device=device)
        entry_U = torch.zeros(num_units, dtype=torch.int64, device=device)
        sequence_v, entry_v = valid_BM.nonzero(as_tuple=True)
        owner_U[unit_BM[sequence_v, entry_v]] = sequence_v
        entry_U[unit_BM[sequence_v, entry_v]] = entry_v
        valid_BM1 = None if bool(valid_BM.all()) else valid_BM.unsqueeze(2).to(dtype)
    unit_BM = unit_BM.reshape(-1)
    # A range may hold blocks of nobody here (a sequence that has ended), so its length need not be the table's.
    in_order = unit_range is None or (valid_BM1 is None and torch.equal(unit_BM, torch.arange(num_units, device=device)))
    return DecodePart(
        rows_B=rows_B,
        units=units,
        owner_U=owner_U,
        entry_U=entry_U,
        unit_BM=None if in_order else unit_BM,
        valid_BM1=valid_BM1,
        mask_B1MP=mask_B1MP,
        scores_BHMP=torch.empty((num_sequences, num_heads, columns, block_size), device=device),
    )


def _compact_range(table_BM: Tensor, valid_BM: Tensor) -> tuple[int, int] | None:
    """The range of pool blocks that covers the batch's own, where it is not much larger and no block is shared."""
    used = table_BM[valid_BM]
    first, last = (int(bound) for bound in used.aminmax())
    count = last - first + 1
    if count > used.numel() * 3 // 2 or torch.bincount(used - first).amax() > 1:
        return None
    return first, count


def attend(qkv_THd: Tensor, kv_2NJPd: Tensor, plan: AttentionPlan, num_heads: int) -> Tensor:
    """Attention outputs [T, H * d]. ``qkv_THd`` [T, H + 2J, d] holds rotated queries and keys, and values; the keys and values of
    the step are already in the pool too. Scores are scaled by d ** -0.5."""
    num_tokens, _, head_dim = qkv_THd.shape
    if plan.decode is not None and not plan.chunks and plan.decode.rows_B is None:
        return _decode(qkv_THd[:, :num_heads], kv_2NJPd, plan.decode).view(num_tokens, num_heads * head_dim)
    out_THd = qkv_THd.new_empty((num_tokens, num_heads, head_dim))
    if plan.decode is not None:
        rows = plan.decode.rows_B
        out_THd[rows] = _decode(qkv_THd[rows, :num_heads], kv_2NJPd, plan.decode).view(-1, num_heads, head_dim)
    num_kv_heads = kv_2NJPd.shape[2]
    for chunk in plan.chunks:
        q_THd, k_TJd, v_TJd = torch.split(qkv_THd[chunk.start : chunk.stop], [num_heads, num_kv_heads, num_kv_heads], dim=1)
        out_THd[chunk.start : chunk.stop] = _chunk(q_THd, k_TJd, v_TJd, kv_2NJPd, chunk)
    return out_THd.view(num_tokens, num_heads * head_dim)


def _decode(q_BHd: Tensor, kv_2NJPd: Tensor, part: DecodePart) -> Tensor:
    _, _, num_kv_heads, block_size, head_dim = kv_2NJPd.shape
    num_sequences, num_heads, _ = q_BHd.shape
    groups = num_heads // num_kv_heads
    if isinstance(part.units, tuple):
        kv_2UJPd = kv_2NJPd.narrow(1, part.units[0], part.units[1])
    else:
        kv_2UJPd = kv_2NJPd.index_select(1, part.units)
    num_units = kv_2UJPd.shape[1]
    keys, values = kv_2UJPd.view(2, num_units * num_kv_heads, block_size, head_dim)
    if num_sequences == 1:
        q_UHd = q_BHd.expand(num_units, num_heads, head_dim)
    else:
        q_UHd = q_BHd.index_select(0, part.owner_U)
    scores_UHP = torch.bmm(q_UHd.reshape(-1, groups, head_dim), keys.transpose(1, 2)).view(num_units, num_heads, block_size)
    if part.unit_BM is not None:
        scores_UHP = scores_UHP.index_select(0, part.unit_BM)
    scores_BHMP = scores_UHP.view(num_sequences, -1, num_heads, block_size).transpose(1, 2)
    # Into a buffer, which fixes the order of its dimensions: the softmax runs over entries and positions as one.
    torch.add(part.mask_B1MP, scores_BHMP, alpha=head_dim**-0.5, out=part.scores_BHMP)
    probs_BHMP = part.scores_BHMP.flatten(2).softmax(-1).view_as(part.scores_BHMP)
    if part.unit_BM is None:
        probs_UHP = probs_BHMP.transpose(1, 2).to(q_BHd.dtype, memory_format=torch.contiguous_format)
    else:
        probs_UHP = probs_BHMP.to(q_BHd.dtype)[part.owner_U, :, part.entry_U]
    out_UD = torch.bmm(probs_UHP.reshape(-1, groups, block_size), values).view(num_units, num_heads * head_dim)
    if part.unit_BM is not None:
        out_UD = out_UD.index_select(0, part.unit_BM)
    out_BMD = out_UD.view(num_sequences, -1, num_heads * head_dim)
    if part.valid_BM1 is not None:
        out_BMD = out_BMD.mul_(part.valid_BM1)
    if out_BMD.shape[1] == 2:
        return out_BMD[:, 0] + out_BMD[:, 1]  # a reduction over two has a higher price
    return out_BMD.sum(1)


def _chunk(q_THd: Tensor, k_TJd: Tensor, v_TJd: Tensor, kv_2NJPd: Tensor, chunk: Chunk) -> Tensor:
    """One sequence's new tokens [t, H, d] over its past and themselves."""
    past_2KJd = _past(kv_2NJPd, chunk) if chunk.num_past else None
    if q_THd.device.type != "cpu":
        return _chunk_generic(q_THd, k_TJd, v_TJd, past_2KJd)
    num_tokens, num_heads, head_dim = q_THd.shape
    num_kv_heads = k_TJd.shape[1]
    groups = num_heads // num_kv_heads
    q_JGTd = q_THd.reshape(num_tokens, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)

    def shared(x_KJd: Tensor) -> Tensor:
        return x_KJd.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)

    out_JGTd, lse_JGT = _flash(q_JGTd, shared(k_TJd), shared(v_TJd), causal=True)
    if past_2KJd is not None:
        past_JGTd, past_lse_JGT = _flash(q_JGTd, shared(past_2KJd[0]), shared(past_2KJd[1]))
        share_JGT1 = torch.sigmoid(past_lse_JGT - lse_JGT).unsqueeze(-1)  # of the past in the total exp-sum
        out_JGTd = torch.lerp(out_JGTd.float(), past_JGTd.float(), share_JGT1).to(q_THd.dtype)
    return out_JGTd.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _past(kv_2NJPd: Tensor, chunk: Chunk) -> Tensor:
    """Keys and values [2, num_past, J, d] of the tokens before the chunk."""
    blocks_2MJPd = kv_2NJPd.index_select(1, chunk.past_blocks)
    return blocks_2MJPd.transpose(2, 3).flatten(1, 2)[:, : chunk.num_past]


def _chunk_generic(q_THd: Tensor, k_TJd: Tensor, v_TJd: Tensor, past_2KJd: Tensor | None) -> Tensor:
    """The public operator, for devices without the fused CPU kernel; with a past it takes a boolean mask [t, past + t]."""
    mask = None
    if past_2KJd is not None:
        k_TJd, v_TJd = torch.cat((past_2KJd[0], k_TJd)), torch.cat((past_2KJd[1], v_TJd))
        mask = torch.ones((q_THd.shape[0], k_TJd.shape[0]), dtype=torch.bool, device=q_THd.device).tril_(past_2KJd.shape[1])
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THd, k_TJd, v_TJd))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """torch's fused CPU attention on [batch, heads, tokens, d], with the log-sum-exp of the scaled scores [batch, heads, tokens]."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return result
