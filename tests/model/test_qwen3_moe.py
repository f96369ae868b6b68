"""Qwen3-MoE against transformers' logits (tests/fixtures/qwen3_moe*), by every way of cutting the work and of multiplying the experts."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError
from engine.core.model_config import model_spec
from engine.core.specs import DenseSpec
from engine.kernels.experts import expert_form, expert_gemm, expert_gemm_dense, expert_gemm_single, swiglu
from engine.kernels.router_softmax import router_softmax
from engine.model import dense_moe
from engine.model.dense import DenseModel
from engine.model.load import load_model
from tests.model.engine_harness import FIXTURES, Engine, Preempted
from tests.model.test_dense import Driver, Sequence
from tests.model.test_memory import assert_predicted

CASES = ("qwen3_moe", "qwen3_moe_mixed")
Form = Literal["auto", "dense", "grouped"]
P = 16
NEW = 12


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        folder = FIXTURES / name
        model = load_model(folder, dtype=dtype).model
        assert isinstance(model, DenseModel)
        self.model = model
        self.tolerance: float = json.loads((folder / "meta.json").read_text())["tolerance"]["logits_max_abs"]
        expected, inputs = load_file(folder / "expected.safetensors"), load_file(folder / "inputs.safetensors")
        bounds = expected["cu_seqlens"].tolist()
        self.logits = [expected["logits"][start:stop] for start, stop in itertools.pairwise(bounds)]
        self.greedy: list[list[int]] = expected["greedy.ids"].tolist()
        self.prompts = [row[:length] for row, length in zip(inputs["input_ids"].tolist(), inputs["lengths"].tolist(), strict=True)]

    def sequences(self) -> list[Sequence]:
        """The prompts on scrambled blocks of 8 tokens."""
        order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
        return [Sequence(list(prompt), order[16 * index : 16 * index + 16]) for index, prompt in enumerate(self.prompts)]

    def check(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == torch.float32
        assert float((found - expected).abs().max()) <= self.tolerance
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def force(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    if form != "auto":
        monkeypatch.setattr(dense_moe, "expert_form", lambda *_: form)


@pytest.mark.parametrize("form", ["auto", "dense", "grouped"])
@pytest.mark.parametrize("name", CASES)
def test_all_sequences_in_one_ragged_prefill(name: str, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, form)
    case = Case(name)
    found = Driver(case.model).step([(sequence, len(sequence.tokens)) for sequence in case.sequences()])
    case.check(found, torch.cat(case.logits))


@pytest.mark.parametrize("form", ["auto", "grouped"])
@pytest.mark.parametrize("name", CASES)
def test_chunks_and_single_tokens_equal_the_whole(name: str, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, form)
    case = Case(name)
    for sequence, expected in zip(case.sequences(), case.logits, strict=True):
        driver, rows, sizes = Driver(case.model), [], [7, 1, 8, 2, 9]
        while sequence.done < len(sequence.tokens):
            rows.append(driver.step([(sequence, min(sizes.pop(0) if sizes else 1, len(sequence.tokens) - sequence.done))]))
        case.check(torch.cat(rows), expected)


def test_a_mixed_batch_equals_each_sequence_alone() -> None:
    """Chunks, decodes and a prompt of one token side by side, until every sequence is at its end."""
    case = Case("qwen3_moe_mixed")
    driver, sequences = Driver(case.model), case.sequences()
    counts = [[5, 1, 20], [1, 0, 1], [17, 0, 1], [1, 0, 30], *[[1, 0, 1]] * 14]
    for step in counts:
        work = [(index, min(count, len(sequences[index].tokens) - sequences[index].done)) for index, count in enumerate(step)]
        work = [(index, count) for index, count in work if count]
        wanted = torch.cat([case.logits[index][sequences[index].done : sequences[index].done + count] for index, count in work])
        case.check(driver.step([(sequences[index], count) for index, count in work]), wanted)


@pytest.mark.parametrize("name", CASES)
def test_greedy_decode_of_a_ragged_batch(name: str) -> None:
    case = Case(name)
    driver, sequences = Driver(case.model), case.sequences()
    for _ in range(16):
        rows = driver.step([(sequence, len(sequence.tokens) - sequence.done) for sequence in sequences], "last")
        for sequence, token in zip(sequences, rows.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
    assert [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, case.prompts, strict=True)] == case.greedy


def test_a_chunk_without_wanted_rows() -> None:
    """The last layer, which has experts, then sees no token at all."""
    case = Case("qwen3_moe")
    driver, sequence = Driver(case.model), case.sequences()[1]
    assert driver.step([(sequence, 40)], "none").shape == (0, 97)
    case.check(driver.step([(sequence, 50)], "last"), case.logits[1][-1:])


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_stays_near_float32(name: str) -> None:
    """Prompt and decode, the latter with the compiled attention where there is a compiler. A near tie at the experts' cut may fall
    otherwise in bfloat16, hence the wide mean."""
    case = Case(name, torch.bfloat16)
    driver, sequence = Driver(case.model, block_size=16), case.sequences()[-1]
    found = torch.cat([driver.step([(sequence, count)]) for count in (25, *[1] * (len(sequence.tokens) - 25))])
    error = (found - case.logits[-1]).abs()
    assert 1e-4 < float(error.mean()) < 0.06 * float(case.logits[-1].std())
    assert float((found.argmax(1) == case.logits[-1].argmax(1)).float().mean()) > 0.85


# -- kernels ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
def test_router(normalise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD, gate_ED = torch.randn((9, 16), generator=generator), torch.randn((6, 16), generator=generator)
    weights_TK, ids_TK = router_softmax(x_TD, gate_ED, 2, normalise)
    for token in range(9):
        scores = [float(value) for value in (gate_ED.double() @ x_TD[token].double()).exp()]
        best = sorted(range(6), key=lambda expert: -scores[expert])[:2]
        total = sum(scores[expert] for expert in best) if normalise else sum(scores)
        found = dict(zip(ids_TK[token].tolist(), weights_TK[token].tolist(), strict=True))
        assert found == pytest.approx({expert: scores[expert] / total for expert in best}, rel=1e-5)
    wide = router_softmax(x_TD.bfloat16(), gate_ED, 2, normalise)[0]
    assert wide.dtype == torch.float32


def test_the_forms_agree_with_a_loop_over_experts_and_without_a_limit() -> None:
    generator = torch.Generator().manual_seed(1)
    w13_EJD, w2_EID = torch.randn((5, 16, 12), generator=generator), torch.randn((5, 8, 12), generator=generator)
    x_TD = torch.randn((7, 12), generator=generator) * 3  # large: a limit would show
    weights_TK, ids_TK = (
        torch.rand((7, 2), generator=generator),
        torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)]),
    )
    expected = torch.zeros_like(x_TD)
    for token in range(7):
        for weight, expert in zip(weights_TK[token], ids_TK[token].tolist(), strict=True):
            gate, up = (w13_EJD[expert] @ x_TD[token]).chunk(2)
            expected[token] += weight * (functional.silu(gate) * up) @ w2_EID[expert]
    close: dict[str, Any] = {"atol": 2e-3, "rtol": 1e-5}
    torch.testing.assert_close(expert_gemm(x_TD, weights_TK, ids_TK, w13_EJD, w2_EID, None), expected, **close)
    torch.testing.assert_close(expert_gemm_dense(x_TD, weights_TK, ids_TK, w13_EJD, w2_EID, torch.zeros(1, 5), None), expected, **close)
    single = torch.cat([expert_gemm_single(x_TD[t : t + 1], weights_TK[t], ids_TK[t], w13_EJD, w2_EID, None) for t in range(7)])
    torch.testing.assert_close(single, expected, **close)
    limited = expert_gemm(x_TD, weights_TK, ids_TK, w13_EJD, w2_EID, 10.0)
    assert float((limited - expected).abs().max()) > 1.0
    assert float(swiglu(torch.tensor(50.0), torch.tensor(50.0), None)) == 2500.0


def test_the_fixtures_exercise_every_form() -> None:
    w2 = Case("qwen3_moe").model._layers[0].feed_forward
    assert isinstance(w2, dense_moe.MoeFeedForward)
    assert [expert_form(tokens, 2, w2.w2_EID) for tokens in (1, 8, 100_000)] == ["single", "dense", "grouped"]


# -- the whole engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> DenseModel:
    return Case(request.param).model


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 97) for _ in range(length)]


@pytest.fixture(scope="module")
def alone(model: DenseModel) -> dict[tuple[int, int], list[int]]:
    """Greedy continuations of some prompts, each by itself on a cold engine without overlap."""
    lengths = enumerate((1, P - 1, P, P + 1, 3 * P + 5, 70))
    return {
        (seed, length): Engine(model, overlap=False, prefix_caching=False).generate(prompt(length, seed), max_tokens=NEW)
        for seed, length in lengths
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"num_blocks": 9, "watermark_blocks": 0},
        {"num_blocks": 9, "watermark_blocks": 0, "num_host_blocks": 32, "num_host_states": 8, "swap_threshold_tokens": 1},
    ],
    ids=["batched", "chunked", "recomputed", "swapped"],
)
def test_the_same_tokens_however_the_work_is_cut(
    model: DenseModel, alone: dict[tuple[int, int], list[int]], options: dict[str, Any]
) -> None:
    engine = Engine(model, **options)
    ids = {key: engine.submit(prompt(key[1], key[0]), max_tokens=NEW)[0] for key in alone}
    tokens = engine.run()
    for key, expected in alone.items():
        assert tokens[ids[key]] == expected, key
    assert bool(engine.of_kind(Preempted)) == ("num_blocks" in options)


def test_a_prefix_hit_equals_cold(model: DenseModel, alone: dict[tuple[int, int], list[int]]) -> None:
    engine = Engine(model)
    for (seed, length), expected in alone.items():
        for repeat in range(2):
            request = engine.submit(prompt(length, seed), max_tokens=NEW)[0]
            assert engine.run()[request] == expected
            assert engine.cached_tokens(request) == (0 if repeat == 0 else (length - 1) // P * P)


def test_samples_of_one_prompt_equal_samples_alone(model: DenseModel) -> None:
    engine = Engine(model)
    ids = engine.submit(prompt(40, 7), n=3, max_tokens=NEW, temperature=1.0, seed=3)
    tokens = engine.run()
    for offset, sample in enumerate(ids):
        single = Engine(model, prefix_caching=False).generate(prompt(40, 7), max_tokens=NEW, temperature=1.0, seed=3 + offset)
        assert tokens[sample] == single


# -- sizes and refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_memory_is_predicted(name: str, dtype: str) -> None:
    model = Case(name, getattr(torch, dtype)).model
    assert_predicted(model, CacheConfig(num_blocks=40, block_size=32, max_running=8, max_batched_tokens=100, context_length=512), dtype)


def config_of(name: str = "qwen3_moe_mixed") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return config


def test_which_layers_have_experts() -> None:
    def layers(**changes: Any) -> tuple[int, ...] | None:
        spec = model_spec(config_of() | changes, "q")
        assert isinstance(spec, DenseSpec)
        return None if spec.moe is None else spec.moe.layer_ids

    assert layers() == (1, 5)
    assert layers(mlp_only_layers=None) == (1, 3, 5)
    assert layers(mlp_only_layers=[], decoder_sparse_step=1) == (0, 1, 2, 3, 4, 5)
    assert layers(decoder_sparse_step=4) is None  # layer 3 alone, and it is excepted


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 0}, "num_experts is 0; allowed: an integer from 1"),
        ({"num_experts": None}, "num_experts is None"),
        ({"num_experts": 1 << 20}, "num_experts is 1048576; allowed: an integer from 1 to 43690"),  # of 6 layers, each with so many tensors
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds num_experts 6"),
        ({"moe_intermediate_size": True}, "moe_intermediate_size is True"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; allowed: true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers is [6]; allowed: integers from 0 to 5"),
        ({"mlp_only_layers": "3"}, "mlp_only_layers is '3'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ],
)
def test_config_refusals(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_spec(config_of() | changes, "q")
    assert text in str(caught.value)


def test_absent_switches_mean_the_published_defaults() -> None:
    config = config_of("qwen3_moe")
    for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
        del config[key]
    spec = model_spec(config, "q")
    assert isinstance(spec, DenseSpec)
    assert spec.moe is not None
    assert not spec.moe.normalise_weights
    assert spec.moe.layer_ids == (0, 1, 2, 3)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=DenseSpec) == spec
