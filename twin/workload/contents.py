"""What the requests of a workload are, each made when it is asked for: by the number of its session and its turn alone.

A session is a client's conversation: each turn's prompt is the one before, its answer, and what the user adds, so that the prefix cache
finds what a real one would. A request without further turns is a session of one.
"""

from __future__ import annotations

import math
from array import array
from typing import Protocol

import msgspec

from engine.core.errors import ConfigError
from engine.core.trace_rows import TRACE_BLOCK_TOKENS
from twin.workload.draws import Draws, TokenIds
from twin.workload.lengths import LengthPairs, Lengths
from twin.workload.recording import Recording
from twin.workload.types import SimRequest


class Contents(Protocol):
    """Sessions are numbered from 0. The same number is the same content, whenever it is asked for."""

    num_sessions: int
    num_requests: int  # all turns

    def first(self, session: int, arrival_s: float) -> SimRequest: ...

    def next_turn(self, request: SimRequest, arrival_s: float) -> SimRequest | None:
        """What the client of ``request`` sends next in the same session; None after the last turn."""
        ...


class Context(msgspec.Struct, frozen=True):
    """The longest sequence, prompt and answer together; ``clip``: longer ones are cut (the prompt's end first), else refused."""

    max_tokens: int | None = None
    clip: bool = False

    def fit(self, where: str, prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
        """Prompt and answer as they may be. Raises ConfigError for what is too long and not to be cut; ``where`` names the request."""
        if self.max_tokens is None or prompt_tokens + output_tokens <= self.max_tokens:
            return prompt_tokens, output_tokens
        if not self.clip:
            raise ConfigError(
                f"{where}: {prompt_tokens} prompt tokens and {output_tokens} of the answer; a sequence has at most {self.max_tokens}. "
                "Shorten it, or cut all that are too long with --over-context clip"
            )
        output_tokens = min(output_tokens, self.max_tokens - 1)
        return min(prompt_tokens, self.max_tokens - output_tokens), output_tokens


class Leaving(msgspec.Struct, frozen=True):
    """Clients who leave before their answer is whole: a share of all, after a time of this mean. Who leaves does not come back, so in a
    session it is the last turn that is left."""

    share: float = 0.0
    mean_s: float = 0.0
    uniform: bool = False  # from 0 to twice the mean instead of exponential

    def after_s(self, choice: float, delay: float) -> float | None:
        """Both arguments are uniform in (0, 1)."""
        return delay_s(self.mean_s, self.uniform, delay) if choice < self.share else None


def delay_s(mean_s: float, is_uniform: bool, uniform: float) -> float:
    """A time with this mean: uniform from 0 to twice the mean, or exponential."""
    return 2 * mean_s * uniform if is_uniform else -mean_s * math.log(uniform)


_NO_CONTEXT, _NOBODY_LEAVES = Context(), Leaving()


class Drawn:
    """Lengths from distributions, texts of their own behind a shared beginning.

    ``prefix_share`` of the sessions begin with one of ``num_prefixes`` system prompts of ``prefix_tokens``, which come on top of the drawn
    length. ``turn_tokens`` is what a user adds from the second turn on. ``max_tokens`` is what clients ask for at most, which cuts longer
    answers; None asks for each answer's own length, as load generators do.
    """

    def __init__(
        self,
        seed: int,
        num_requests: int,
        lengths: LengthPairs,
        token_ids: TokenIds,
        *,
        turns: int = 1,
        turn_tokens: Lengths | None = None,
        prefix_tokens: int = 0,
        prefix_share: float = 1.0,
        num_prefixes: int = 1,
        max_tokens: int | None = None,
        context: Context = _NO_CONTEXT,
        leaving: Leaving = _NOBODY_LEAVES,
    ) -> None:
        self.num_requests = num_requests
        self.num_sessions = -(-num_requests // turns)
        self._lengths, self._token_ids = lengths, token_ids
        self._turns, self._turn_tokens = turns, turn_tokens
        self._prefix_tokens, self._prefix_share, self._num_prefixes = prefix_tokens, prefix_share, num_prefixes
        self._max_tokens, self._context, self._leaving = max_tokens, context, leaving
        self._streams = {name: Draws(seed, name) for name in ("input", "output", "text", "prefix", "has-prefix", "leave", "leave-after")}
        self._prefixes: dict[int, array[int]] = {}
        self._check_lengths()

    def first(self, session: int, arrival_s: float) -> SimRequest:
        return self._request(session * self._turns, self._prefix(session), arrival_s)

    def next_turn(self, request: SimRequest, arrival_s: float) -> SimRequest | None:
        index = request.index + 1
        if index % self._turns == 0 or index >= self.num_requests:
            return None
        answer = array("i", [request.output_token]) * request.output_tokens
        return self._request(index, request.prompt + answer, arrival_s)

    def _request(self, index: int, before: array[int], arrival_s: float) -> SimRequest:
        new_tokens, output_tokens = self._drawn(index)
        prompt_tokens, output_tokens = self._context.fit(f"request {index}", len(before) + new_tokens, output_tokens)
        text = self._token_ids.text(self._streams["text"].key(index), max(0, prompt_tokens - len(before)))
        return SimRequest(
            index=index,
            arrival_s=arrival_s,
            prompt=(before + text)[:prompt_tokens],
            output_tokens=output_tokens,
            max_tokens=output_tokens if self._max_tokens is None else self._max_tokens,
            output_token=self._token_ids.one(self._streams["text"].key(index)),
            cancel_after_s=self._cancel_after_s(index),
        )

    def _drawn(self, index: int) -> tuple[int, int]:
        """What the user adds, and the answer."""
        inputs, outputs = self._streams["input"].uniform(index), self._streams["output"].uniform(index)
        new_tokens, output_tokens = self._lengths.draw(inputs, outputs)
        if self._turn_tokens is not None and index % self._turns:
            new_tokens = self._turn_tokens.draw(inputs)
        return new_tokens, output_tokens if self._max_tokens is None else min(output_tokens, self._max_tokens)

    def _prefix(self, session: int) -> array[int]:
        if not self._has_prefix(session):
            return array("i")
        number = int(self._streams["prefix"].uniform(session) * self._num_prefixes)
        if number not in self._prefixes:
            self._prefixes[number] = self._token_ids.text(self._streams["prefix"].key(-2 - number), self._prefix_tokens)
        return self._prefixes[number]

    def _has_prefix(self, session: int) -> bool:
        return self._prefix_tokens > 0 and self._streams["has-prefix"].uniform(session) < self._prefix_share

    def _cancel_after_s(self, index: int) -> float | None:
        is_last = (index + 1) % self._turns == 0 or index + 1 == self.num_requests
        if not is_last or not self._leaving.share:
            return None
        return self._leaving.after_s(self._streams["leave"].uniform(index), self._streams["leave-after"].uniform(index))

    def _check_lengths(self) -> None:
        """Refuse what is too long now and not in the middle of a run: by the distributions' ends where these do, else one by one."""
        limit = self._context.max_tokens
        added = max(self._lengths.max_input_tokens, self._turn_tokens.max_tokens if self._turn_tokens is not None else 0)
        longest = self._prefix_tokens + self._turns * (added + self._lengths.max_output_tokens)
        if limit is None or self._context.clip or longest <= limit:
            return
        for session in range(self.num_sessions):
            total = self._prefix_tokens if self._has_prefix(session) else 0
            for index in range(session * self._turns, min((session + 1) * self._turns, self.num_requests)):
                new_tokens, output_tokens = self._drawn(index)
                self._context.fit(f"request {index}", total + new_tokens, output_tokens)
                total += new_tokens + output_tokens


class Recorded:
    """Requests as they were recorded; equal blocks of a trace are equal tokens. Every request is a session of one turn."""

    def __init__(
        self,
        seed: int,
        recording: Recording,
        token_ids: TokenIds,
        *,
        max_tokens: int | None = None,
        context: Context = _NO_CONTEXT,
        leaving: Leaving = _NOBODY_LEAVES,
    ) -> None:
        self.num_sessions = self.num_requests = len(recording)
        self._recording, self._token_ids = recording, token_ids
        self._max_tokens, self._context, self._leaving = max_tokens, context, leaving
        self._streams = {name: Draws(seed, name) for name in ("text", "block", "shared", "leave", "leave-after")}
        if context.max_tokens is not None and not context.clip:
            for index in range(len(recording)):
                self._lengths(index)

    def first(self, session: int, arrival_s: float) -> SimRequest:
        prompt_tokens, output_tokens = self._lengths(session)
        text_key = self._streams["text"].key(self._recording.texts[session])
        return SimRequest(
            index=session,
            arrival_s=arrival_s,
            prompt=self._prompt(session, text_key, prompt_tokens),
            output_tokens=output_tokens,
            max_tokens=output_tokens if self._max_tokens is None else self._max_tokens,
            output_token=self._token_ids.one(text_key),
            cancel_after_s=self._cancel_after_s(session),
        )

    def next_turn(self, request: SimRequest, arrival_s: float) -> SimRequest | None:
        """None: what belongs together is not recorded."""
        del request, arrival_s
        return None

    def _lengths(self, index: int) -> tuple[int, int]:
        output_tokens = self._recording.output_tokens[index]
        if self._max_tokens is not None:
            output_tokens = min(output_tokens, self._max_tokens)
        return self._context.fit(f"request {index + 1} of the file", self._recording.input_tokens[index], output_tokens)

    def _prompt(self, index: int, text_key: int, prompt_tokens: int) -> array[int]:
        prompt = array("i")
        append = self._token_ids.append
        append(prompt, self._streams["shared"].key(0), min(self._recording.shared_tokens[index], prompt_tokens))
        block_key = self._streams["block"].key
        for block in self._recording.blocks(index):
            append(prompt, block_key(block), min(TRACE_BLOCK_TOKENS, prompt_tokens - len(prompt)))
        append(prompt, text_key, prompt_tokens - len(prompt))
        return prompt

    def _cancel_after_s(self, index: int) -> float | None:
        recorded_s = self._recording.cancel_after_s[index]
        if recorded_s < math.inf or not self._leaving.share:
            return recorded_s if recorded_s < math.inf else None
        return self._leaving.after_s(self._streams["leave"].uniform(index), self._streams["leave-after"].uniform(index))
