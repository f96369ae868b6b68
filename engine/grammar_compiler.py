"""From a grammar's text to a matcher over the model's tokens: compiled under limits, once, and copied for each use. Torch-free."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.core.errors import RequestError
from engine.grammar import check_length
from engine.tokenizer import Tokenizer

# The library's defaults with less fuel to begin with: with all of it a regular expression of a million repeats, (a{1000}){1000}, takes
# more than a second for each mask and then comes to a dead end; so it takes 50 ms and is refused. At up to 2 kB a state a matcher takes
# 100 MB at worst. Verbose errors would put the grammar into the log.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
MAX_CACHED_GRAMMARS = 128
MAX_CACHED_CHARS = 8 << 20
_MAX_ERROR_CHARS = 300
_MAX_PIECE_BYTES = 64


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
        # What no text satisfies (a schema that refers to nothing but itself), and what is too much for the limits once it is at work, is
        # only found out by taking a first step. The mask is kept in the matcher, for the copies too.
        first = _first_allowed(matcher.compute_bitmask())
        if matcher.is_error() or first is None:
            return f"the grammar cannot be used: no text satisfies it ({_brief(matcher.get_error())})"
        trial = matcher.deep_copy()
        if not trial.consume_token(first):
            return f"the grammar cannot be used: {_brief(trial.get_error())}"
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
    """What the library asks of a tokenizer. Calling it spells a text that the grammar leaves no choice about."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        self._token_of_piece: dict[bytes, int] = {}
        self.special_token_ids = sorted(token for token in {*tokenizer.control_ids, *eos_token_ids} if token < vocab_size)

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of ``text``, as the tokenizer would have them inside of a text."""
        wanted = text.encode()
        for before in ("", "\0"):  # some tokenizers put a blank before a text
            tokens = self._tokenizer.encode(before + text, add_special_tokens=False)
            for begin in range(min(len(tokens), 4)):
                if b"".join(self.tokens[token] for token in tokens[begin:]) == wanted:
                    return tokens[begin:]
        return self._longest_pieces(wanted)

    def _longest_pieces(self, data: bytes) -> list[int]:
        if not self._token_of_piece:
            special = set(self.special_token_ids)
            self._token_of_piece.update((piece, token) for token, piece in enumerate(self.tokens) if token not in special)
        tokens: list[int] = []
        begin = 0
        while begin < len(data):
            end = next(
                (end for end in range(min(len(data), begin + _MAX_PIECE_BYTES), begin, -1) if data[begin:end] in self._token_of_piece), None
            )
            if end is None:
                return tokens  # a byte that no token spells: the library goes on by itself
            tokens.append(self._token_of_piece[data[begin:end]])
            begin = end
        return tokens


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


def _first_allowed(mask: bytes) -> int | None:
    for index, byte in enumerate(mask):
        if byte:
            return index * 8 + (byte & -byte).bit_length() - 1
    return None


def _brief(error: str) -> str:
    """The library's complaint in one line, and bounded: it may quote the grammar."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:_MAX_ERROR_CHARS] or "nothing is allowed"
