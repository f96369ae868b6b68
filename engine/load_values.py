"""What a load is asked to be and to keep: rates and limits as ``bench serve`` and ``simulate`` both write them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.core.errors import ConfigError
from engine.core.metrics import Slo


def parse_rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (1e-6 <= rate <= 1e6 or rate == math.inf):
        raise ConfigError(f"--request-rate is {text[:40]!r}; needed: requests/s from 1e-6 to 1e6, or inf")
    return rate


def parse_slo(limits: Sequence[str]) -> Slo | None:
    """``ttft:500`` and the like, in milliseconds."""
    fields = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s_max", "e2e": "e2e_s", "e2el": "e2e_s"}
    found: dict[str, float] = {}
    for limit in (part for text in limits for part in text.split(",") if part):
        name, _, value = limit.partition(":")
        try:
            limit_s = float(value) / 1e3
        except ValueError:
            limit_s = math.nan
        if name not in fields or not 0 < limit_s < 1e7:
            raise ConfigError(f"--goodput is {limit[:40]!r}; needed: ttft, tpot, itl or e2e, a colon and milliseconds above 0")
        found[fields[name]] = limit_s
    return Slo(**found) if found else None


def parse_strict_share(text: str | None, slo: Slo | None) -> float | None:
    if text is None:
        return None
    if slo is None:
        raise ConfigError("--strict-slo needs limits: --goodput ttft:500 tpot:30")
    try:
        percent = float(text)
    except ValueError:
        percent = math.nan
    if not 0 <= percent <= 100:
        raise ConfigError(f"--strict-slo is {text[:40]!r}; needed: percent from 0 to 100")
    return percent / 100
