"""Grammars at work: where each request stands in its own, and the token masks of a step.

A mask row is W int32 words, one bit per token; llguidance fills it on the CPU, ``kernels.sampling.masked`` applies it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from engine.core.errors import TwinferError
from engine.grammar_compiler import GrammarCompiler

# Compiled beside the steps; more threads would take their cores.
_NUM_THREADS = 2
# Grammars that wait for a thread. One that is not among them is compiled when its request starts.
_MAX_PENDING = 16
_MAX_ERROR_CHARS = 300


class GrammarState:
    """One request's place in its grammar. It is kept with the request, so that a preemption loses nothing, and is not shared.

    ``error`` is why no further token can be chosen; it stays.
    """

    def __init__(self, matcher: LLMatcher | str, eos_token_ids: Sequence[int]) -> None:
        """``matcher`` at the start of the grammar, or the reason why there is none."""
        self.matcher = None if isinstance(matcher, str) else matcher
        self.error = matcher if isinstance(matcher, str) else None
        self._eos_token_ids = frozenset(eos_token_ids)
        self.ended = False  # an end of text was emitted: what follows is of no use to anybody

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in what the request has emitted."""
        for token in tokens:
            if self.matcher is None or self.error is not None or self.ended:
                return
            if token in self._eos_token_ids:
                self.ended = True
            elif not self.matcher.consume_token(token):
                self.note_failure()

    def note_failure(self) -> None:
        if self.matcher is not None and self.matcher.is_error():
            reason = " ".join(self.matcher.get_error().split())[:_MAX_ERROR_CHARS]
            self.error = f"the grammar came to a dead end: {reason}"


class GrammarMasks:
    """Fills the masks of a step's rows."""

    def __init__(self, vocab_size: int, device: torch.device, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_words = -(-vocab_size // 32)
        self._device = device

    def fill(self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]]) -> Tensor:
        """Masks [r, W]: of state i 1 + len(drafts[i]) rows, the j-th of them after its first j drafts.

        Rows behind a draft that the grammar forbids (it will be rejected) or that ends the text, of an ended request and of one without a
        matcher allow everything. What went wrong is in ``error`` of the states, which are otherwise as before.
        """
        bits_rW = np.full((len(states) + sum(map(len, drafts)), self._num_words), -1, dtype=np.int32)
        row = 0
        for state, tokens in zip(states, drafts, strict=True):
            if state.matcher is not None and state.error is None and not state.ended:
                self._fill_rows(state.matcher, bits_rW[row : row + 1 + len(tokens)], tokens)
                state.note_failure()
            row += 1 + len(tokens)
        return torch.from_numpy(bits_rW).to(self._device)

    def _fill_rows(self, matcher: LLMatcher, bits_jW: NDArray[np.int32], drafts: Sequence[int]) -> None:
        # Not the library's LLExecutor: its threads can wait for the interpreter lock that its caller holds.
        num_consumed = 0
        for bits_W, draft in zip(bits_jW, (*drafts, None), strict=True):
            matcher.unsafe_compute_mask_ptr(bits_W.ctypes.data, bits_W.nbytes)
            if draft is None or draft in self._eos_token_ids or matcher.is_error():
                break
            if not bits_W[draft // 32] >> (draft % 32) & 1 or not matcher.consume_token(draft):
                break
            num_consumed += 1
        if num_consumed:
            matcher.rollback(num_consumed)


class GrammarSource:
    """Matchers for the requests of a worker, compiled in the background from the moment that a grammar is announced."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._pending: dict[str, Future[LLMatcher]] = {}
        self._threads.submit(compiler.warm_up)

    def prepare(self, grammar: str) -> None:
        """Begin to compile; returns at once. Only a hint: nothing is said of a grammar that turns out to be wrong."""
        if grammar in self._pending or len(self._pending) >= _MAX_PENDING or self._compiler.is_cached(grammar):
            return
        future = self._threads.submit(self._compiler.compile, grammar)
        self._pending[grammar] = future
        future.add_done_callback(lambda _: self._pending.pop(grammar, None))

    def take(self, grammar: str) -> LLMatcher | str:
        """A matcher at the start of ``grammar``, or why there is none; waits only for what is not compiled yet."""
        future = self._pending.get(grammar)
        if future is not None and not future.cancel():
            future.exception()  # being compiled just now; the outcome is in the cache
        try:
            return self._compiler.compile(grammar)
        except TwinferError as error:
            return str(error)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
