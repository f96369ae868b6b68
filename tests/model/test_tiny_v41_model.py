"""The embedded checkpoint: complete, trained (better than a trigram on held-out text), its tokenizer and Engram tables its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.core.tensors import expected_tensors
from engine.model.tiny_v41 import checkpoint, evaluate, tokenizer
from engine.model.tiny_v41.forward import Forward, Options

MODEL = Path(checkpoint.__file__).parents[1] / "assets" / "tiny-v41"
SAMPLE = Path(__file__).parent / "data" / "kjv_held_out.txt"  # held-out chapters, a blank line between them


@pytest.fixture(scope="module")
def model() -> Forward:
    return Forward(*checkpoint.load(MODEL))


def chapters() -> list[str]:
    return SAMPLE.read_text(encoding="ascii").strip().split("\n\n")


def test_checkpoint_holds_exactly_the_expected_tensors() -> None:
    tensors = load_file(MODEL / "model.safetensors")
    expected = expected_tensors(checkpoint.read_spec(MODEL))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {name: t.shape for name, t in expected.items()}
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name
        assert tensor.dtype == (torch.float32 if checkpoint.FLOAT32.search(name) else torch.bfloat16), name


def test_held_out_text_is_predicted_better_than_by_a_trigram(model: Forward) -> None:
    measures = json.loads((MODEL / "measures.json").read_text())
    made = tokenizer.load(MODEL)
    texts = chapters()[:2]
    sequences = [list(made.encode(f"{tokenizer.BOS}{text}").ids) for text in texts]
    nats = evaluate.model_loss(model, sequences, 512, Options(rounding=True))
    bits_per_byte = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert bits_per_byte < measures["trigram_bits_per_byte"]


def test_drafts_are_accepted(model: Forward) -> None:
    made = tokenizer.load(MODEL)
    prompts = [list(made.encode(f"{tokenizer.BOS}{text}").ids)[:48] for text in chapters()[:4]]
    accepted, _, _ = evaluate.acceptance(model, prompts, num_drafts=5, rounds=4, pad=2)
    assert accepted > 0.5


def test_tokenizer_round_trip() -> None:
    made = tokenizer.load(MODEL)
    for text in (*chapters()[:2], "Ünïcode £5, 漢字 and \t tabs\r\n\n  spaces  "):
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids() -> None:
    made = tokenizer.load(MODEL)
    assert [made.token_to_id(token) for token in (tokenizer.BOS, tokenizer.EOS, tokenizer.PAD)] == [0, 1, 2]
    for token in (*tokenizer.SPECIAL, *tokenizer.VISIBLE):
        ids = made.encode(f"word{token}word").ids
        token_id = made.token_to_id(token)
        assert token_id is not None
        assert list(ids).count(token_id) == 1
        assert made.decode(ids, skip_special_tokens=False) == f"word{token}word"
    prompt = f"{tokenizer.BOS}{tokenizer.USER}Who art thou?{tokenizer.ASSISTANT}{tokenizer.END_THINK}"
    assert made.decode(made.encode(prompt).ids) == prompt.removeprefix(tokenizer.BOS)


def test_engram_tables_follow_from_tokenizer_and_config() -> None:
    spec, _, tables = checkpoint.load(MODEL)
    assert spec.engram is not None
    assert tables is not None
    token_map, num_classes = tokenizer.token_map(tokenizer.load(MODEL))
    stored = load_file(MODEL / "engram.safetensors")
    assert num_classes == spec.engram.num_classes
    assert torch.equal(token_map.long(), stored["token_map"].long())
    assert torch.equal(tables.primes, stored["primes"])
    assert torch.equal(tables.offsets, stored["offsets"])
    assert torch.equal(tables.multipliers, stored["multipliers"])
