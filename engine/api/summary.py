"""The start-up summary: what users quote when they report something. Every figure is the ServerInfo's."""

from __future__ import annotations

from collections.abc import Iterable

from engine.api.auth import is_loopback
from engine.api.config import ApiConfig
from engine.api.info import ServerInfo

GIB = 1 << 30


def summary(info: ServerInfo, config: ApiConfig, url: str, routes: Iterable[str]) -> str:
    """One line a subject, the address first and the time last."""
    drafts = f"{info.draft_tokens} draft tokens a step" if info.draft_tokens else "no drafts"
    tls = "HTTPS" if config.ssl_certfile else "HTTP"
    rows = [
        ("model", f"{info.model}, {info.num_parameters:,} parameters, served as {', '.join(info.served_names)}"),
        ("engine", f"layout {info.layout}, {info.dtype} on {info.device}, {drafts}, prefix cache {'on' if info.prefix_caching else 'off'}"),
        ("weights", gib(info.weight_bytes)),
        ("KV", f"{gib(info.kv_bytes)}, {info.kv_tokens:,} tokens in blocks of {info.block_size}"),
        ("requests", f"{info.full_length_requests} at the full length of {info.context_length:,} tokens"),
        ("limits", f"{info.max_running_requests} running and {info.max_waiting_requests} waiting requests, {config.max_connections} "
                   f"connections, bodies of {config.max_body_bytes:,} bytes"),
        ("chat", f"format {info.chat_format}" if info.chat_format else "no chat format: /v1/completions only"),
        ("sampling", ", ".join(f"{name} {value:g}" for name, value in info.sampling_defaults.items()) + " where a request says nothing"),
        ("access", access(info, config)),
        ("options", ", ".join(f"{name}={value}" for name, value in info.non_default.items()) or "all at their defaults"),
        ("routes", " ".join(routes)),
    ]  # fmt: skip
    lines = [f"twinfer {info.version} serves {info.served_names[0]} over {tls} at {url}"]
    lines += [f"  {name:<9} {value}" for name, value in rows]
    lines.append(f"ready in {info.ready_s:.1f} s (load {info.load_s:.1f} s, warm-up {info.warm_up_s:.1f} s)")
    return "\n".join(lines)


def access(info: ServerInfo, config: ApiConfig) -> str:
    if info.num_api_keys:
        return f"{info.num_api_keys} API key{'s' if info.num_api_keys > 1 else ''}"
    return "no API keys, from this machine only" if is_loopback(config.host) else "EVERYBODY: no API keys"


def warnings(info: ServerInfo, config: ApiConfig) -> list[str]:
    """What an operator should not find out later."""
    found = []
    if not info.num_api_keys and not is_loopback(config.host):
        found.append(
            f"--host {config.host} without API keys: everybody who reaches this machine can use the model; "
            "set --api-key-file, or listen on 127.0.0.1"
        )
    if info.num_api_keys and not is_loopback(config.host) and not config.ssl_certfile:
        found.append("API keys travel unencrypted over HTTP; set --ssl-certfile, or put a proxy with TLS in front")
    return found


def gib(count: int) -> str:
    return f"{count / GIB:.3f} GiB"
