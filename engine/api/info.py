"""What the server says about itself: one object, read by the start-up summary, /server_info, /v1/models and the metrics alike."""

from __future__ import annotations

from typing import Any

import msgspec


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are fixed once the engine is ready. Bytes are per rank, as allocated."""

    version: str
    model: str
    served_names: tuple[str, ...]
    created_unix_s: int
    layout: str
    dtype: str
    device: str
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    block_size: int
    context_length: int
    max_running_requests: int
    max_waiting_requests: int
    draft_tokens: int
    prefix_caching: bool
    chat_format: str | None
    load_s: float
    warm_up_s: float
    ready_s: float
    non_default: dict[str, Any]
    sampling_defaults: dict[str, float] = {}  # of requests that name none
    num_api_keys: int = 0  # 0 lets everybody in

    @property
    def full_length_requests(self) -> int:
        """How many requests of the whole context fit the KV cache at once, whole ones (slots permitting)."""
        return min(self.kv_tokens // self.context_length, self.max_running_requests)
