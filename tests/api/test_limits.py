"""Every bound of the HTTP side, and that what is below it passes."""

from __future__ import annotations

import json

import pytest
import trio

from engine.api.config import ApiConfig
from tests.actors.harness import until
from tests.api.harness import assert_idle, error_code, open_server, parse_response, raw_client, request_bytes

KIB = 1024


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.call.LINGER_S", 0.3)


SMALL = ApiConfig(port=0, max_body_bytes=4 * KIB, body_timeout_s=0.2)


def body_of(size: int) -> bytes:
    """A tokenize request of exactly ``size`` bytes."""
    return json.dumps({"prompt": "x" * (size - len('{"prompt": ""}'))}).encode()


async def test_bodies_up_to_the_limit_and_not_a_byte_more() -> None:
    async with open_server(config=SMALL) as server:
        assert (await server.client.post("/tokenize", content=body_of(4 * KIB))).status_code == 200
        refused = await server.client.post("/tokenize", content=body_of(4 * KIB + 1))
        assert (refused.status_code, error_code(refused.content)) == (413, "body_too_large")
        assert str(4 * KIB) in refused.text
        await assert_idle(server)


async def test_a_body_that_is_declared_too_large_is_refused_before_it_comes() -> None:
    async with open_server(config=SMALL) as server, raw_client(server) as client:
        await client.send(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n")
        answer = await client.receive_until(b"}")
        status, headers, body = parse_response(answer)
        assert (status, headers["connection"], error_code(body)) == (413, "close", "body_too_large")
        assert await client.receive() == b""


async def test_a_body_in_chunks_is_counted() -> None:
    async with open_server(config=SMALL) as server, raw_client(server) as client:
        await client.send(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.send(b"800\r\n" + b"x" * 2048 + b"\r\n")
        await client.send(b"801\r\n" + b"x" * 2049 + b"\r\n")
        assert parse_response(await client.receive_until(b"}"))[0] == 413
        assert await client.receive() == b""


async def test_a_client_that_goes_on_sending_can_read_why_it_was_refused() -> None:
    """The connection is not torn down under the answer, nor kept by what still comes."""
    async with open_server(config=SMALL) as server:
        for path, status in (("/tokenize", 413), ("/nothing", 404), ("/health", 405)):
            assert (await server.client.post(path, content=b"x" * (8 << 20))).status_code == status
        await assert_idle(server)


async def test_a_refused_body_that_never_ends_does_not_hold_the_connection() -> None:
    async with open_server(config=SMALL) as server, raw_client(server) as client:
        await client.send(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")

        async def feed() -> None:
            chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
            with trio.move_on_after(8):
                try:
                    while True:
                        await client.send(chunk)
                except trio.BrokenResourceError:
                    ended.set()

        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            with trio.fail_after(6):
                await ended.wait()
        await assert_idle(server)


async def test_a_refusal_of_a_small_body_keeps_the_connection() -> None:
    async with open_server(config=ApiConfig(port=0, api_keys=("a-long-key",))) as server, raw_client(server) as client:
        for _ in range(3):
            await client.send(request_bytes("POST", "/tokenize", b'{"prompt": "x"}'))
            assert (await client.receive_until(b"}")).startswith(b"HTTP/1.1 401 ")


async def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_server() as server:
        budget = server.context.body_budget
        monkeypatch.setattr(budget, "_limit_bytes", 3000)
        async with raw_client(server) as client:
            await client.send(request_bytes("POST", "/tokenize", body_of(2000))[:-1])
            await until(lambda: budget.held_bytes == 1999)
            refused = await server.client.post("/tokenize", content=body_of(2000))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await server.client.post("/tokenize", content=body_of(900))).status_code == 200
            await client.send(b"}")
            assert (await client.receive_until(b"}")).startswith(b"HTTP/1.1 200 ")
        assert (await server.client.post("/tokenize", content=body_of(2000))).status_code == 200
        assert budget.held_bytes == 0


async def test_a_slow_body() -> None:
    async with open_server(config=SMALL) as server, raw_client(server) as client:
        await client.send(request_bytes("POST", "/tokenize", b'{"prompt": "x"}')[:-3])
        status, headers, body = parse_response(await client.receive_until(b"}"))
        assert (status, headers["connection"], error_code(body)) == (408, "close", "body_timeout")


async def test_requests_without_a_body_may_not_bring_a_large_one() -> None:
    async with open_server() as server:
        assert (await server.client.request("GET", "/health", content=b"x" * 1000)).status_code == 200
        assert (await server.client.request("GET", "/health", content=b"x" * (65 * KIB))).status_code == 413


async def test_headers_above_16_kib() -> None:
    async with open_server() as server:
        assert (await server.client.get("/health", headers={"x-long": "a" * (15 * KIB)})).status_code == 200
        async with raw_client(server) as client:
            await client.send(request_bytes("GET", "/health", headers=f"x-long: {'a' * 17 * KIB}"))
            assert (await client.receive_all()).startswith(b"HTTP/1.1 431 ")


async def test_what_is_no_http_gets_400_and_harms_nobody() -> None:
    junk = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100,
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
    )  # fmt: skip
    async with open_server() as server:
        for data in junk:
            async with raw_client(server) as client:
                await client.send(data)
                assert (await client.receive_all()).startswith(b"HTTP/1.1 400 "), data
        assert (await server.client.get("/health")).status_code == 200


async def test_requests_in_one_packet_and_bodies_that_wait_to_be_asked_for() -> None:
    body = b'{"prompt": "x"}'
    async with open_server() as server, raw_client(server) as client:
        await client.send(request_bytes("POST", "/tokenize", body) * 3)
        answers = b""
        while answers.count(b'"count"') < 3:
            answers += await client.receive()
        await client.send(request_bytes("POST", "/tokenize", body, headers="expect: 100-continue\r\n")[: -len(body)])
        assert (await client.receive_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await client.send(body)
        assert (await client.receive_until(b"}")).startswith(b"HTTP/1.1 200 ")


async def test_a_fault_in_one_connection_is_that_connections(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("a fault of the protocol's")

    async with open_server() as server:
        async with raw_client(server) as client:
            with monkeypatch.context() as patch:
                patch.setattr("engine.api.connection._Http11.handle", fail)
                await client.send(request_bytes("GET", "/health"))
                assert await client.receive_all() == b""
        assert (await server.client.get("/health")).status_code == 200
        assert "a connection failed" in caplog.text


async def test_no_other_protocol_is_spoken() -> None:
    """HTTP/2 (with its preface, or by upgrade) and websockets."""
    upgrade = "connection: upgrade\r\nupgrade: {}\r\n"
    async with open_server() as server:
        async with raw_client(server) as client:
            await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 9)
            assert b"HTTP/1.1 4" in await client.receive_all()
        async with raw_client(server) as client:
            await client.send(request_bytes("GET", "/health/live", headers=upgrade.format("h2c") + "http2-settings: AAMAAABkAAQAoAAA\r\n"))
            assert (await client.receive_until(b"}")).startswith(b"HTTP/1.1 200 ")
        async with raw_client(server) as client:
            keys = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
            for headers in (keys, ""):  # passed over, and the connection serves on
                await client.send(request_bytes("GET", "/health/live", headers=upgrade.format("websocket") + headers))
                assert (await client.receive_until(b"}")).startswith(b"HTTP/1.1 200 ")
        assert (await server.client.get("/health")).status_code == 200


async def test_connections_above_the_limit_wait_for_one_to_close() -> None:
    async with (
        open_server(config=ApiConfig(port=0, max_connections=2)) as server,
        raw_client(server) as first,
        raw_client(server) as second,
        raw_client(server) as third,
    ):
        for client in (first, second, third):
            await client.send(request_bytes("GET", "/health/live"))
        for client in (first, second):
            await client.receive_until(b"}")
        with pytest.raises(trio.TooSlowError):
            await third.receive(timeout_s=0.1)
        await first.stream.aclose()
        await third.receive_until(b"}")


async def test_an_idle_connection_is_closed_and_one_that_never_asks_too() -> None:
    config = ApiConfig(port=0, keep_alive_timeout_s=0.2)
    async with open_server(config=config) as server, raw_client(server) as client, raw_client(server) as silent:
        await client.send(request_bytes("GET", "/health/live"))
        await client.receive_until(b"}")
        assert await client.receive(timeout_s=3) == b""
        assert await silent.receive(timeout_s=3) == b""


async def test_methods() -> None:
    async with open_server() as server:
        head = await server.client.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        options = await server.client.options("/tokenize")
        assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
        refused = await server.client.delete("/health")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert error_code(refused.content) == "method_not_allowed"
        missing = await server.client.get("/v1/nothing/")
        assert (missing.status_code, error_code(missing.content)) == (404, "not_found")
        assert "server" not in missing.headers
