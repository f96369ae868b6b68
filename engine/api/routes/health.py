"""Is the server well, and what is it: /health and its parts, /version, /server_info."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.api.call import Call
from engine.api.context import ApiContext
from engine.version import VERSION


class HealthReport(msgspec.Struct, frozen=True):
    """``actors``: seconds since each gave a sign of life."""

    ok: bool
    state: str
    message: str
    actors: dict[str, float]
    drift: str = ""  # steps lastingly take another time than predicted: no reason to take no requests


def report(context: ApiContext) -> HealthReport:
    """Well is an engine that takes requests and whose every actor was heard of within ``health_timeout_s``."""
    health = context.engine.health
    ages_s = {name: round(age_s, 3) for name, age_s in context.engine.heartbeat_ages_s().items()}
    limit_s = context.config.health_timeout_s
    silent = [f"{name} has given no sign of life for {age_s:.1f} s" for name, age_s in ages_s.items() if age_s > limit_s]
    message = health.message or "; ".join(silent)
    shadow = context.engine.shadow
    return HealthReport(health.ok and not silent, health.state, message, ages_s, shadow.state().text if shadow is not None else "")


async def health(context: ApiContext, call: Call) -> None:
    found = report(context)
    await call.send_json(found, status=200 if found.ok else 503)


async def live(_: ApiContext, call: Call) -> None:
    """The process answers; whether it can serve is what ``ready`` says."""
    await call.send_json({"ok": True})


async def version(_: ApiContext, call: Call) -> None:
    await call.send_json({"version": VERSION})


async def server_info(context: ApiContext, call: Call) -> None:
    """The facts of the start-up summary and the numbers of this moment."""
    stats = context.engine.stats()
    value: dict[str, Any] = msgspec.to_builtins(context.info)
    value["full_length_requests"] = context.info.full_length_requests
    value["stats"] = msgspec.to_builtins(stats)
    if context.engine.shadow is not None:
        state = context.engine.shadow.state()
        value["predictions"] = {**msgspec.to_builtins(state), "coverage": state.coverage}
    if context.info.draft_tokens:
        value["drafts"] = context.metrics.drafts.summary()
    await call.send_json(value)
