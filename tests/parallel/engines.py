"""Engines from the options a user would give, for the tests of replicas."""

from __future__ import annotations

from typing import Any

from engine.actors.config import EngineConfig
from engine.config import ENGINE_OPTIONS
from engine.launch import open_model, plan_launch
from engine.options import resolve


def engine_config(model: str, **options: Any) -> EngineConfig:
    """What ``twinfer`` would start for ``--layout ...`` and so on; one thread a rank."""
    resolved = resolve(ENGINE_OPTIONS, {"num_threads": 1, **options}, {}, None)
    return plan_launch(resolved, open_model(model).spec, model).config
