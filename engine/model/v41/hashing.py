"""Engram's hash constants and the compressed vocabulary, derived from the config and the tokenizer alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.specs import EngramSpec

_SEED_STEP = 10007  # the multiplier generator of layer l is seeded with 10007 * l
_INT64_MAX = 2**63 - 1
_PROTECTED_SPACE = "\ue000"  # private use: keeps a text that is one space from being stripped away


@dataclass(frozen=True, slots=True)
class HashConstants:
    """int64: multipliers [E, G], primes and offsets [E, C] in (order, head) order."""

    multipliers_EG: Tensor
    primes_EC: Tensor
    offsets_EC: Tensor


def hash_constants(spec: EngramSpec, device: torch.device) -> HashConstants:
    """Constants of every Engram layer.

    Multipliers: ``numpy.default_rng(10007 * layer)``, one odd int64 a step below ``(2^63 - 1) // num_classes``, so that class * multiplier
    cannot overflow. Primes: for layer, for order, the search restarts at ``prime_search_start`` and takes the next unused ones. Raises
    ConfigError where a table's rows are not the sum of its primes: ids would then belong to another table.
    """
    bound = max(1, _INT64_MAX // spec.num_classes // 2)
    multipliers = [
        np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=spec.max_ngram, dtype=np.int64) * 2 + 1
        for layer in spec.layer_ids
    ]
    # Restarting and skipping used primes is the same as one ascending walk.
    walk = _primes_from(spec.prime_search_start)
    primes = torch.tensor([[next(walk) for _ in range(spec.num_columns)] for _ in spec.layer_ids], dtype=torch.int64)
    for layer, rows, total in zip(spec.layer_ids, spec.num_rows, primes.sum(-1).tolist(), strict=True):
        if rows != total:
            raise ConfigError(
                f"engram_num_embeddings is {rows} for layer {layer}; engram_vocab_size {spec.prime_search_start} gives {total}"
            )
    return HashConstants(
        multipliers_EG=torch.from_numpy(np.stack(multipliers)).to(device),
        primes_EC=primes.to(device),
        offsets_EC=(primes.cumsum(-1) - primes).to(device),
    )


def _primes_from(start: int) -> Iterator[int]:
    """Primes >= start, ascending."""
    candidate = max(start, 2)
    while True:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            yield candidate
        candidate += 1


def build_token_map(tokenizer: Tokenizer) -> tuple[Tensor, int]:
    """The class of every token id (int64 [vocab]) and the number of classes; ids get classes in order of first appearance.

    A token's key is its text decoded alone, normalised (case, accents, width and white space folded); the text itself where that
    leaves nothing; the raw vocabulary string where the bytes are no valid text (U+FFFD).
    """
    fold = _folding()
    classes: dict[str, int] = {}
    token_map = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token) or ""
        else:
            key = fold.normalize_str(text) or text
        token_map.append(classes.setdefault(key, len(classes)))
    return torch.tensor(token_map, dtype=torch.int64), len(classes)


def _folding() -> normalizers.Normalizer:
    """The text folding, from the tokenizers library: Python's Unicode tables and ``strip`` differ from its own on some 700 tokens."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _PROTECTED_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_PROTECTED_SPACE, " "),
        ]
    )
