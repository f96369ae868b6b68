"""Our own recorded traffic: arrivals and lengths from an event log, as the engine and the simulator write it (engine.core.events).

Taken are requests that were accepted and have ended. The tokens that were found in the cache at admission are taken to be one common
beginning. A client that left, leaves as long after its arrival; how long its answer would have been is not known, and is taken to be what
it got.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Union

import msgspec

from engine.core.errors import ConfigError
from engine.core.events import Admitted, Arrived, Finished
from engine.core.plan import RequestId
from engine.core.trace_rows import Line, count_tokens
from twin.workload.recording import Recording


class _Tag(msgspec.Struct):
    type: str


class _Ended(msgspec.Struct, frozen=True):
    arrived: Arrived
    finished: Finished
    cached_tokens: int


_tag_decoder = msgspec.json.Decoder(_Tag)
_event_decoder = msgspec.json.Decoder(Union[Arrived, Admitted, Finished])
_MAX_LOG_S = 1e12


def read_event_log(path: str, lines: Iterator[Line], limit: int) -> Recording:
    """The first ``limit`` to arrive of those that ended. Raises ConfigError for a line that is no event, and where no request ended."""
    waiting: dict[RequestId, Arrived] = {}
    cached: dict[RequestId, int] = {}
    ended: list[_Ended] = []
    for number, line in lines:
        match _event(f"{path}, line {number}", line):
            case Arrived() as event:
                waiting[event.request] = event
            case Admitted(request=request, num_cached_tokens=tokens, origin=origin) if origin != "fork":
                cached[request] = tokens
            case Finished() as event if event.request in waiting:
                ended.append(_Ended(waiting.pop(event.request), event, cached.pop(event.request, 0)))
    if not ended:
        raise ConfigError(f"{path}: no request in it has arrived and ended")
    ended.sort(key=lambda request: request.arrived.now_s)
    return _ended_requests(ended[:limit])


def _event(where: str, line: str) -> Arrived | Admitted | Finished | None:
    """None for what says nothing of arrivals and lengths."""
    try:
        if _tag_decoder.decode(line).type not in ("arrived", "admitted", "finished"):
            return None
        event = _event_decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: no event ({error})") from None
    if not -_MAX_LOG_S < event.now_s < _MAX_LOG_S:
        raise ConfigError(f"{where}: now_s is {event.now_s:g}; needed: seconds within 1e12")
    count_tokens(where, "num_prompt_tokens", event.num_prompt_tokens)
    if isinstance(event, Finished):
        count_tokens(where, "num_output_tokens", event.num_output_tokens)
    if isinstance(event, Admitted):
        count_tokens(where, "num_cached_tokens", event.num_cached_tokens)
    return event


def _ended_requests(ended: list[_Ended]) -> Recording:
    """Samples of one request have its prompt."""
    recording = Recording()
    texts: dict[RequestId, int] = {}
    start_s = ended[0].arrived.now_s
    for one in ended:
        arrived, finished = one.arrived, one.finished
        first_sample = arrived.request if arrived.parent is None else arrived.parent
        recording.add(
            arrived.now_s - start_s,
            max(1, arrived.num_prompt_tokens),
            max(1, finished.num_output_tokens),
            shared_tokens=min(one.cached_tokens, arrived.num_prompt_tokens),
            text=texts.setdefault(first_sample, len(recording)),
            cancel_after_s=max(0.0, finished.now_s - arrived.now_s) if finished.reason == "abort" else math.inf,
        )
    return recording
