"""The golden V4.1 cases through the paged serving path, blocks and slots scrambled."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.core.errors import ConfigError
from engine.core.specs import EngramSpec
from engine.model.v41 import V41Model
from engine.model.v41.hashing import hash_constants
from tests.model.v41_paged import ALL_CASES, FIXTURES, Case, DictWeights, Server, load_case


@pytest.fixture(scope="module", params=ALL_CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


def captures(case: Case) -> frozenset[str]:
    return frozenset({"streams.after_layer", "engram.row_ids"} | {f"topk.layer{i}" for i in case.spec.index_source_layer_ids})


def test_all_sequences_in_one_ragged_prefill(case: Case) -> None:
    server = Server(case.model)
    sequences = [server.start(prompt) for prompt in case.prompts]
    output = server.step([(sequence, len(sequence.tokens)) for sequence in sequences], capture=captures(case))
    expected, tolerance = case.expected, case.meta["tolerance"]
    difference = (output.logits_RV - expected["logits"]).abs()
    assert difference.mean() <= tolerance["logits_mean_abs"]
    same = output.logits_RV.argmax(-1) == expected["logits"].argmax(-1)
    assert same.float().mean() >= tolerance["argmax_agreement_min"]
    assert output.captures is not None
    if case.meta["cache_rounding"]:
        return  # one flipped FP4 step moves everything after it
    assert difference.max() <= tolerance["logits_max_abs"]
    for layer in case.spec.index_source_layer_ids:
        assert torch.equal(output.captures[f"topk.layer{layer}"], expected[f"topk.layer{layer}"])
    if case.spec.engram is not None:
        assert torch.equal(output.captures["engram.row_ids"], expected["engram.row_ids"])
    where = expected["cu_seqlens"][expected["streams.pos"][:, 0]] + expected["streams.pos"][:, 1]
    streams = output.captures["streams.after_layer"][where]
    assert (streams - expected["streams.after_layer"]).abs().max() <= tolerance["streams_max_abs"]


def test_decode_from_the_first_token(case: Case) -> None:
    """Token by token, every logit row against the full-sequence oracle."""
    server = Server(case.model)
    rows = []
    longest = max(range(len(case.prompts)), key=lambda index: len(case.prompts[index]))
    sequence = server.start(case.prompts[longest])
    for _ in case.prompts[longest]:
        rows.append(server.step([(sequence, 1)]).logits_RV)
    bounds = case.expected["cu_seqlens"]
    expected = case.expected["logits"][bounds[longest] : bounds[longest + 1]]
    difference = (torch.cat(rows) - expected).abs()
    assert difference.mean() <= case.meta["tolerance"]["logits_mean_abs"]
    if not case.meta["cache_rounding"]:
        assert difference.max() <= case.meta["tolerance"]["logits_max_abs"]


def test_ragged_greedy_decode() -> None:
    case = load_case("v41_ragged_greedy")
    server = Server(case.model)
    produced, logits = server.greedy([server.start(prompt) for prompt in case.prompts], 16)
    assert torch.equal(torch.tensor(produced), case.expected["greedy.ids"])
    assert (logits - case.expected["greedy.logits"]).abs().max() <= case.meta["tolerance"]["logits_max_abs"]


@pytest.mark.parametrize("name", ["v41_engram", "v41_ragged_greedy"])
def test_hash_constants(name: str) -> None:
    case = load_case(name)
    assert case.spec.engram is not None
    constants = hash_constants(case.spec.engram, torch.device("cpu"))
    assert torch.equal(constants.primes_EC, case.engram["primes"])
    assert torch.equal(constants.offsets_EC, case.engram["offsets"])
    assert torch.equal(constants.multipliers_EG, case.engram["multipliers"])
    assert case.model.pad_class == int(case.engram["pad_class"])


def test_bfloat16_stays_near_float32() -> None:
    """No fixture covers bfloat16; the run must be finite and agree with float32 on most tokens."""
    case = load_case("v41_engram", torch.bfloat16)
    server = Server(case.model)
    sequences = [server.start(prompt) for prompt in case.prompts]
    logits = server.step([(sequence, len(sequence.tokens)) for sequence in sequences]).logits_RV
    assert logits.dtype == torch.float32
    assert (logits - case.expected["logits"]).abs().mean() < 0.3
    assert (logits.argmax(-1) == case.expected["logits"].argmax(-1)).float().mean() > 0.75


def test_only_wanted_rows_have_logits() -> None:
    case = load_case("v41_csa2_plain")
    server = Server(case.model)
    sequence = server.start(case.prompts[0])
    assert server.step([(sequence, 30)], logit_rows=[]).logits_RV.shape == (0, case.spec.vocab_size)
    rows = server.step([(sequence, 30)], logit_rows=[29, 3]).logits_RV
    assert (rows - case.expected["logits"][[59, 33]]).abs().max() <= 1e-3


def test_a_missing_or_foreign_token_map_is_refused() -> None:
    case = load_case("v41_engram")
    from safetensors.torch import load_file

    weights = DictWeights(load_file(FIXTURES / "v41_engram" / "model.safetensors"))
    with pytest.raises(ConfigError, match="token map"):
        V41Model(case.spec, weights)
    with pytest.raises(ConfigError, match="classes"):
        V41Model(case.spec, weights, token_map=torch.arange(case.spec.vocab_size))


def test_primes_are_sought_from_engram_vocab_size_and_their_sum_is_the_table() -> None:
    """53 is prime: a search that begins one below 54 must not take it. The rows of a table are the sum of its primes."""
    spec = EngramSpec(
        layer_ids=(0,),
        num_rows=(59 + 61,),
        max_ngram=2,
        heads_per_order=2,
        head_dim=4,
        prime_search_start=54,
        pad_token_id=0,
        num_classes=9,
    )
    assert hash_constants(spec, torch.device("cpu")).primes_EC.tolist() == [[59, 61]]
    with pytest.raises(ConfigError, match="engram_num_embeddings is 121 for layer 0"):
        hash_constants(msgspec.structs.replace(spec, num_rows=(121,)), torch.device("cpu"))
