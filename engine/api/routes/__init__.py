"""The table of routes: each path, who may ask, and a handler per method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.api.call import Access, Handler
from engine.api.routes import chat, completions, health, metrics, models, responses, tokenize


class Route(NamedTuple):
    path: str
    access: Access
    handlers: Mapping[str, Handler]


ROUTES: tuple[Route, ...] = (
    Route("/health", "public", {"GET": health.health}),
    Route("/ping", "public", {"GET": health.health}),
    Route("/health/live", "public", {"GET": health.live}),
    Route("/health/ready", "public", {"GET": health.health}),
    Route("/metrics", "metrics", {"GET": metrics.metrics}),
    Route("/version", "key", {"GET": health.version}),
    Route("/server_info", "key", {"GET": health.server_info}),
    Route("/get_server_info", "key", {"GET": health.server_info}),
    Route("/v1/models", "key", {"GET": models.list_models}),
    Route("/v1/models/{model:path}", "key", {"GET": models.show_model}),
    Route("/v1/chat/completions", "key", {"POST": chat.chat_completions}),
    Route("/v1/completions", "key", {"POST": completions.completions}),
    Route("/v1/responses", "key", {"POST": responses.responses}),
    Route("/tokenize", "key", {"POST": tokenize.tokenize}),
    Route("/detokenize", "key", {"POST": tokenize.detokenize}),
)
