"""DenseModel against a naive float32 implementation: full attention, one sequence at a time, no cache."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, InvariantError
from engine.core.model_config import model_spec
from engine.core.specs import DenseSpec
from engine.core.tensors import expected_tensors
from engine.model.batch import ForwardBatch
from engine.model.dense import DenseModel
from engine.model.dense_cache import DenseCache

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 80, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-mha": {"num_key_value_heads": 6},
    "llama-wide-heads": {"head_dim": 16},
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-llama3": {"rope_scaling": LLAMA3},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen2-yarn": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": YARN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}
needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or os.environ.get("TWINFER_NATIVE") == "0", reason="the compiled kernels are optional and need gcc"
)


class Weights:
    """Random float32 tensors; gains and biases too, so that ignoring one shows."""

    def __init__(self, spec: DenseSpec, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in expected_tensors(spec).items():
            noise = torch.randn(tensor.shape, generator=generator)
            self.tensors[name] = (
                1.0 + 0.3 * noise if "norm" in name else noise * (0.3 if len(tensor.shape) == 1 else tensor.shape[-1] ** -0.5)
            )

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.get(name).narrow(dim, start, stop - start)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


def spec_of(name: str) -> DenseSpec:
    spec = model_spec(BASE | CONFIGS[name], name)
    assert isinstance(spec, DenseSpec)
    return spec


# -- the naive implementation -------------------------------------------------------------------------------------------------


def naive_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def naive_frequencies(spec: DenseSpec) -> tuple[list[float], float]:
    """Per-pair angular frequencies by the published formulas, in Python floats."""
    dim, scaling = spec.head_dim, spec.rope_scaling
    plain = [spec.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain], 1.0
    if scaling.kind == "llama3":
        result = []
        for f in plain:
            wavelength = 2 * math.pi / f
            low, high = scaling.original_max_positions / scaling.low_freq_factor, scaling.original_max_positions / scaling.high_freq_factor
            smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            blend = (1 - smooth) * f / scaling.factor + smooth * f
            result.append(f if wavelength < high else f / scaling.factor if wavelength > low else blend)
        return result, 1.0

    def pair_of(turns: float) -> float:
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low, high = max(math.floor(pair_of(scaling.beta_fast)), 0), min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    result = []
    for i, f in enumerate(plain):
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        result.append(f / scaling.factor * ramp + f * (1 - ramp))
    return result, 0.1 * math.log(scaling.factor) + 1.0


def naive_rope(x_THd: Tensor, spec: DenseSpec) -> Tensor:
    frequencies, factor = naive_frequencies(spec)
    angle = torch.arange(x_THd.shape[0], dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = (angle.cos() * factor).float()[:, None], (angle.sin() * factor).float()[:, None]
    first, second = x_THd.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def naive_logits(spec: DenseSpec, weights: Weights, tokens: list[int]) -> Tensor:
    w = weights.tensors

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    x = w["model.embed_tokens.weight"][tokens]
    n = len(tokens)
    for layer in range(spec.num_layers):
        p = f"model.layers.{layer}"
        h = naive_norm(x, w[f"{p}.input_layernorm.weight"], spec.rms_norm_eps)
        q = linear(h, f"{p}.self_attn.q_proj").view(n, spec.num_heads, spec.head_dim)
        k = linear(h, f"{p}.self_attn.k_proj").view(n, spec.num_kv_heads, spec.head_dim)
        v = linear(h, f"{p}.self_attn.v_proj").view(n, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q = naive_norm(q, w[f"{p}.self_attn.q_norm.weight"], spec.rms_norm_eps)
            k = naive_norm(k, w[f"{p}.self_attn.k_norm.weight"], spec.rms_norm_eps)
        q, k = naive_rope(q, spec), naive_rope(k, spec)
        heads = []
        for head in range(spec.num_heads):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(spec.head_dim)
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, shared])
        x = x + linear(torch.cat(heads, -1), f"{p}.self_attn.o_proj")
        h = naive_norm(x, w[f"{p}.post_attention_layernorm.weight"], spec.rms_norm_eps)
        gate, up = linear(h, f"{p}.mlp.gate_proj"), linear(h, f"{p}.mlp.up_proj")
        x = x + linear(gate / (1 + (-gate).exp()) * up, f"{p}.mlp.down_proj")
    x = naive_norm(x, w["model.norm.weight"], spec.rms_norm_eps)
    return x @ w["model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"].T


# -- driving the model --------------------------------------------------------------------------------------------------------


@dataclass
class Sequence:
    tokens: list[int]
    blocks: list[int]
    done: int = 0


class Driver:
    """Packs steps as the runner does, from explicit block tables."""

    def __init__(self, model: DenseModel, num_blocks: int = 64, block_size: int = 8, num_host_blocks: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        config = CacheConfig(num_blocks, block_size, 16, 4096, 256, num_host_blocks=num_host_blocks)
        self.cache: DenseCache = model.new_cache(config)

    def step(self, items: list[tuple[Sequence, int]], wanted: str = "all") -> Tensor:
        """Compute the next n tokens of each sequence; logits of all rows, of each last one, or of none."""
        ids, positions, seq, rows, starts = [], [], [], [], [0]
        for index, (sequence, count) in enumerate(items):
            for position in range(sequence.done, sequence.done + count):
                ids.append(sequence.tokens[position])
                positions.append(position)
                seq.append(index)
                rows.append(sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size)
            sequence.done += count
            starts.append(len(ids))
        lens = [sequence.done for sequence, _ in items]
        columns = -(-max(lens) // self.block_size)
        table = torch.tensor([(sequence.blocks + [0] * columns)[:columns] for sequence, _ in items])
        logit_rows = {"all": list(range(len(ids))), "last": [stop - 1 for stop in starts[1:]], "none": []}[wanted]
        for index, (sequence, _) in enumerate(items):  # beyond its length a row of the table is padding
            table[index, -(-sequence.done // self.block_size) :] = 0
        batch = ForwardBatch(
            token_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            seq_of_token_T=torch.tensor(seq),
            slots_B=torch.arange(len(items)),
            query_starts_B1=torch.tensor(starts),
            context_starts_B=torch.tensor([length - count for length, (_, count) in zip(lens, items, strict=True)]),
            context_lens_B=torch.tensor(lens),
            block_table_BM=table,
            kv_rows_T=torch.tensor(rows),
            logit_rows_R=torch.tensor(logit_rows, dtype=torch.int64),
            token_history_SL=torch.zeros((16, 1), dtype=torch.int64),
            tail_saves=(),
            num_sequences=len(items),
            max_query_len=max(count for _, count in items),
            max_context_len=max(lens),
        )
        with torch.inference_mode():
            return self.model.forward(batch, self.cache).logits_RV


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[DenseModel, Weights, DenseSpec]:
    spec = spec_of(name)
    weights = Weights(spec)
    return DenseModel(spec, weights, dtype=dtype, device="cpu"), weights, spec


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0.0)
    assert float(expected.std()) > 0.3  # logits that all look alike would agree with anything


@pytest.mark.parametrize("name", list(CONFIGS))
def test_whole_prompt_equals_the_naive_model(name: str) -> None:
    model, weights, spec = make(name)
    tokens = tokens_of(61, seed=1)
    close(Driver(model).step([(Sequence(tokens, list(range(8))), 61)]), naive_logits(spec, weights, tokens))


def test_the_rope_kinds_and_biases_matter() -> None:
    """The control of the test above: neighbouring configurations are far outside its tolerance."""
    tokens = tokens_of(61, seed=1)
    for name, change in (
        ("llama-linear", {"rope_scaling": None}), ("llama-llama3", {"rope_scaling": None}), ("qwen2-yarn", {"rope_scaling": None}),
        ("qwen3", {"qk_norm": False}), ("qwen2", {"rms_norm_eps": 1e-2}),
    ):  # fmt: skip
        _, weights, spec = make(name)
        other = naive_logits(msgspec.structs.replace(spec, **change), weights, tokens)
        assert float((other - naive_logits(spec, weights, tokens)).abs().max()) > 5e-3, name


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "qwen3"])
@pytest.mark.parametrize("blocks", [[3, 4, 5, 6, 7, 8, 9, 10], [40, 2, 17, 9, 33, 5, 60, 11]])
def test_chunks_and_single_tokens_equal_the_whole(name: str, blocks: list[int]) -> None:
    """Chunks that end inside and at the end of blocks, then decode across a block boundary; blocks in order and scattered."""
    model, weights, spec = make(name)
    tokens = tokens_of(60, seed=2)
    driver, sequence = Driver(model), Sequence(tokens, blocks)
    found = [driver.step([(sequence, count)]) for count in (7, 1, 8, 2, 21, *[1] * 21)]
    close(torch.cat(found), naive_logits(spec, weights, tokens))


def test_a_mixed_batch_equals_each_sequence_alone() -> None:
    """Decodes, a fresh prompt, a chunk and prompts of one token side by side; then decodes alone with ragged lengths."""
    model, weights, spec = make("qwen3")
    lengths = [5, 33, 1, 20, 41]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5)).tolist()
    sequences = [
        Sequence(tokens_of(length + 12, seed=10 + index), order[8 * index : 8 * index + 8]) for index, length in enumerate(lengths)
    ]
    expected = [naive_logits(spec, weights, sequence.tokens) for sequence in sequences]
    driver = Driver(model)
    a, b, c, d, e = sequences
    steps = [
        [(a, 5), (b, 10)],
        [(a, 1), (b, 23), (c, 1)],
        [(a, 1), (b, 1), (c, 1), (d, 20), (e, 17)],
        [(c, 1), (e, 24), (a, 1), (d, 1)],
        *[[(sequence, 1) for sequence in sequences]] * 5,
        [(e, 1), (b, 1)],
        [(d, 3), (b, 2)],
    ]
    for items in steps:
        starts = [sequence.done for sequence, _ in items]
        logits = driver.step(items)
        wanted = [expected[sequences.index(s)][start : start + count] for (s, count), start in zip(items, starts, strict=True)]
        close(logits, torch.cat(wanted))


@pytest.mark.parametrize("interleaved", [True, False])
def test_decode_of_many_sequences_in_a_compact_pool(interleaved: bool) -> None:
    """The path that multiplies the pool in place, with padding entries and, interleaved, units out of order."""
    model, weights, spec = make("llama")
    sequences = []
    for index in range(6):
        blocks = [index + 6 * entry for entry in range(4)] if interleaved else [4 * index + entry for entry in range(4)]
        sequences.append(Sequence(tokens_of(32, seed=index), blocks))
    driver = Driver(model, num_blocks=24)
    for index, sequence in enumerate(sequences):
        driver.step([(sequence, 3 + 4 * index)], "none")
    expected = [naive_logits(spec, weights, sequence.tokens) for sequence in sequences]
    for _ in range(6):
        logits = driver.step([(sequence, 1) for sequence in sequences])
        close(logits, torch.stack([expected[index][sequence.done - 1] for index, sequence in enumerate(sequences)]))


def test_sequences_that_share_prefix_blocks() -> None:
    model, weights, spec = make("llama")
    prefix = tokens_of(16, seed=1)
    driver = Driver(model)
    first = Sequence(prefix + tokens_of(10, seed=2), [1, 2, 3, 4])
    driver.step([(first, 18)], "none")
    second = Sequence(prefix + tokens_of(10, seed=3), [1, 2, 5, 6], done=16)
    driver.step([(second, 3)], "none")
    for _ in range(6):
        logits = driver.step([(first, 1), (second, 1)])
        close(logits, torch.stack([naive_logits(spec, weights, s.tokens[: s.done])[-1] for s in (first, second)]))


def test_logit_rows_select() -> None:
    model, weights, spec = make("llama")
    a, b = Sequence(tokens_of(20, seed=1), [0, 1, 2]), Sequence(tokens_of(9, seed=2), [3, 4, 5])
    driver = Driver(model)
    assert driver.step([(a, 4)], "none").shape == (0, spec.vocab_size)
    logits = driver.step([(a, 16), (b, 9)], "last")
    close(logits, torch.stack([naive_logits(spec, weights, s.tokens)[-1] for s in (a, b)]))


def test_forked_copied_and_swapped_blocks() -> None:
    model, weights, spec = make("llama")
    driver = Driver(model, num_host_blocks=6)
    source = Sequence(tokens_of(24, seed=4), [0, 1, 2])
    expected = naive_logits(spec, weights, source.tokens)
    driver.step([(source, 20)], "none")
    fork = Sequence(list(source.tokens), [0, 1, 9], done=20)  # shares two full blocks, copies the open one
    driver.cache.copy_blocks([2], [9])
    fork.tokens[20:] = [5, 6, 7, 8]
    close(driver.step([(fork, 2)]), naive_logits(spec, weights, fork.tokens)[20:22])
    close(driver.step([(source, 1)]), expected[20:21])
    driver.cache.swap_out(0, [0, 1, 2], [5, 0, 3], 0)
    driver.cache.copy_blocks([9, 9, 9], [0, 1, 2])  # somebody else overwrites the device blocks
    driver.cache.swap_in([5, 0, 3], [12, 30, 20])
    driver.cache.restore_state(0, 0)
    source.blocks = [12, 30, 20]
    close(driver.step([(source, 2)]), expected[21:23])


def test_bfloat16_stays_near_float32() -> None:
    """The packed kernels and the few-rows norm: prompt and decode both, within bfloat16's own error."""
    for name in ("llama-tied-biased", "qwen3"):
        model, weights, spec = make(name, torch.bfloat16)
        tokens = tokens_of(120, seed=6)
        expected = naive_logits(spec, weights, tokens)
        driver, sequence = Driver(model, block_size=16), Sequence(tokens, list(range(8)))
        found = torch.cat([driver.step([(sequence, count)]) for count in (100, *[1] * 20)])
        error = (found - expected).abs()
        assert 1e-4 < float(error.mean()) < 0.03 * float(expected.std())
        assert float((found.argmax(1) == expected.argmax(1)).float().mean()) > 0.9


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-wide-heads", "qwen2", "qwen3", "llama-tied-biased"])
def test_a_compiled_step_stays_near_float32(name: str, threads: int) -> None:
    """Whole decode steps of one to seven sequences in one call, with biases, norms of heads and a vocabulary of odd size."""
    spec = msgspec.structs.replace(spec_of(name), head_dim=16)
    weights = Weights(spec)
    model = DenseModel(spec, weights, dtype=torch.bfloat16, device="cpu")
    fused = model._fused
    assert fused is not None
    errors: list[Tensor] = []
    layered_errors: list[Tensor] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drivers = [Driver(model, block_size=16), Driver(model, block_size=16)]
        worlds = [[Sequence(tokens_of(40, seed=index), [3 * index + 1, 3 * index, 3 * index + 2]) for index in range(7)] for _ in drivers]
        for driver, world in zip(drivers, worlds, strict=True):
            driver.step([(sequence, 12 + index) for index, sequence in enumerate(world)], "none")
        expected = [naive_logits(spec, weights, sequence.tokens) for sequence in worlds[0]]
        for count in (1, 7, 4, 2, 7, 3, 1, 5):
            compiled, layered = (
                _step_with(driver, world[:count], choice) for driver, world, choice in zip(drivers, worlds, (fused, None), strict=True)
            )
            wanted = torch.stack([expected[index][sequence.done - 1] for index, sequence in enumerate(worlds[0][:count])])
            errors.append((compiled - wanted).abs().flatten())
            layered_errors.append((layered - wanted).abs().flatten())
            assert 1e-4 < float(errors[-1].mean()) < 0.03 * float(wanted.std())  # 3 layers of roundings to 8 bits
        # Torch's operations on the same weights are no nearer; over all rows, since a single one may be lucky.
        assert float(torch.cat(errors).mean()) < 1.25 * float(torch.cat(layered_errors).mean())
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_compiled_step_takes_prompts_and_chunks_among_decodes(name: str, threads: int) -> None:
    """Tokens of one step see each other through the pool: whole prompts, later chunks and single tokens, every row's logits."""
    spec = msgspec.structs.replace(spec_of(name), head_dim=16)
    weights = Weights(spec)
    model = DenseModel(spec, weights, dtype=torch.bfloat16, device="cpu")
    assert model._fused is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        driver = Driver(model, block_size=16)
        world = [Sequence(tokens_of(40, seed=index), [3 * index + 1, 3 * index, 3 * index + 2]) for index in range(3)]
        expected = [naive_logits(spec, weights, sequence.tokens) for sequence in world]
        for counts in ((17, 5, 1), (1, 20, 9), (22, 1, 30), (0, 14, 0)):
            items = [(sequence, count) for sequence, count in zip(world, counts, strict=True) if count]
            wanted = torch.cat([expected[i][world[i].done : world[i].done + count] for i, count in enumerate(counts)])
            error = (driver.step(items) - wanted).abs().mean()
            assert 1e-4 < float(error) < 0.03 * float(wanted.std())
    finally:
        torch.set_num_threads(before)


def _step_with(driver: Driver, sequences: list[Sequence], fused: Any) -> Tensor:
    driver.model._fused = fused
    return driver.step([(sequence, 1) for sequence in sequences])


@needs_compiler
def test_a_compiled_step_shows_nan_and_gives_the_wanted_rows() -> None:
    spec = msgspec.structs.replace(spec_of("llama"), head_dim=16)
    model = DenseModel(spec, Weights(spec), dtype=torch.bfloat16, device="cpu")
    driver = Driver(model, block_size=16)
    sequences = [Sequence(tokens_of(20, seed=index), [2 * index, 2 * index + 1]) for index in range(3)]
    driver.step([(sequence, 17) for sequence in sequences], "none")
    assert driver.step([(sequence, 1) for sequence in sequences], "none").shape == (0, 97)
    driver.cache.layer(1)[1, 2, 0, 4, 5] = torch.nan  # a value of the second sequence
    nan_RV = driver.step([(sequence, 1) for sequence in sequences]).isnan()
    assert nan_RV.all(1).tolist() == [False, True, False]
    assert not bool(nan_RV[[0, 2]].any())


def test_num_bytes_is_what_is_allocated() -> None:
    model, _, spec = make("llama")
    config = CacheConfig(num_blocks=10, block_size=8, max_running=2, max_batched_tokens=64, context_length=64)
    assert model.new_cache(config).num_bytes() == 10 * 8 * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4
    assert model.num_bytes() == 4 * sum(tensor.num_elements for tensor in expected_tensors(spec).values())


def test_refusals() -> None:
    model, _, spec = make("llama")
    with pytest.raises(ConfigError, match="head_dim 7 is odd"):
        DenseModel(msgspec.structs.replace(spec, head_dim=7), Weights(spec), dtype=torch.float32, device="cpu")
    with pytest.raises(InvariantError, match="tails"):
        model.new_cache(CacheConfig(1, 8, 1, 8, 8)).load_tails([0], [0], [8])
