"""Train tiny-v41 from nothing: ``python -m engine.model.tiny_v41.train``. The learning rate follows the clock, so a budget is kept.

Stages: tokenizer -> backbone (dense attention first, then the indexer's selection, at last longer sequences with rounded
caches) -> DSpark draft on the frozen backbone -> files under ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from engine.model.tiny_v41 import checkpoint, corpus, optimiser, settings, tokenizer
from engine.model.tiny_v41.draft import Draft, block_loss
from engine.model.tiny_v41.draft import initial as initial_draft
from engine.model.tiny_v41.engram import tables_of
from engine.model.tiny_v41.forward import Forward, Options
from engine.model.tiny_v41.parallel import Board, Clock, Rank, Rates, launch, new_board, rate_at

ASSETS = Path(__file__).parents[1] / "assets" / "tiny-v41"


@dataclass(frozen=True)
class Plan:
    """``sequences`` per rank and step at ``length``; halved when the length doubles."""

    work: str
    seed: int = 1
    backbone_s: float = 2160.0
    draft_s: float = 720.0
    ranks: int = 2
    sequences: int = 6
    length: int = 256
    chat_share: float = 0.12
    sparse_from: float = 0.2
    long_from: float = 0.8
    index_rows: int = 24
    index_weight: float = 0.3
    draft_sequences: int = 4
    draft_anchors: int = 64
    rates: Rates = field(default_factory=Rates)


def log(plan: Plan, text: str) -> None:
    line = f"{time.strftime('%H:%M:%S')} {text}"
    print(line, flush=True)
    with (Path(plan.work) / "train.log").open("a") as file:
        file.write(line + "\n")


def prepare(plan: Plan) -> Path:
    """Text, tokenizer, config.json and engram.safetensors in the work folder, which becomes the model folder."""
    work = Path(plan.work)
    training, _ = corpus.split(corpus.chapters(corpus.fetch(work)))
    made = tokenizer.train(chapter.text for chapter in training)
    tokenizer.save(made, work)
    token_map, num_classes = tokenizer.token_map(made)
    (work / "config.json").write_text(json.dumps(settings.config(made, num_classes), indent=1) + "\n")
    spec = checkpoint.read_spec(work)
    assert spec.engram is not None
    tables = tables_of(spec.engram, token_map)
    tensors = {
        "token_map": token_map.long(),
        "pad_class": torch.tensor([tables.pad_class]),
        "primes": tables.primes,
        "offsets": tables.offsets,
        "multipliers": tables.multipliers,
        "layer_ids": torch.tensor(tables.layer_ids),
    }
    save_file(tensors, work / "engram.safetensors")
    return work


def set_up_process(plan: Plan, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed * 1000 + rank)
    random.seed(plan.seed * 1000 + rank)
    # Shapes are few and fixed; kernels for each beat one general kernel.
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 128


def held_out_loss(model: Forward, ids: Tensor, options: Options) -> float:
    """Mean cross entropy (nats per token) of sequences [B, L+1]."""
    with torch.no_grad():
        logits = model.logits(model(ids[:, :-1], options).hidden)
        return float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def train_backbone(rank: int, board: Board, plan: Plan) -> None:
    set_up_process(plan, rank)
    work = Path(plan.work)
    spec = checkpoint.read_spec(work)
    made = tokenizer.load(work)
    token_map, _ = tokenizer.token_map(made)
    assert spec.engram is not None
    training, held_out = corpus.split(corpus.chapters(work / "kjv.txt"))
    stream = corpus.Stream(made, training, plan.seed * 1000 + rank, plan.chat_share)
    probe_ids = [i for c in held_out[::3] for i in made.encode(f"{tokenizer.BOS}{c.text}").ids]
    probe = torch.tensor(probe_ids[: 24 * 257]).view(24, 257)
    me = Rank(board, rank, plan.rates)
    model = Forward(spec, me.leaves, tables_of(spec.engram, token_map), compiled=True)
    plain = Forward(spec, me.leaves, model.tables)
    clock = Clock(board, rank, plan.backbone_s)
    step, tokens, saved_s, loss_sum, index_sum, norm = 0, 0, time.monotonic(), 0.0, 0.0, 0.0
    gates = [f"layers.{layer}.ffn" for layer in range(spec.num_layers)]
    while True:
        if step == 1:
            clock.restart()
        progress = clock.progress()
        if progress >= 1:
            break
        long = progress >= plan.long_from
        length, sequences = (2 * plan.length, plan.sequences // 2) if long else (plan.length, plan.sequences)
        options = Options(sparse=progress >= plan.sparse_from, rounding=long, index_loss_rows=plan.index_rows, balance=True)
        ids = torch.tensor(stream.take(sequences * (length + 1))).view(sequences, length + 1)
        out = model(ids[:, :-1], options)
        loss = functional.cross_entropy(model.logits(out.hidden).flatten(0, 1), ids[:, 1:].flatten())
        (loss + plan.index_weight * out.index_loss).backward()  # type: ignore[no-untyped-call]
        for gate in gates:  # the bias's "gradient" is each expert's excess load: ranks agree through the same averaging
            counts = out.expert_counts[gate].float()
            me.leaves[f"{gate}.gate.bias"].grad = counts - counts.mean()
        rate = rate_at(progress)
        norm = me.update(rate)
        step, tokens = step + 1, tokens + ids.numel() * board.ranks
        loss_sum, index_sum = loss_sum + float(loss.detach()), index_sum + float(out.index_loss.detach())
        if rank == 0 and step % 20 == 0:
            log(plan, f"step {step} tokens {tokens} epoch {stream.epochs} progress {progress:.3f} loss {loss_sum / 20:.4f} "
                f"index {index_sum / 20:.4f} norm {norm:.2f} tok/s {tokens / (time.monotonic() - clock.start_s):.0f}")  # fmt: skip
            loss_sum = index_sum = 0.0
        if rank == 0 and time.monotonic() - saved_s > 180:
            saved_s = time.monotonic()
            checkpoint.save(board.params, work / "model.safetensors")
            log(plan, f"held-out loss {held_out_loss(plain, probe, Options(sparse=options.sparse)):.4f}, "
                f"selected and rounded {held_out_loss(plain, probe, Options(rounding=True)):.4f}")  # fmt: skip
    if rank == 0:
        log(plan, f"backbone: {step} steps, {tokens} tokens, {stream.epochs} epochs, {time.monotonic() - clock.start_s:.0f} s")


def train_draft(rank: int, board: Board, plan: Plan) -> None:
    """The backbone is frozen and runs as in service (selection, rounded caches); only ``mtp.*`` learns."""
    set_up_process(plan, rank)
    work = Path(plan.work)
    spec = checkpoint.read_spec(work)
    made = tokenizer.load(work)
    assert spec.engram is not None
    assert spec.dspark is not None
    training, _ = corpus.split(corpus.chapters(work / "kjv.txt"))
    stream = corpus.Stream(made, training, plan.seed * 1000 + 500 + rank, plan.chat_share)
    me = Rank(board, rank, plan.rates)
    model = Forward(spec, me.leaves, tables_of(spec.engram, tokenizer.token_map(made)[0]))
    draft = Draft(model)
    clock = Clock(board, rank, plan.draft_s)
    step, loss_sum, same_sum = 0, 0.0, torch.zeros(spec.dspark.block_size)
    gates = [f"mtp.{layer}.ffn" for layer in range(spec.dspark.num_layers)]
    while (progress := clock.progress()) < 1:
        ids = torch.tensor(stream.take(plan.draft_sequences * plan.length)).view(plan.draft_sequences, plan.length)
        with torch.no_grad():
            out = model(ids, Options(rounding=True))
            logits = model.logits(out.hidden)
        assert out.features is not None
        loss, same = block_loss(draft, out.features, logits, ids, plan.draft_anchors)
        loss.backward()  # type: ignore[no-untyped-call]
        for gate in gates:
            counts = draft.seen.expert_counts[gate].float()
            me.leaves[f"{gate}.gate.bias"].grad = counts - counts.mean()
        me.update(rate_at(progress))
        step, loss_sum, same_sum = step + 1, loss_sum + float(loss.detach()), same_sum + same
        if rank == 0 and step % 20 == 0:
            agree = " ".join(f"{value:.3f}" for value in (same_sum / 20).tolist())
            log(plan, f"draft step {step} progress {progress:.3f} loss {loss_sum / 20:.4f} agreement {agree}")
            loss_sum, same_sum = 0.0, torch.zeros_like(same_sum)
    if rank == 0:
        log(plan, f"draft: {step} steps, {time.monotonic() - clock.start_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", default="/tmp/tiny-v41", help="folder for the text, the log and the growing checkpoint")
    parser.add_argument("--output", type=Path, default=ASSETS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backbone-s", type=float, default=Plan.backbone_s)
    parser.add_argument("--draft-s", type=float, default=Plan.draft_s)
    parser.add_argument("--stage", choices=("all", "backbone", "draft"), default="all")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    plan = Plan(work=given.work, seed=given.seed, backbone_s=given.backbone_s, draft_s=given.draft_s)
    work = prepare(plan)
    log(plan, f"plan {asdict(plan)}")
    if given.stage != "draft":
        params = optimiser.initial(checkpoint.read_spec(work), torch.Generator().manual_seed(plan.seed))
        trained = [name for name in params if not name.endswith("gate.bias_vl")]
        launch(train_backbone, new_board(params, trained, plan.ranks), (plan,))
        for name in params:  # images do not occur; their routing bias is the text's
            if name.endswith("gate.bias_vl"):
                params[name].copy_(params[name.removesuffix("_vl")])
        checkpoint.save(params, work / "model.safetensors")
    if given.stage != "backbone":
        spec, params, _ = checkpoint.load(work)
        params = {name: value for name, value in params.items() if not name.startswith("mtp.")}
        new = initial_draft(spec, torch.Generator().manual_seed(plan.seed + 1))
        params |= new
        launch(train_draft, new_board(params, list(new), plan.ranks), (plan,))
        checkpoint.save(params, work / "model.safetensors")
        given.output.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "engram.safetensors", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(work / file, given.output / file)


if __name__ == "__main__":
    main()
