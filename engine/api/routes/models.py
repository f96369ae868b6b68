"""/v1/models: the names under which the one model is served."""

from __future__ import annotations

from typing import Any

from engine.api.call import Call
from engine.api.context import ApiContext
from engine.api.errors import ApiError, not_found


def unknown_model(context: ApiContext, name: str) -> ApiError:
    """The error for a request of a model that is not served here."""
    served = ", ".join(context.info.served_names)
    return not_found(f"the model {name[:200]!r} is not served here; there is: {served}", param="model", code="model_not_found")


async def list_models(context: ApiContext, call: Call) -> None:
    await call.send_json({"object": "list", "data": [_entry(context, name) for name in context.info.served_names]})


async def show_model(context: ApiContext, call: Call) -> None:
    name = call.path_params["model"]
    if name not in context.info.served_names:
        raise unknown_model(context, name)
    await call.send_json(_entry(context, name))


def _entry(context: ApiContext, name: str) -> dict[str, Any]:
    info = context.info
    return {
        "id": name,
        "object": "model",
        "created": info.created_unix_s,
        "owned_by": "twinfer",
        "root": info.model,
        "max_model_len": info.context_length,
    }
