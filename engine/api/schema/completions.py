"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.api.schema.common import ResponseFormat, SamplingFields


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``prompt``: one text, several, the token ids of one, or of several."""

    prompt: str | list[str | int | list[int]]
    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    # Not implemented.
    suffix: Any = None

    not_implemented: ClassVar[dict[str, tuple[Any, ...]]] = {**SamplingFields.not_implemented, "suffix": ("",)}


COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)
