"""GET /metrics: Prometheus text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from engine.api.call import Call

if TYPE_CHECKING:
    from engine.api.context import ApiContext


async def metrics(context: ApiContext, call: Call) -> None:
    await call.send_bytes(context.metrics.exposition(), CONTENT_TYPE_PLAIN_0_0_4)
