"""Two single-threaded processes that train one set of parameters in shared memory.

On a busy machine this is far faster than two threads: a step waits for its neighbour three times, not at every operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch import multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from engine.model.tiny_v41.optimiser import Optimiser

COUNTS = "counts/"


@dataclass
class Board:
    """What the ranks share: parameters, one gradient buffer per rank, a few numbers and a barrier."""

    params: dict[str, Tensor]
    trained: list[str]
    gradients: list[dict[str, Tensor]]
    numbers: Tensor  # [0] share of the budget that is used, [1 + rank] squared gradient norm of a rank's part
    barrier: Any
    ranks: int


def _shared(value: Tensor) -> Tensor:
    return cast(Tensor, value.share_memory_())  # type: ignore[no-untyped-call]


def new_board(params: dict[str, Tensor], trained: list[str], ranks: int) -> Board:
    for value in params.values():
        _shared(value)
    buffers = [{name: _shared(torch.zeros_like(params[name])) for name in trained} for _ in range(ranks)]
    numbers = _shared(torch.zeros(1 + ranks, dtype=torch.float64))
    return Board(params, trained, buffers, numbers, mp.get_context("spawn").Barrier(ranks), ranks)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates of matrices, of the rest and of embedding tables; weight decay."""

    muon: float = 0.02
    adam: float = 0.004
    table: float = 0.008
    decay: float = 0.1


class Rank:
    """One process's view: leaf tensors over the shared storage, and the optimiser of its share of the parameters."""

    def __init__(self, board: Board, rank: int, rates: Rates, clip: float = 1.0) -> None:
        self.board, self.rank, self.clip = board, rank, clip
        trained = set(board.trained)
        self.leaves = {k: v.detach().requires_grad_(k in trained) for k, v in board.params.items()}
        # Largest first, dealt in turn: an even split of the work.
        order = sorted(board.trained, key=lambda name: (-board.params[name].numel(), name))
        self.mine = order[rank :: board.ranks]
        self.optimiser = Optimiser({k: self.leaves[k] for k in self.mine}, rates.muon, rates.adam, rates.table, rates.decay)

    def update(self, rate: float) -> float:
        """Average the ranks' gradients, clip by their common norm, update this rank's share; returns the norm."""
        board = self.board
        with torch.no_grad():
            for name in board.trained:
                gradient = self.leaves[name].grad
                target = board.gradients[self.rank][name]
                _ = target.zero_() if gradient is None else target.copy_(gradient)
                self.leaves[name].grad = None
            board.barrier.wait()
            square = torch.zeros((), dtype=torch.float64)
            for name in self.mine:
                total = torch.stack([buffer[name] for buffer in board.gradients]).mean(0)
                self.leaves[name].grad = total
                if not name.endswith("gate.bias"):  # that one is an expert's excess load, no gradient
                    square += total.double().square().sum()
            board.numbers[1 + self.rank] = square
            board.barrier.wait()
            norm = float(board.numbers[1:].sum().sqrt())
            for name in self.mine:
                gradient = self.leaves[name].grad
                assert gradient is not None
                gradient.mul_(min(1.0, self.clip / (norm + 1e-6)))
            self.optimiser.step(rate)
            for name in self.mine:
                self.leaves[name].grad = None
            board.barrier.wait()
        return norm


class Clock:
    """The used share of a wall-clock budget, the same on all ranks: rank 0 reads the time and tells the others."""

    def __init__(self, board: Board, rank: int, budget_s: float) -> None:
        self.board, self.rank, self.budget_s = board, rank, budget_s
        self.start_s = time.monotonic()

    def restart(self) -> None:
        """Leave compilation out of the budget."""
        self.start_s = time.monotonic()

    def progress(self) -> float:
        if self.rank == 0:
            self.board.numbers[0] = (time.monotonic() - self.start_s) / self.budget_s
        self.board.barrier.wait()
        return float(self.board.numbers[0])


def launch(work: Callable[..., None], board: Board, arguments: tuple[Any, ...]) -> None:
    """Run ``work(rank, board, *arguments)`` in one process per rank."""
    spawn(work, args=(board, *arguments), nprocs=board.ranks, join=True)  # type: ignore[no-untyped-call]


def rate_at(progress: float, warm_up: float = 0.03, hold: float = 0.35, last: float = 0.02) -> float:
    """Learning-rate factor: linear up, flat, then linear down to ``last``."""
    if progress < warm_up:
        return max(progress / warm_up, 0.02)
    if progress < hold:
        return 1.0
    return last + (1 - last) * max(0.0, (1 - progress) / (1 - hold))
