"""A small paged server for tests: allocates blocks and slots in scrambled order and builds ForwardBatch objects."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.model_config import model_spec
from engine.core.specs import V41Spec
from engine.model.base import ForwardOutput
from engine.model.batch import ForwardBatch
from engine.model.v41 import V41Cache, V41Model

torch.set_num_threads(1)
FIXTURES = Path(__file__).parent.parent / "fixtures"
ALL_CASES = ("v41_csa2_plain", "v41_csa2_cacheround", "v41_engram", "v41_ragged_greedy")


class DictWeights:
    """A WeightSource over a dict."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.tensors[name].narrow(dim, start, stop - start)


@dataclass
class Case:
    """One fixture folder, loaded."""

    spec: V41Spec
    model: V41Model
    meta: dict[str, Any]
    expected: dict[str, Tensor]
    prompts: list[list[int]]
    engram: dict[str, Tensor]


def load_case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    folder = FIXTURES / name
    spec = model_spec(json.loads((folder / "config.json").read_text()), name)
    assert isinstance(spec, V41Spec)
    meta = json.loads((folder / "meta.json").read_text())
    inputs = load_file(folder / "inputs.safetensors")
    engram = load_file(folder / "engram.safetensors") if (folder / "engram.safetensors").exists() else {}
    model = V41Model(
        spec,
        DictWeights(load_file(folder / "model.safetensors")),
        dtype=dtype,
        cache_rounding=meta["cache_rounding"],
        token_map=engram.get("token_map"),
    )
    prompts = [row[:length] for row, length in zip(inputs["input_ids"].tolist(), inputs["lengths"].tolist(), strict=True)]
    return Case(spec, model, meta, load_file(folder / "expected.safetensors"), prompts, engram)


@dataclass
class Sequence:
    slot: int
    tokens: list[int]
    blocks: list[int]
    computed: int = 0


@dataclass
class Server:
    """Sequences on one cache. ``step`` runs any mix of chunks; blocks and slots come in a scrambled but repeatable order."""

    model: V41Model
    block_size: int = 8
    num_blocks: int = 160
    max_running: int = 6
    max_draft: int = 3
    context: int = 256
    seed: int = 1
    num_tails: int = 3
    cache: V41Cache = field(init=False)

    def __post_init__(self) -> None:
        config = CacheConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_running=self.max_running,
            max_batched_tokens=512,
            context_length=self.context,
            max_draft_tokens=self.max_draft,
            num_tails=self.num_tails,
            num_host_blocks=40,
            num_host_states=2,
        )
        self.cache = self.model.new_cache(config)
        shuffle = random.Random(self.seed)
        self.free_blocks = list(range(self.num_blocks))
        self.free_slots = list(range(self.max_running))
        shuffle.shuffle(self.free_blocks)
        shuffle.shuffle(self.free_slots)
        self.history = torch.full((self.max_running, self.context), 7)
        self.poison()

    def poison(self) -> None:
        """Fill everything a fresh cache holds with large finite values, the zero rows excepted: nothing unwritten may matter."""
        generator = torch.Generator().manual_seed(5)
        cache = self.cache
        for tensor, zero in ((cache.window_LNC, cache.zero_row), (cache.pairs_LNU, None)):
            if tensor.numel():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 50)
                if zero is not None:
                    tensor[:, zero] = 0
        for tensors in (cache.main, cache.keys):
            for tensor in tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 50)
                tensor[-2] = 0

    def start(self, tokens: list[int], computed: int = 0, blocks: list[int] | None = None) -> Sequence:
        sequence = Sequence(self.free_slots.pop(), list(tokens), list(blocks or []), computed)
        if computed == 0:
            self.cache.reset_state([sequence.slot])
        return sequence

    def stop(self, sequence: Sequence) -> None:
        self.free_slots.insert(0, sequence.slot)
        self.free_blocks[:0] = sequence.blocks

    def step(
        self,
        work: list[tuple[Sequence, int]],
        logit_rows: list[int] | None = None,
        tail_saves: tuple[tuple[int, int, int], ...] = (),
        capture: frozenset[str] = frozenset(),
    ) -> ForwardOutput:
        """Compute the next ``count`` tokens of each sequence; ``logit_rows`` None asks for every row."""
        batch = self.batch(work, logit_rows, tail_saves)
        output = self.model.forward(batch, self.cache, capture)
        for sequence, count in work:
            sequence.computed += count
        return output

    def batch(
        self, work: list[tuple[Sequence, int]], logit_rows: list[int] | None = None, tail_saves: tuple[tuple[int, int, int], ...] = ()
    ) -> ForwardBatch:
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        owner: list[int] = []
        starts = [0]
        for index, (sequence, count) in enumerate(work):
            stop = sequence.computed + count
            while len(sequence.blocks) * size < stop:
                sequence.blocks.append(self.free_blocks.pop())
            self.history[sequence.slot] = 7  # garbage past the known tokens
            self.history[sequence.slot, :stop] = torch.tensor(sequence.tokens[:stop])
            for position in range(sequence.computed, stop):
                tokens.append(sequence.tokens[position])
                positions.append(position)
                rows.append(sequence.blocks[position // size] * size + position % size)
                owner.append(index)
            starts.append(len(tokens))
        width = max(len(sequence.blocks) for sequence, _ in work)
        return ForwardBatch(
            token_ids_T=torch.tensor(tokens),
            positions_T=torch.tensor(positions),
            seq_of_token_T=torch.tensor(owner),
            slots_B=torch.tensor([sequence.slot for sequence, _ in work]),
            query_starts_B1=torch.tensor(starts),
            context_starts_B=torch.tensor([sequence.computed for sequence, _ in work]),
            context_lens_B=torch.tensor([sequence.computed + count for sequence, count in work]),
            block_table_BM=torch.tensor([sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in work]),
            kv_rows_T=torch.tensor(rows),
            logit_rows_R=torch.arange(len(tokens)) if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
            token_history_SL=self.history,
            tail_saves=tail_saves,
            num_sequences=len(work),
            max_query_len=max(count for _, count in work),
            max_context_len=max(sequence.computed + count for sequence, count in work),
        )

    def last_rows(self, work: list[tuple[Sequence, int]]) -> list[int]:
        ends, total = [], 0
        for _, count in work:
            total += count
            ends.append(total - 1)
        return ends

    def greedy(self, sequences: list[Sequence], count: int) -> tuple[list[list[int]], Tensor]:
        """Decode ``count`` tokens of all sequences together; the first comes from computing what is still missing of the prompt."""
        produced: list[list[int]] = [[] for _ in sequences]
        logits = []
        for _ in range(count):
            work = [(sequence, len(sequence.tokens) - sequence.computed) for sequence in sequences]
            output = self.step(work, self.last_rows(work))
            logits.append(output.logits_RV)
            for sequence, row, made in zip(sequences, output.logits_RV.argmax(-1).tolist(), produced, strict=True):
                sequence.tokens.append(row)
                made.append(row)
        return produced, torch.stack(logits, dim=1)
