"""HTTPS: the same server behind TLS, and clients that do not speak it."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import trio

from engine.api.config import ApiConfig
from engine.api.routes import ROUTES, Route
from engine.api.server import tls_context
from engine.core.errors import ConfigError
from tests.api.harness import assert_idle, open_server, raw_client, script_of
from tests.api.test_server_calls import stream

# For localhost only, made for this test and used nowhere else.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUe+Ntck8X40g0PyyjB/3+//5Kw+UwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEzMDIzMTY0MFoYDzIxMjYxMTA2
MjMxNjQwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARdJGmFhTGq8GSKv3Q6PriT4mZBBEzJZUIsoE7bwmPdo5k/1yjc3IwC
bu/w+Y9SzajbTRhGsPs8tjKKe5Ja9Y9ho28wbTAdBgNVHQ4EFgQUoVQpGhRvMOzk
B3xPO2CUeyjmUyUwHwYDVR0jBBgwFoAUoVQpGhRvMOzkB3xPO2CUeyjmUyUwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAOCm7x1fHFCy5ul0oTvn2qsRl2RrSxYI6Jky0gtUVvGbAiAW
mTLjj/Q13x38rB9zyJT7kFQifoU5xI9zAmXWy4cI8A==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgU5aOallWQsdpypCS
LINEn9C0fQ1fHEcaF+WuhAmavn6hRANCAARdJGmFhTGq8GSKv3Q6PriT4mZBBEzJ
ZUIsoE7bwmPdo5k/1yjc3IwCbu/w+Y9SzajbTRhGsPs8tjKKe5Ja9Y9h
-----END PRIVATE KEY-----
"""


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    path = tmp_path / "both.pem"
    path.write_text(KEY + CERTIFICATE)
    return path


async def test_a_stream_over_tls_and_a_client_that_leaves_it(pem: Path) -> None:
    config = ApiConfig(port=0, ssl_certfile=str(pem))
    routes = (*ROUTES, Route("/test", "key", {"POST": stream}))
    async with open_server(script_of("abcdefgh", step_s=0.005), config=config, routes=routes) as server:
        assert server.base_url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(pem))
        async with httpx.AsyncClient(base_url=server.base_url, verify=trust, timeout=10) as client:
            assert (await client.get("/health")).status_code == 200
            whole = await client.post("/test", content=b"20")
            assert whole.text.endswith("data: [DONE]\n\n")
            async with client.stream("POST", "/test", content=b"190") as response:
                await anext(response.aiter_lines())
        with trio.fail_after(0.7):  # a stream takes 0.95 s to its end
            await assert_idle(server)


async def test_plain_http_on_a_tls_port_harms_nobody(pem: Path) -> None:
    async with open_server(config=ApiConfig(port=0, ssl_certfile=str(pem))) as server:
        async with raw_client(server) as client:
            await client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200" not in await client.receive_all()
        async with httpx.AsyncClient(base_url=server.base_url, verify=ssl.create_default_context(cafile=str(pem))) as secure:
            assert (await secure.get("/health")).status_code == 200


def test_files_that_are_no_certificate_and_key(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text(CERTIFICATE)
    for config in (ApiConfig(ssl_certfile=str(certificate)), ApiConfig(ssl_certfile=str(tmp_path / "none.pem"))):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            tls_context(config)
