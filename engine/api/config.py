"""Options of the server. Each bound exists so that no client can make the server hold or compute without limit."""

from __future__ import annotations

from typing import Literal

import msgspec


class ApiConfig(msgspec.Struct, frozen=True):
    """What the HTTP side is started with."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    # Plain keys; empty admits everybody (the start-up summary says so). The application keeps digests of them only.
    api_keys: tuple[str, ...] = ()
    # Host headers to answer, beside the loopback names on a loopback bind; empty on another bind answers all of them.
    allowed_hosts: tuple[str, ...] = ()
    public_metrics: bool = False  # /metrics without a key
    metrics_compat: Literal["none", "vllm", "sglang"] = "none"
    thinking: Literal["auto", "on", "off"] = "auto"
    # The longest prompt in JSON escapes, with room for tools.
    max_body_bytes: int = 64 << 20
    body_timeout_s: float = 30.0  # from the head of a request to the end of its body
    # A client that takes nothing for this long is cut off and its blocks are freed.
    client_timeout_s: float = 30.0
    request_timeout_s: float = 3600.0  # a whole request
    keep_alive_timeout_s: float = 75.0  # longer than the usual pools' think time, so that they are not closed under the client
    max_connections: int = 4096
    health_timeout_s: float = 5.0  # an actor not heard of for longer makes /health 503
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None  # None where the certificate's file has the key too
    max_samples: int = 128
    max_schema_bytes: int = 256 << 10
    max_prompts: int = 256  # in one /v1/completions request
    max_tools: int = 128
