"""The card's numbers, into measures.json: ``python -m engine.model.tiny_v41.evaluate``.

Held-out loss against n-gram baselines, acceptance of drafts, samples of text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from engine.model.tiny_v41 import checkpoint, corpus, tokenizer
from engine.model.tiny_v41.draft import Draft
from engine.model.tiny_v41.forward import Forward, Options

ASSETS = Path(__file__).parents[1] / "assets" / "tiny-v41"
SERVED = Options(rounding=True)  # caches rounded and rows selected, as in service


class Trigram:
    """Interpolated (Jelinek-Mercer) token trigram. Weights per bucket of the context's count, by EM on chapters kept from the counts."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int, iterations: int = 20) -> None:
        self.vocab_size = vocab_size
        self._count([s for i, s in enumerate(sequences) if i % 20])
        kept = [s for i, s in enumerate(sequences) if i % 20 == 0]
        self.weights: dict[tuple[int, int], list[float]] = {}
        for _ in range(iterations):
            sums: dict[tuple[int, int], list[float]] = {}
            for s in kept:
                for t in range(1, len(s)):
                    parts, bucket = self._parts(s, t)
                    weighted = [w * p for w, p in zip(self._weights(bucket), parts, strict=True)]
                    total = sum(weighted)
                    row = sums.setdefault(bucket, [1e-3] * 4)
                    for index, value in enumerate(weighted):
                        row[index] += value / total
            self.weights = {bucket: [value / sum(row) for value in row] for bucket, row in sums.items()}
        self._count(sequences)

    def _count(self, sequences: Sequence[Sequence[int]]) -> None:
        self.one: Counter[int] = Counter()
        self.two: Counter[tuple[int, int]] = Counter()
        self.three: Counter[tuple[int, int, int]] = Counter()
        self.context_one: Counter[int] = Counter()
        self.context_two: Counter[tuple[int, int]] = Counter()
        for s in sequences:
            self.one.update(s[1:])
            self.two.update(pairwise(s))
            self.three.update(zip(s, s[1:], s[2:], strict=False))
            self.context_one.update(s[:-1])
            self.context_two.update(pairwise(s[:-1]))
        self.total = sum(self.one.values())

    def _weights(self, bucket: tuple[int, int]) -> list[float]:
        return self.weights.get(bucket, [0.25] * 4)

    def _parts(self, s: Sequence[int], t: int) -> tuple[list[float], tuple[int, int]]:
        """Probabilities of s[t] by order 0..3, and the bucket of its contexts' counts."""
        before = self.context_one[s[t - 1]]
        pair = self.context_two[s[t - 2], s[t - 1]] if t > 1 else 0
        three = self.three[s[t - 2], s[t - 1], s[t]] / pair if pair else 0.0
        two = self.two[s[t - 1], s[t]] / before if before else 0.0
        return [1 / self.vocab_size, self.one[s[t]] / self.total, two, three], (before.bit_length(), pair.bit_length())

    def losses(self, s: Sequence[int]) -> tuple[float, float]:
        """Summed nats of s[1:] under the unigram (add one) and under the interpolated trigram."""
        unigram = trigram = 0.0
        for t in range(1, len(s)):
            parts, bucket = self._parts(s, t)
            trigram -= math.log(sum(w * p for w, p in zip(self._weights(bucket), parts, strict=True)))
            unigram -= math.log((self.one[s[t]] + 1) / (self.total + self.vocab_size))
        return unigram, trigram


def model_loss(model: Forward, sequences: Sequence[Sequence[int]], chunk: int, options: Options) -> float:
    """Summed nats of every s[1:]; a long sequence is cut into chunks that do not see each other."""
    total = 0.0
    for s in sequences:
        for start in range(0, len(s) - 1, chunk):
            ids = torch.tensor(s[start : start + chunk + 1])[None]
            with torch.no_grad():
                logits = model.logits(model(ids[:, :-1], options).hidden)
            total += float(functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
    return total


def generate(model: Forward, ids: list[int], count: int, temperature: float, seed: int = 0, stop: int | None = None) -> list[int]:
    """Plain decoding by running the whole sequence again for each token."""
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([ids + made]), SERVED).hidden[:, -1])[0]
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == stop:
            break
        made.append(token)
    return made


def _verify(model: Forward, rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Greedy choices [B, L] and draft features of ragged sequences, right-padded (attention is causal)."""
    length = max(len(row) for row in rows)
    with torch.no_grad():
        out = model(torch.tensor([row + [pad] * (length - len(row)) for row in rows]), SERVED)
        assert out.features is not None
        return model.logits(out.hidden).argmax(-1), out.features


def acceptance(model: Forward, prompts: list[list[int]], num_drafts: int, rounds: int, pad: int) -> tuple[float, float, float]:
    """Greedy speculative decoding: mean accepted drafts per round; mean confidence of the drafts judged, and how many were right."""
    draft = Draft(model)
    choices, features = _verify(model, prompts, pad)
    known = [len(prompt) for prompt in prompts]  # main rows; the newest token comes after them
    rows = [[*prompt, int(choices[i, len(prompt) - 1])] for i, prompt in enumerate(prompts)]
    accepted = judged = right = 0
    confidence = 0.0
    for _ in range(rounds):
        anchors = torch.tensor([n - 1 for n in known])
        with torch.no_grad():
            drafted, confident = draft.greedy(features, torch.arange(len(rows)), anchors, torch.tensor([row[-1] for row in rows]))
        tried = [row + drafted[i, :num_drafts].tolist() for i, row in enumerate(rows)]
        choices, features = _verify(model, tried, pad)
        for i, row in enumerate(rows):
            at, taken = len(row) - 1, 0
            for j in range(num_drafts):
                judged, confidence = judged + 1, confidence + float(confident[i, j])
                if int(choices[i, at + j]) != tried[i][at + 1 + j]:
                    break
                taken, right = taken + 1, right + 1
            accepted += taken
            rows[i] = [*tried[i][: at + 1 + taken], int(choices[i, at + taken])]
            known[i] = len(rows[i]) - 1
    return accepted / (rounds * len(prompts)), confidence / judged, right / judged


def encode(made: Tokenizer, chapters: list[corpus.Chapter]) -> list[list[int]]:
    return [list(made.encode(f"{tokenizer.BOS}{chapter.text}").ids) for chapter in chapters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--work", type=Path, default=Path("/tmp/tiny-v41"), help="folder of the text")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=16)
    given = parser.parse_args()
    training, held_out = corpus.split(corpus.chapters(corpus.fetch(given.work)))
    spec, params, tables = checkpoint.load(given.model)
    made = tokenizer.load(given.model)
    model = Forward(spec, params, tables)
    sequences = encode(made, held_out)
    num_tokens, num_bytes = sum(len(s) - 1 for s in sequences), sum(len(c.text.encode()) for c in held_out)
    results: dict[str, float] = {
        "held_out_tokens": num_tokens,
        "held_out_bytes": num_bytes,
        "params": sum(p.numel() for p in params.values()),
    }

    def report(name: str, nats: float) -> None:
        results[f"{name}_loss_nats_per_token"] = nats / num_tokens
        results[f"{name}_bits_per_byte"] = nats / math.log(2) / num_bytes
        print(f"{name:24} {nats / num_tokens:.4f} nats/token  {nats / math.log(2) / num_bytes:.4f} bits/byte", flush=True)

    baseline = Trigram(encode(made, training), spec.vocab_size)
    sums = [baseline.losses(s) for s in sequences]
    report("unigram", sum(u for u, _ in sums))
    report("trigram", sum(t for _, t in sums))
    report("model_as_served", model_loss(model, sequences, given.chunk, SERVED))
    report("model_unrounded", model_loss(model, sequences, given.chunk, Options()))
    report("model_all_rows", model_loss(model, sequences, given.chunk, Options(sparse=False)))
    if spec.dspark and any(name.startswith("mtp.") for name in params):
        prompts = [s[:64] for s in sequences if len(s) > 64][:32]
        for num_drafts in (3, 5):
            start_s = time.monotonic()
            mean, confidence, right = acceptance(model, prompts, num_drafts, given.rounds, spec.pad_token_id)
            results[f"accepted_of_{num_drafts}"] = mean
            print(f"{num_drafts} drafts: {mean:.3f} accepted a round, {1 + mean:.3f} tokens a round; confidence {confidence:.3f}, "
                  f"right {right:.3f} ({time.monotonic() - start_s:.0f} s)", flush=True)  # fmt: skip
    for temperature in (0.0, 0.7):
        ids = list(made.encode(f"{tokenizer.BOS}In the beginning").ids)
        text = made.decode(generate(model, ids, 120, temperature, stop=spec.eos_token_ids[0]))
        print(f"--- temperature {temperature}: In the beginning{text}", flush=True)
    chat = f"{tokenizer.BOS}{tokenizer.USER}And God said unto the people,{tokenizer.ASSISTANT}{tokenizer.END_THINK}"
    print("--- chat:", made.decode(generate(model, list(made.encode(chat).ids), 80, 0.7, stop=spec.eos_token_ids[0])))
    (given.model / "measures.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
