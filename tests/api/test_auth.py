"""Keys and hosts: every route of the table but the public ones is closed without a key, whatever else the request says."""

from __future__ import annotations

import itertools

import pytest

from engine.api import auth
from engine.api.auth import Hosts, Keys, Tenant, parse_key_file
from engine.api.config import ApiConfig
from engine.api.routes import ROUTES
from engine.core.errors import ConfigError, RequestError
from tests.api.harness import error_code, open_server, parse_response, raw_client

KEY, OTHER = "key-number-one", "key-number-two"
CONFIG = ApiConfig(port=0, api_keys=(KEY, OTHER))
PUBLIC = {"/health", "/ping", "/health/live", "/health/ready"}

WRONG = (
    None,
    "",
    "Bearer",
    "Bearer ",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY.upper()}",
    f"Basic {KEY}",
    f"Digest {KEY}",
    f"Bearer:{KEY}",
    KEY,
    f"Bearer {KEY} {KEY}",
    "Bearer \xff\xfe",
)


async def test_every_route_but_the_public_ones_needs_a_key() -> None:
    async with open_server(config=CONFIG) as server:
        assert {route.path for route in ROUTES if route.access == "public"} == PUBLIC
        methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
        for route, method in itertools.product(ROUTES, methods):
            path = route.path.replace("{model:path}", "scripted")
            bare = await server.client.request(method, path)
            keyed = await server.client.request(method, path, headers={"authorization": f"Bearer {KEY}"})
            assert keyed.status_code not in (401, 403, 404), (method, path)
            assert (bare.status_code == 401) == (route.path not in PUBLIC), (method, path)
            if bare.status_code == 401:
                assert bare.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert error_code(bare.content) == "invalid_api_key"


async def test_odd_paths_and_hosts_open_nothing() -> None:
    paths = (
        "/v1/models", "//v1/models", "/v1/models/", "/health/../v1/models", "/%76%31/models", "/v1/models?x=/health", "/health;/v1/models",
        "/health%2f..%2fv1%2fmodels", "http://127.0.0.1/v1/models", "http://health/v1/models", "/v1/models%00/health", "/nothing",
    )  # fmt: skip
    hosts = ("127.0.0.1", "127.0.0.1:80/health", "localhost/health?", "127.0.0.1:8000", "[::1]", "localhost#/health")
    async with open_server(config=CONFIG) as server:
        for path, host in itertools.product(paths, hosts):
            async with raw_client(server) as client:
                await client.send(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
                status, _, body = parse_response(await client.receive_all())
                assert status in (400, 401, 403), (path, host)
                assert b"scripted" not in body


@pytest.mark.parametrize("value", WRONG)
def test_wrong_authorization(value: str | None) -> None:
    assert Keys((KEY, OTHER)).tenant(None if value is None else value.encode("latin-1")) is None


def test_right_authorization_and_tenants() -> None:
    keys = Keys((KEY, OTHER, KEY))
    one, two = keys.tenant(f"Bearer {KEY}".encode()), keys.tenant(f"bearer  {OTHER} ".encode())
    assert one is not None
    assert two is not None
    assert one != two
    assert one.key_id is not None
    assert KEY not in repr(one)
    assert Keys((KEY,)).tenant(f"Bearer {KEY}".encode()) == one  # the same after a restart
    assert Keys().tenant(None) == Tenant()


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    keys = Keys((KEY, OTHER, "key-number-three"))
    monkeypatch.setattr("engine.api.auth.hmac.compare_digest", compare)
    for authorization in (None, f"Bearer {KEY}", f"Basic {KEY}", "Bearer " + "x" * 4000):
        compared.clear()
        keys.tenant(None if authorization is None else authorization.encode())
        assert len(compared) == 3
        assert {len(value) for pair in compared for value in pair} == {32}  # digests: the length says nothing either


def test_namespaces_of_two_keys_never_meet() -> None:
    keys = Keys((KEY, OTHER))
    tenants = [keys.tenant(f"Bearer {key}".encode()) for key in (KEY, OTHER)]
    salts: list[str | None] = [None, "a", "b", "x" * 256, "é\ud800"]
    salts += [tenant.salt for tenant in tenants if tenant] + [tenant.namespace("a") for tenant in tenants if tenant]
    names = [tenant.namespace(salt) for tenant in tenants for salt in salts if tenant]
    assert len(set(names)) == len(names) == 2 * len(salts)
    assert all(name and len(name) <= auth.MAX_SALT_CHARS for name in names)
    assert Tenant().namespace(None) is None
    assert Tenant().namespace("own") == "own"
    for salt in ("", "x" * 257):
        with pytest.raises(RequestError, match="1 to 256"):
            Tenant(salt="s").namespace(salt)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("short", "line 1.* 5 characters"), ("# none\n\n", "no key"), ("fine-key-1\nspace in it\n", "line 2"), ("schlüssel-1", "ASCII")],
)
def test_a_bad_key_file_is_refused_without_its_content(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_key_file(text, "keys.txt")
    assert not any(word in str(caught.value) for word in ("short", "space in", "schl"))


def test_a_key_file() -> None:
    assert parse_key_file("\ufeff# team a\r\nfirst-key\r\n\n  second-key  \n", "f") == ("first-key", "second-key")
    with pytest.raises(ConfigError, match="at most 1024"):
        Keys(f"key-{index:08}" for index in range(1025))


@pytest.mark.parametrize(
    ("bind", "allowed", "host", "origin", "answer"),
    [
        ("127.0.0.1", (), "localhost:8000", None, True),
        ("127.0.0.1", (), "127.0.0.1", None, True),
        ("::1", (), "[::1]:8000", None, True),
        ("127.0.0.2", (), "127.0.0.2", None, True),
        ("localhost", (), "evil.example", None, False),
        ("127.0.0.1", (), "evil.example:8000", None, False),
        ("127.0.0.1", (), "localhost.evil.example", None, False),
        ("127.0.0.1", (), None, None, False),
        ("127.0.0.1", ("Llm.Lan",), "llm.lan:8000", None, True),
        ("127.0.0.1", ("*",), "evil.example", None, True),
        ("127.0.0.1", (), "localhost", "http://localhost:3000", True),
        ("127.0.0.1", (), "localhost", "https://evil.example", False),
        ("127.0.0.1", (), "localhost", "null", False),
        ("0.0.0.0", (), "anything", "https://evil.example", True),
        ("0.0.0.0", ("llm.lan",), "anything", None, False),
        ("0.0.0.0", ("llm.lan",), "llm.lan", None, True),
    ],
)
def test_hosts(bind: str, allowed: tuple[str, ...], host: str | None, origin: str | None, answer: bool) -> None:
    encoded = [None if value is None else value.encode() for value in (host, origin)]
    assert Hosts(bind, allowed).allows(*encoded) is answer


async def test_a_page_that_points_its_name_here_gets_nothing() -> None:
    async with open_server() as server:
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            response = await server.client.post("/tokenize", headers=headers, json={"prompt": "x"})
            assert (response.status_code, error_code(response.content)) == (403, "host_not_allowed")
            assert "--allowed-hosts" in response.text


async def test_public_metrics_are_a_choice() -> None:
    for public, status in ((False, 401), (True, 200)):
        async with open_server(config=ApiConfig(port=0, api_keys=(KEY,), public_metrics=public)) as server:
            assert (await server.client.get("/metrics")).status_code == status
            assert (await server.client.get("/server_info")).status_code == 401
