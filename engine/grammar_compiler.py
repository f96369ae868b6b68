"""From a grammar's text to a matcher over the model's tokens: compiled under limits, once, and copied for each use. Torch-free."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.core.errors import RequestError
from engine.grammar import check_length
from engine.tokenizer import Tokenizer

# The library's own defaults, but for the states: at up to 2 kB each a matcher takes 100 MB at worst. Compiling takes under a second,
# one mask a few milliseconds. Verbose errors would put the grammar into the log.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
MAX_CACHED_GRAMMARS = 128
MAX_CACHED_CHARS = 8 << 20
_MAX_ERROR_CHARS = 300


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe; compiling lets other threads run.

    ``vocab_size`` is the model's, which may exceed the tokenizer's: tokens beyond it are never allowed.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_cached: int = MAX_CACHED_GRAMMARS,
    ) -> None:
        """Cheap: the tokenizer is made and its tokens are read when the first grammar comes, or in ``warm_up``."""
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_cached = max_cached
        self._tokens: LLTokenizer | None = None
        self._tokens_lock = threading.Lock()
        self._cache_lock = threading.Lock()
        # A matcher at its start, or why there is none; the most recently used last.
        self._cache: OrderedDict[str, LLMatcher | str] = OrderedDict()
        self._cached_chars = 0

    def warm_up(self) -> None:
        """Build what all grammars share: some tenths of a second for a large vocabulary, in which no other thread of Python runs."""
        self._tokenizer()

    def is_cached(self, grammar: str) -> bool:
        """Whether ``compile`` would answer at once."""
        return grammar in self._cache

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of ``grammar``, the caller's own. Raises RequestError where the grammar cannot be used."""
        with self._cache_lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
        if found is None:
            found = self._build(grammar)
            self._keep(grammar, found)
        if isinstance(found, str):
            raise RequestError(found, param="response_format")
        return found.deep_copy()

    def _build(self, grammar: str) -> LLMatcher | str:
        try:
            check_length(grammar)
        except RequestError as error:
            return str(error)
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            return f"the grammar cannot be used: {_brief(matcher.get_error())}"
        # A grammar that no text satisfies (a schema that refers to nothing but itself) is only found out by asking for a first token.
        # The answer is kept in the matcher, for the copies too.
        first = matcher.compute_bitmask()
        if matcher.is_error():
            return f"the grammar cannot be used: no text satisfies it ({_brief(matcher.get_error())})"
        if not any(first):
            return "the grammar cannot be used: no text satisfies it"
        return matcher

    def _keep(self, grammar: str, found: LLMatcher | str) -> None:
        with self._cache_lock:
            if self._cache.pop(grammar, None) is None:
                self._cached_chars += len(grammar)
            self._cache[grammar] = found
            while len(self._cache) > self._max_cached or self._cached_chars > MAX_CACHED_CHARS:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_chars -= len(oldest)

    def _tokenizer(self) -> LLTokenizer:
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = _read_tokens(self._make_tokenizer(), self._vocab_size, self._eos_token_ids)
            return self._tokens


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self._encode = tokenizer.encode
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = sorted(token for token in {*tokenizer.control_ids, *eos_token_ids} if token < vocab_size)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _read_tokens(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    if not eos_token_ids:
        raise RequestError("structured output needs a model with an end-of-text token, and this one has none", param="response_format")
    if not tokenizer.spells_bytes:
        raise RequestError(
            "structured output is not available: this model's tokenizer does not say which bytes a token stands for",
            param="response_format",
        )
    vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids))
    return LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _brief(error: str) -> str:
    """The library's complaint without the position marks under it, and bounded: it may quote the grammar."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return (lines[0] if lines else "unknown error")[:_MAX_ERROR_CHARS]
