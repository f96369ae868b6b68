"""Paged attention, torch and compiled, against a definition in float32: one query at a time, no blocks."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from engine.kernels import decode_cpu
from engine.kernels.attention_full import AttentionPlan, _chunk_generic, attend, plan_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 8


def definition(q_Hd: Tensor, k_KJd: Tensor, v_KJd: Tensor) -> Tensor:
    """Attention of one query over all of K keys: [H, d]."""
    rows = []
    for head in range(q_Hd.shape[0]):
        shared = head * k_KJd.shape[1] // q_Hd.shape[0]
        weights = (k_KJd[:, shared].float() @ q_Hd[head].float() / math.sqrt(q_Hd.shape[1])).softmax(0)
        rows.append(weights @ v_KJd[:, shared].float())
    return torch.stack(rows)


class World:
    """Sequences of known keys and values, laid out in a pool whose other rows hold large numbers nobody may read."""

    def __init__(self, contexts: list[int], new: list[int], tables: list[list[int]], num_blocks: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(sum(contexts))
        self.contexts, self.new = contexts, new
        self.pool_2NJPd = torch.full((2, num_blocks, KV_HEADS, BLOCK, HEAD_DIM), 1000.0).to(dtype)
        self.keys, self.values, packed = [], [], []
        self.queries = []
        for context, count, table in zip(contexts, new, tables, strict=True):
            kv = torch.randn(2, context, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
            q = torch.randn(count, HEADS, HEAD_DIM, generator=generator).to(dtype) * 2
            for position in range(context):
                held = self.pool_2NJPd[:, table[position // BLOCK], :, position % BLOCK]
                if bool((held != 1000.0).any()):  # a block shared with an earlier sequence
                    kv[:, position] = held
                self.pool_2NJPd[:, table[position // BLOCK], :, position % BLOCK] = kv[:, position]
            self.keys.append(kv[0])
            self.values.append(kv[1])
            self.queries.append(q)
            packed.append(torch.cat((q, kv[0, context - count :], kv[1, context - count :]), 1))
        self.qkv_THd = torch.cat(packed)
        columns = -(-max(contexts) // BLOCK)
        self.table_BM = torch.tensor(
            [(table[: -(-c // BLOCK)] + [0] * columns)[:columns] for table, c in zip(tables, contexts, strict=True)]
        )
        self.context_B = torch.tensor(contexts)

    def plan(self) -> AttentionPlan:
        starts = torch.tensor([0, *self.new]).cumsum(0)
        return plan_attention(
            starts,
            self.context_B,
            self.table_BM,
            block_size=BLOCK,
            num_heads=HEADS,
            decode_only=max(self.new) == 1,
            dtype=self.qkv_THd.dtype,
        )

    def expected(self) -> Tensor:
        rows = []
        for q, k, v, context, count in zip(self.queries, self.keys, self.values, self.contexts, self.new, strict=True):
            for index in range(count):
                seen = context - count + index + 1
                rows.append(definition(q[index], k[:seen], v[:seen]).flatten())
        return torch.stack(rows)


LAYOUTS = {
    "one": ([13], [1], [[4, 7]], 12),
    "one-full-block": ([16], [1], [[2, 3]], 12),
    "first-token": ([1, 9], [1, 1], [[0], [1, 2]], 3),
    "in-order": ([13, 16, 10], [1, 1, 1], [[0, 1], [2, 3], [4, 5]], 6),
    "interleaved-ragged": ([5, 30, 17], [1, 1, 1], [[3], [0, 2, 4, 6], [1, 5, 7]], 8),
    "gap": ([7, 6, 8], [1, 1, 1], [[2], [3], [5]], 8),  # block 4 belonged to a sequence that has ended
    "gap-beside-a-prompt": ([7, 6, 8, 12], [1, 1, 1, 12], [[2], [3], [5], [0, 7]], 8),
    "scattered": ([20, 9], [1, 1], [[40, 3, 17], [60, 25]], 64),
    "shared-prefix": ([20, 18], [1, 1], [[1, 2, 3], [1, 2, 4]], 6),
    "prompts": ([9, 24], [9, 24], [[5, 1], [2, 0, 3]], 6),
    "chunks": ([30, 17], [7, 9], [[9, 2, 4, 1], [0, 3, 5]], 10),
    "mixed": ([11, 30, 8, 1], [1, 6, 8, 1], [[6, 1], [0, 2, 9, 7], [4], [5]], 10),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_float32_equals_the_definition(name: str) -> None:
    world = World(*LAYOUTS[name], torch.float32)
    torch.testing.assert_close(attend(world.qkv_THd, world.pool_2NJPd, world.plan(), HEADS), world.expected(), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_bfloat16_is_near_the_definition(name: str) -> None:
    world = World(*LAYOUTS[name], torch.bfloat16)
    error = (attend(world.qkv_THd, world.pool_2NJPd, world.plan(), HEADS).float() - world.expected()).abs()
    assert float(error.max()) < 0.06  # values of order one, scores rounded to 8 bits
    assert float(error.mean()) < 0.01


def test_the_pool_is_used_in_place_only_where_it_is_compact() -> None:
    kinds = {}
    for name in ("in-order", "interleaved-ragged", "scattered", "shared-prefix"):
        decode = World(*LAYOUTS[name], torch.float32).plan().decode
        assert decode is not None
        kinds[name] = (isinstance(decode.units, tuple), decode.unit_BM is None)
    assert kinds == {
        "in-order": (True, True),
        "interleaved-ragged": (True, False),
        "scattered": (False, True),
        "shared-prefix": (False, True),
    }


def test_the_path_of_other_devices_equals_the_definition() -> None:
    world = World([30], [7], [[9, 2, 4, 1]], 10, torch.float32)
    keys, values = world.keys[0], world.values[0]
    q = world.queries[0]
    with_past = _chunk_generic(q, keys[23:], values[23:], torch.stack((keys[:23], values[:23])))
    torch.testing.assert_close(with_past.flatten(1), world.expected(), atol=2e-5, rtol=0.0)
    fresh = World([9], [9], [[0, 1]], 2, torch.float32)
    alone = _chunk_generic(fresh.queries[0], fresh.keys[0], fresh.values[0], None)
    torch.testing.assert_close(alone.flatten(1), fresh.expected(), atol=2e-5, rtol=0.0)


# -- the compiled kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native() -> decode_cpu.DecodeKernels:
    kernels = decode_cpu.load(HEAD_DIM, HEADS // KV_HEADS)
    assert kernels is not None, "there is a C compiler, but decode_cpu.c did not compile or load"
    return kernels


needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="the compiled kernels are optional and need gcc")


def decode_native(native: decode_cpu.DecodeKernels, world: World, gain_Hd: Tensor | None = None, turn_BQ2: Tensor | None = None) -> Tensor:
    sequences = len(world.contexts)
    if turn_BQ2 is None:
        turn_BQ2 = torch.tensor([1.0, 0.0]).expand(sequences, HEAD_DIM // 2, 2).contiguous()
    qkv_BC = world.qkv_THd.reshape(sequences, -1)
    return native.decode(qkv_BC, world.pool_2NJPd, world.table_BM, world.context_B, turn_BQ2, gain_Hd, 1e-5)


@needs_compiler
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if max(layout[1]) == 1])
def test_compiled_decode_equals_the_definition(native: decode_cpu.DecodeKernels, name: str) -> None:
    world = World(*LAYOUTS[name], torch.bfloat16)
    expected, pool = world.expected(), world.pool_2NJPd.clone()
    for index, table in enumerate(LAYOUTS[name][2]):  # the kernel itself writes the newest token
        position = world.contexts[index] - 1
        world.pool_2NJPd[:, table[position // BLOCK], :, position % BLOCK] = 1000.0
    found = decode_native(native, world)
    assert torch.equal(world.pool_2NJPd, pool)
    torch.testing.assert_close(found.float(), expected, atol=0.0, rtol=2**-8)  # one rounding, that of the output


@needs_compiler
def test_compiled_norm_and_rotation(native: decode_cpu.DecodeKernels) -> None:
    world = World([13, 5], [1, 1], [[0, 2], [1]], 4, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    gain_Hd = (1 + torch.randn(HEADS + KV_HEADS, HEAD_DIM, generator=generator)).to(torch.bfloat16)
    angle_BQ = torch.rand(2, HEAD_DIM // 2, generator=generator) * 6
    turn_BQ2 = torch.stack((angle_BQ.cos(), angle_BQ.sin()), -1)
    heads_BHd = world.qkv_THd[:, : HEADS + KV_HEADS].float()
    normed = (heads_BHd / (heads_BHd.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain_Hd.float()).to(torch.bfloat16).float()
    even, odd = normed[..., ::2], normed[..., 1::2]
    cos, sin = turn_BQ2[:, None, :, 0], turn_BQ2[:, None, :, 1]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(2)
    for index in range(2):
        world.queries[index] = turned[index : index + 1, :HEADS]
        world.keys[index][-1] = turned[index, HEADS:].to(torch.bfloat16)
    found = decode_native(native, world, gain_Hd, turn_BQ2)
    torch.testing.assert_close(found.float(), world.expected(), atol=4e-3, rtol=2**-7)


@needs_compiler
def test_compiled_rows(native: decode_cpu.DecodeKernels) -> None:
    x = (torch.randn(5, 48, generator=torch.Generator().manual_seed(1)) * 9).to(torch.bfloat16)
    gain = torch.linspace(-2, 3, 48).to(torch.bfloat16)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    torch.testing.assert_close(native.rms_norm(x, gain, 1e-5).double(), expected, atol=1e-6, rtol=2**-8)
    wide = torch.cat((x, x.flip(0)), 1).double()
    wide[0, :3] = torch.tensor([-200.0, 200.0, -88.0])
    gate, up = wide.to(torch.bfloat16).double().chunk(2, 1)
    found = native.silu_mul(wide.to(torch.bfloat16)).double()
    torch.testing.assert_close(found, gate * torch.sigmoid(gate) * up, atol=1e-6, rtol=2**-8)


@needs_compiler
def test_compiled_kernels_show_nan_and_survive_large_scores(native: decode_cpu.DecodeKernels) -> None:
    world = World([13, 9], [1, 1], [[0, 1], [2, 3]], 4, torch.bfloat16)
    world.pool_2NJPd[0, 0, 0, 3, 5] = torch.nan
    found = decode_native(native, world)
    assert bool(found[0, : HEADS // KV_HEADS * HEAD_DIM].isnan().all())
    assert bool(found[1].isfinite().all())
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    x[0, 7] = torch.nan
    assert bool(native.rms_norm(x, torch.ones(32, dtype=torch.bfloat16), 1e-5).isnan().all())
    assert bool(native.silu_mul(x)[0, 7].isnan())
    large = World([30], [1], [[0, 1, 2, 3]], 4, torch.bfloat16)
    large.qkv_THd[:, :HEADS] *= 100
    large.queries[0] = large.queries[0] * 100
    torch.testing.assert_close(decode_native(native, large).float(), large.expected(), atol=1e-3, rtol=2**-7)
