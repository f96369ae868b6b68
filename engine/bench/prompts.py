"""Prompts of a wanted number of tokens, without a tokenizer of the client's own.

"tokenize"  words that the server's /tokenize says are one token each: a prompt of n words is n tokens (a chat template's come on top).
"ids"       token ids, for /v1/completions only: exact by construction.
"words"     plain words; how many tokens they were is read from the answers' ``usage.prompt_tokens``.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Literal

from engine.bench.endpoints import Prompt
from engine.bench.workload import Part, Work

Source = Literal["tokenize", "ids", "words"]

# Frequent words, one token in nearly every vocabulary.
_WORDS_TEXT = """
    the of and to in that he was it his is with for as had you not be her on at by which have or from this him but all she they were my
    are me one their so an said them we who would been will no when there if more out up into do any your what has man could other than our
    some very time upon about may its only now like little then can should made did us such great before must two these see know over much
    down after first good men own never most old shall day where those came come himself way work life without go make well through being
    long say might how am too under again people many house another day here while each off hand part place world still away take thing eyes
    back left night saw head give name king lord son land water god earth city heart word father
"""
WORDS = tuple(dict.fromkeys(_WORDS_TEXT.split()))
# Every vocabulary has these, and none of the usual ones has its special tokens there.
TOKEN_IDS = range(100, 500)
MIN_SINGLE_WORDS = 16


class PromptMaker:
    """``words`` are drawn from; every draw is a function of the seed and the part's key."""

    def __init__(self, source: Source, seed: int, words: tuple[str, ...] = WORDS) -> None:
        self.source = source
        self._seed = seed
        self._words = words

    def make(self, work: Work) -> Prompt:
        if work.messages is not None:
            return work.messages
        if work.prompt is not None:
            return work.prompt
        if self.source == "ids":
            return [token for part in work.parts for token in self._generator(part).choices(TOKEN_IDS, k=part[1])]
        return " ".join(word for part in work.parts for word in self._generator(part).choices(self._words, k=part[1]))

    def _generator(self, part: Part) -> random.Random:
        return random.Random(f"{self._seed}:{part[0]}")


async def single_token_words(count_tokens: Callable[[str], Awaitable[int]]) -> tuple[str, ...]:
    """The words that are one token where they follow another word; ``count_tokens`` asks the server."""
    if await count_tokens(" ".join(WORDS)) == len(WORDS):
        return WORDS
    alone = await count_tokens(WORDS[0])
    return tuple([word for word in WORDS if await count_tokens(f"{WORDS[0]} {word}") == alone + 1])
