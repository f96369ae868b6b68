"""Log-probabilities as OpenAI writes them, in the two forms that its routes have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from engine.core.plan import TokenLogprobs
from engine.tokenizer import Tokenizer

# JSON has no infinity: what OpenAI writes for "next to impossible".
LEAST_LOGPROB = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of one length. ``text_offset``: characters of the choice's text before the token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # NaN too


class TokenNames:
    """Tokens as text and bytes. Without a tokenizer a token is named by its id, and has no bytes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def bytes(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def chat_entries(names: TokenNames, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprob]:
    """One entry a token; ``num_top`` alternatives each."""
    return [
        TokenLogprob(
            names.text(token),
            finite(values.chosen),
            names.bytes(token),
            [TopLogprob(names.text(top), finite(value), names.bytes(top)) for top, value in _top(values, num_top)],
        )
        for token, values in zip(tokens, logprobs, strict=False)
    ]


class CompletionOffsets:
    """The completions' form for one choice, whose tokens are brought in order."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], *, skip_special_tokens: bool, first_offset: int) -> None:
        self._names = TokenNames(tokenizer)
        self._decoder = None if tokenizer is None else tokenizer.decoder(prompt, skip_special_tokens=skip_special_tokens)
        self._num_chars = first_offset

    def entries(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [], [])
        for token, values in zip(tokens, logprobs, strict=False):
            name = self._names.text(token)
            # The likeliest first; of two tokens with one text, the likelier. The chosen one is always there.
            top: dict[str, float] = {}
            for other, value in _top(values, num_top):
                top.setdefault(self._names.text(other), finite(value))
            top.setdefault(name, finite(values.chosen))
            result.tokens.append(name)
            result.token_logprobs.append(finite(values.chosen))
            result.top_logprobs.append(top)
            result.text_offset.append(self._num_chars)
            if self._decoder is not None:
                self._num_chars += len(self._decoder.push(token))
        return result


def join(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    result = CompletionLogprobs([], [], [], [])
    for part in parts:
        result.tokens.extend(part.tokens)
        result.token_logprobs.extend(part.token_logprobs)
        result.top_logprobs.extend(part.top_logprobs)
        result.text_offset.extend(part.text_offset)
    return result


def _top(values: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    return zip(values.top_ids[:num_top], values.top_logprobs[:num_top], strict=True)
