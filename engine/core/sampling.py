"""Sampling parameters: what a request asks of the sampler, with a bound on every number."""

from __future__ import annotations

import math

import msgspec

from engine.core.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_SEED = 2**63 - 1
MIN_REPETITION_PENALTY = 1e-6  # logits are divided by it and must stay finite
MAX_TOKENS_LIMIT = 1 << 24


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of one request are chosen.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch the filter off. ``logprobs`` None returns none, 0 the
    chosen token's only, n the n most likely ones too; they are taken from the model's distribution before temperature and
    filters. ``seed`` None lets the engine draw one when the request is admitted.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None  # an llguidance grammar of the whole output; see engine.grammar

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range, its value, and the range."""
        _int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _int("top_k", self.top_k, 0, 1 << 31)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            _refuse("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")
        for token, bias in self.logit_bias:
            _int("logit_bias", token, 0, vocab_size - 1)
            _real("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token in self.stop_token_ids:
            _int("stop_token_ids", token, 0, vocab_size - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _refuse(name: str, value: object, allowed: str) -> None:
    raise RequestError(f"{name} is {value}; allowed: {allowed}", param=name)


def _int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(name, value, f"an integer from {low} to {high}")


def _real(name: str, value: float, low: float, high: float, *, exclusive_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        _refuse(name, value, "a finite number")
    if value > high or value < low or (exclusive_low and value == low):
        _refuse(name, value, f"{'more than ' if exclusive_low else 'from '}{low} to {high}")
