"""The steady line of the log: what the engine did since the last one. Silent while it is idle.

Every number is of the same reading that /metrics renders; rates are differences of its counters over the interval.
"""

from __future__ import annotations

import logging
from typing import NoReturn

import msgspec
import trio

from engine.api.metrics import Counters, ServerMetrics
from engine.api.metrics_families import kv_used_share, prefix_query_tokens
from engine.core.metrics import DraftCounts

DEFAULT_INTERVAL_S = 10.0
# So many prompt tokens without a single hit are worth a word; fewer are a server that has just started.
_HINT_TOKENS = 10_000

_log = logging.getLogger("twinfer.stats")


class StatsLine(msgspec.Struct, frozen=True):
    """One line. Shares are 0 to 1; ``prefix_hit_share`` is None where no prompt was admitted in the interval."""

    num_running: int
    num_waiting: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    kv_used_share: float
    prefix_hit_share: float | None
    num_preemptions: int
    drafts: DraftCounts
    drift_ratio: float | None = None  # measured / predicted seconds of steps; None without a cost model, and before the first 32 steps

    def __str__(self) -> str:
        hits = "-" if self.prefix_hit_share is None else f"{self.prefix_hit_share:.0%}"
        parts = [
            f"running {self.num_running}",
            f"waiting {self.num_waiting}",
            f"prompt {self.prompt_tokens_per_s:.1f} tok/s",
            f"gen {self.generation_tokens_per_s:.1f} tok/s",
            f"KV used {self.kv_used_share:.1%}",
            f"prefix hits {hits}",
            f"preemptions {self.num_preemptions}",
        ]
        if length := self.drafts.acceptance_length:
            rates = "/".join(f"{rate:.0%}" for rate in self.drafts.acceptance_by_position)
            parts.append(f"{length:.2f} tokens a verification, drafts accepted {rates} by position")
        if self.drift_ratio is not None:
            parts.append(f"steps {self.drift_ratio:.2f} x predicted")
        return ", ".join(parts)


class StatsLog:
    """Remembers the counters of the last line. Prompt tokens of the rate are computed ones: cached ones cost nothing."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last = Counters()
        self._last_preemptions = 0
        self._last_drafts = DraftCounts()
        self._hinted = False

    def take(self, interval_s: float) -> StatsLine | None:
        """The line for the ``interval_s`` since the last call; None where there is nothing to tell."""
        reading = self._metrics.read()
        if reading.stats is None:
            return None
        now, last = msgspec.structs.replace(reading.metrics.counters), self._last
        preemptions = sum(reading.metrics.preemptions.values())
        queries = now.prompt_tokens - last.prompt_tokens if prefix_query_tokens(reading) else 0
        line = StatsLine(
            num_running=reading.stats.core.num_running,
            num_waiting=reading.stats.core.num_waiting,
            prompt_tokens_per_s=(now.prefill_tokens - last.prefill_tokens) / interval_s,
            generation_tokens_per_s=(now.generation_tokens - last.generation_tokens) / interval_s,
            kv_used_share=kv_used_share(reading),
            prefix_hit_share=(now.prefix_hit_tokens - last.prefix_hit_tokens) / queries if queries else None,
            num_preemptions=preemptions - self._last_preemptions,
            drafts=reading.metrics.drafts.since(self._last_drafts),
            drift_ratio=reading.shadow.drift_ratio if reading.shadow is not None else None,
        )
        idle = now == last and not (line.num_running or line.num_waiting)
        self._last, self._last_preemptions, self._last_drafts = now, preemptions, reading.metrics.drafts.copy()
        return None if idle else line

    def hint(self) -> str | None:
        """Once, where prompts never hit the prefix cache: what the reason may be."""
        reading = self._metrics.read()
        queries = prefix_query_tokens(reading)
        if self._hinted or reading.info is None or queries < _HINT_TOKENS or reading.metrics.counters.prefix_hit_tokens:
            return None
        self._hinted = True
        return (
            f"none of {queries} prompt tokens were found in the prefix cache: prompts share nothing, or less than one block of "
            f"{reading.info.block_size} tokens (--block-size)"
        )


async def log_stats(metrics: ServerMetrics, interval_s: float = DEFAULT_INTERVAL_S) -> NoReturn:
    """Log a line every ``interval_s``; the record's ``fields`` holds its numbers for a log in JSON."""
    stats = StatsLog(metrics)
    last_s = trio.current_time()
    while True:
        await trio.sleep_until(last_s + interval_s)
        now_s = trio.current_time()
        line = stats.take(now_s - last_s)
        last_s = now_s
        if line is not None:
            _log.info("%s", line, extra={"fields": msgspec.to_builtins(line)})
            if (hint := stats.hint()) is not None:
                _log.info("%s", hint)
