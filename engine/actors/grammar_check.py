"""Grammars at the door: each is compiled, in a thread and with a deadline, before its request is admitted.

The workers are told of it first and compile it too, so that the first step of the request finds it ready.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import trio

from engine.core.errors import CapacityError, RequestError
from engine.core.sampling import SamplingParams
from engine.grammar import check_length
from engine.grammar_compiler import GrammarCompiler
from engine.tokenizer import Tokenizer

DEADLINE_S = 2.0
# A thread cannot be stopped: one that is given up goes on until the compiler's own limits end it, and costs a core until then.
MAX_THREADS = 2
_PARAM = "response_format"


class GrammarCheck:
    """One per gateway; all of it belongs to trio's thread. The counts are for the metrics."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        vocab_size: Callable[[], int],
        prepare: Callable[[str], None],
    ) -> None:
        """``vocab_size`` is the model's, asked for once the workers are up; ``prepare`` tells them of a grammar."""
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._prepare = prepare
        self._threads = trio.CapacityLimiter(MAX_THREADS)
        self._compiler: GrammarCompiler | None = None
        self.num_compilations = 0
        self.compile_s = 0.0  # of all of them together
        self.num_failures = 0  # of them, grammars that cannot be used
        self.num_timeouts = 0  # of them, given up at the deadline

    async def check(self, params: SamplingParams) -> None:
        """Return if ``params.grammar`` can be enforced. Raises RequestError where it cannot, CapacityError where no thread is free."""
        grammar = params.grammar
        if grammar is None:
            return
        compiler = self._usable(params)
        check_length(grammar)
        self._prepare(grammar)
        if compiler.is_cached(grammar):
            compiler.compile(grammar)
            return
        await self._compile(compiler, grammar)

    async def warm_up(self) -> None:
        """Read the tokenizer's tokens now, where the first request with a grammar would otherwise. For servers, before they are ready."""
        if self._tokenizer is not None and self._eos_token_ids:
            await trio.to_thread.run_sync(self._get_compiler(self._tokenizer).warm_up, limiter=self._threads)

    def _usable(self, params: SamplingParams) -> GrammarCompiler:
        """Refuse what could leave a request without any token to choose."""
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer, and the model has none", param=_PARAM)
        if not self._eos_token_ids:
            raise RequestError("structured output needs an end-of-text token, and the model has none", param=_PARAM)
        if params.ignore_eos:
            raise RequestError(
                "ignore_eos cannot be combined with structured output, which ends where its grammar does", param="ignore_eos"
            )
        if params.min_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; allowed with structured output: 0, as it ends where its grammar does",
                param="min_tokens",
            )
        return self._get_compiler(self._tokenizer)

    def _get_compiler(self, tokenizer: Tokenizer) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(lambda: tokenizer, self._vocab_size(), self._eos_token_ids)
        return self._compiler

    async def _compile(self, compiler: GrammarCompiler, grammar: str) -> None:
        begun = False

        def run() -> float:
            nonlocal begun
            begun = True
            begin_s = time.perf_counter()
            with contextlib.suppress(RequestError):  # the outcome stays in the cache, whatever it is
                compiler.compile(grammar)
            return time.perf_counter() - begin_s

        with trio.move_on_after(DEADLINE_S) as deadline:
            self.compile_s += await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._threads)
        if deadline.cancelled_caught and not begun:
            raise CapacityError("other grammars are being compiled; try again", retry_after_s=1.0)
        self.num_compilations += 1
        if deadline.cancelled_caught:
            self.num_timeouts += 1
            self.compile_s += DEADLINE_S
            raise RequestError(f"the grammar took more than {DEADLINE_S:g} s to compile; use a simpler one", param=_PARAM)
        try:
            compiler.compile(grammar)
        except RequestError:
            self.num_failures += 1
            raise
