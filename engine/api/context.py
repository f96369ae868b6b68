"""What every handler is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.actors.gateway import Gateway
from engine.api.body import BodyBudget
from engine.api.config import ApiConfig
from engine.api.formats.base import ChatFormat
from engine.api.info import ServerInfo
from engine.api.metrics import ServerMetrics
from engine.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ApiContext:
    """``defaults`` holds the sampling values of a request that names none (temperature and filters: the model's own, else OpenAI's)."""

    engine: Gateway
    info: ServerInfo
    config: ApiConfig
    chat_format: ChatFormat | None
    defaults: SamplingParams
    metrics: ServerMetrics = field(default_factory=ServerMetrics)  # the engine's observer too; started once the engine is warm
    body_budget: BodyBudget = field(default_factory=BodyBudget)
