"""``twinfer logits``: logits of whole sequences through the paged path that serves, for parity checks against other engines.

Input and output are safetensors files: ``input_ids`` int64 [B, Lmax] right-padded and ``lengths`` int64 [B] in; ``logits``
float32 [sum L, V] packed, ``cu_seqlens`` int64 [B + 1] and, with ``--greedy N``, ``greedy.ids`` int64 [B, N] out.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import ConfigError, OutputError, RequestError
from engine.core.plan import PlanItem, RankPlan, SequenceStart
from engine.core.sampling import SamplingParams
from engine.device import resolve_device

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.runner import Runner

MAX_SEQUENCES = 1024
MAX_PACKED_TOKENS = 1 << 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("logits", help="logits of whole sequences, for parity checks", description=__doc__)
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("--inputs", required=True, metavar="FILE", help="safetensors with input_ids and lengths")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors to write")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache-rounding", default="on", choices=("on", "off"), help="FP8/FP4 rounding of cached rows (V4.1)")
    parser.add_argument("--block-size", "--page-size", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, metavar="N", help="prefill in chunks of N tokens (default: whole)")
    parser.add_argument("--decode-from", type=int, metavar="K", help="feed the tokens after the first K one by one")
    parser.add_argument("--greedy", type=int, default=0, metavar="N", help="continue each sequence greedily by N tokens")
    parser.add_argument("--load-format", default="auto", choices=("auto", "random"), help="random makes seeded weights")
    parser.add_argument("--random-seed", type=int, default=0, metavar="N", help="of random weights")
    parser.add_argument("--json", action="store_true", help="print a JSON summary")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for name, low in (("chunk", 1), ("decode_from", 1), ("greedy", 0), ("block_size", 1), ("random_seed", 0)):
        value = getattr(arguments, name)
        if value is not None and not low <= value <= MAX_PACKED_TOKENS:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; needed: an integer from {low} to {MAX_PACKED_TOKENS}")
    import torch  # heavy, and only this command's run needs it
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from engine.core.cache_config import CacheConfig
    from engine.model.load import load_model
    from engine.model.runner import Runner

    check_output(arguments.out, arguments.inputs)
    device = resolve_device(arguments.device).device
    sequences = read_inputs(arguments.inputs)
    loaded = load_model(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        device=torch.device(device),
        cache_rounding=arguments.cache_rounding == "on",
        load_format=arguments.load_format,
        random_seed=arguments.random_seed,
    )
    vocab_size = loaded.model.spec.vocab_size
    for index, tokens in enumerate(sequences):
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise RequestError(f"{arguments.inputs}: sequence {index} has ids outside 0..{vocab_size - 1}", param="input_ids")
    longest = max(len(tokens) for tokens in sequences) + arguments.greedy
    if longest > loaded.model.spec.max_positions:
        raise RequestError(f"{longest} tokens exceed the model's {loaded.model.spec.max_positions} positions", param="input_ids")
    blocks_each = -(-longest // arguments.block_size)
    config = CacheConfig(
        num_blocks=blocks_each * len(sequences),
        block_size=arguments.block_size,
        max_running=len(sequences),
        max_batched_tokens=sum(len(tokens) for tokens in sequences),
        context_length=longest,
    )
    driver = _Driver(Runner(loaded.model, config), sequences, blocks_each)
    rows = driver.feed(arguments.chunk, arguments.decode_from)
    tensors = {
        "logits": torch.cat(rows).float().cpu().contiguous(),
        "cu_seqlens": torch.tensor([0, *[len(tokens) for tokens in sequences]]).cumsum(0),
    }
    if arguments.greedy:
        tensors["greedy.ids"] = driver.continue_greedily([chunk[-1] for chunk in rows], arguments.greedy)
    try:
        save_file(tensors, arguments.out)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"--out {arguments.out} cannot be written: {error}") from None
    if arguments.json:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        print(json.dumps({"model": loaded.model.spec.name, "out": arguments.out, "tensors": shapes, "steps": driver.step}))
    return 0


def check_output(out: str, inputs: str) -> None:
    """Refuse, before any work, an --out that cannot be written or would replace something else: the file is renamed into place."""
    path = Path(out)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {out}: {path.parent} is not a folder that can be written to")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--out {out}: not a regular file")
    if path.exists() and Path(inputs).exists() and path.samefile(inputs):
        raise ConfigError(f"--out {out}: the same file as --inputs")


def read_inputs(path: str) -> list[list[int]]:
    """The sequences of an inputs file, with every size checked. Raises RequestError naming file and tensor."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise RequestError(f"{path}: no such file", param="inputs")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{path}: not a readable safetensors file ({error})", param="inputs") from None
    for name in ("input_ids", "lengths"):
        if name not in tensors:
            raise RequestError(f"{path}: tensor {name} is missing; found: {', '.join(sorted(tensors)) or 'none'}", param="inputs")
    ids_BL, lengths_B = tensors["input_ids"], tensors["lengths"]
    if ids_BL.dim() != 2 or lengths_B.dim() != 1 or ids_BL.shape[0] != lengths_B.shape[0] or not 1 <= ids_BL.shape[0] <= MAX_SEQUENCES:
        raise RequestError(
            f"{path}: input_ids {list(ids_BL.shape)} and lengths {list(lengths_B.shape)}; "
            f"needed: [B, Lmax] and [B], B from 1 to {MAX_SEQUENCES}",
            param="input_ids",
        )
    if any(str(tensor.dtype) not in ("torch.int64", "torch.int32") for tensor in (ids_BL, lengths_B)):
        raise RequestError(f"{path}: input_ids and lengths must be integers (int64 or int32)", param="input_ids")
    lengths = lengths_B.tolist()
    if min(lengths) < 1 or max(lengths) > ids_BL.shape[1] or sum(lengths) > MAX_PACKED_TOKENS:
        raise RequestError(
            f"{path}: lengths {lengths[:8]} must lie in 1..{ids_BL.shape[1]} and sum to at most {MAX_PACKED_TOKENS}", param="lengths"
        )
    return [row[:length] for row, length in zip(ids_BL.tolist(), lengths, strict=True)]


class _Driver:
    """Writes the plans a scheduler would write for sequences that all run from the start with their blocks in hand."""

    def __init__(self, runner: Runner, sequences: list[list[int]], blocks_each: int) -> None:
        self.runner = runner
        self.sequences = sequences
        self.step = 0
        self._starts = tuple(
            SequenceStart(index, index, 0, tuple(range(index * blocks_each, (index + 1) * blocks_each))) for index in range(len(sequences))
        )
        for index, tokens in enumerate(sequences):
            runner.register(index, tokens, SamplingParams(max_tokens=1), seed=0)

    def feed(self, chunk: int | None, decode_from: int | None) -> list[Tensor]:
        """Logits [L, V] of each sequence, all sequences advancing together."""
        import torch

        computed = [0] * len(self.sequences)
        pieces: list[list[Tensor]] = [[] for _ in self.sequences]
        while True:
            items = []
            for index, tokens in enumerate(self.sequences):
                new = _next_tokens(computed[index], len(tokens), chunk, decode_from)
                if new:
                    items.append(PlanItem(index, index, computed[index], new, 0, False))
            if not items:
                return [torch.cat(piece) for piece in pieces]
            logits_TV = self._execute(items)
            row = 0
            for item in items:
                pieces[item.slot].append(logits_TV[row : row + item.num_new_tokens])
                row += item.num_new_tokens
                computed[item.slot] += item.num_new_tokens

    def continue_greedily(self, last_logits: list[Tensor], count: int) -> Tensor:
        """Greedy ids [B, count]; the last one is chosen but never fed."""
        import torch

        rows = torch.stack(last_logits)
        chosen: list[Tensor] = []
        for index in range(count):
            chosen.append(rows.argmax(-1))
            if index == count - 1:
                break
            items = []
            for slot, (tokens, token) in enumerate(zip(self.sequences, chosen[-1].tolist(), strict=True)):
                self.runner.append_token(slot, len(tokens) + index, token)
                items.append(PlanItem(slot, slot, len(tokens) + index, 1, 0, False))
            rows = self._execute(items)
        return torch.stack(chosen, 1).cpu()

    def _execute(self, items: list[PlanItem]) -> Tensor:
        starts = self._starts if self.step == 0 else ()
        logits = self.runner.logits(self.step, RankPlan(starts=starts, items=tuple(items)))
        self.step += 1
        return logits


def _next_tokens(computed: int, length: int, chunk: int | None, decode_from: int | None) -> int:
    if decode_from is not None and computed >= decode_from:
        return min(1, length - computed)
    end = length if decode_from is None else min(length, decode_from)
    return min(end - computed, chunk or end)
