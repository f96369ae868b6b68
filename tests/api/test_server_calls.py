"""What a handler does, and what becomes of it: errors before and after the headers, clients that leave in every phase, time limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.actors.gateway import Generation
from engine.api.call import DONE_FRAME, Call, ClientGone, Handler, frame
from engine.api.config import ApiConfig
from engine.api.context import ApiContext
from engine.api.errors import ApiError
from engine.api.routes import Route
from engine.core.errors import CapacityError, ConfigError, RequestError
from engine.core.sampling import SamplingParams
from tests.actors.harness import until
from tests.api.harness import (
    Server,
    assert_idle,
    error_code,
    open_server,
    parse_response,
    raw_client,
    request_bytes,
    script_of,
)

STEP_S = 0.005


def generation(max_tokens: int = 150) -> Generation:
    return Generation(prompt=(5, 6, 7), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def stream(context: ApiContext, call: Call) -> None:
    """A stream of as many tokens as the body says."""
    events = call.events()
    async with context.engine.generate(generation(int(call.body or b"150"))) as outputs:
        async for output in outputs:
            await events.write(frame({"text": output.text}))
    await events.write(DONE_FRAME)
    await events.end()


def routes(handler: Handler) -> tuple[Route, ...]:
    return (Route("/test", "key", {"POST": handler}),)


def raising(error: BaseException, *, after: Callable[[Call], Awaitable[None]] | None = None) -> Handler:
    async def handler(_: ApiContext, call: Call) -> None:
        if after is not None:
            await after(call)
        raise error

    return handler


# -- errors -------------------------------------------------------------------------------------------------------------------


ERRORS: tuple[tuple[Exception, int, str], ...] = (
    (RequestError("n is 0; allowed: 1", param="n"), 400, "invalid_request"),
    (CapacityError("full", retry_after_s=2.5), 429, "queue_full"),
    (ApiError(404, "no such thing", type="not_found_error", code="x"), 404, "x"),
    (ConfigError("gone"), 503, "engine_unavailable"),
    (ValueError("a prompt of somebody's"), 500, "internal_error"),
    (ExceptionGroup("tasks", [ExceptionGroup("more", [RequestError("bad", code="deep")])]), 400, "deep"),
)


async def test_what_a_handler_raises_is_the_answer() -> None:
    table = tuple(Route(f"/{index}", "key", {"POST": raising(error)}) for index, (error, _, _) in enumerate(ERRORS))
    async with open_server(routes=table) as server:
        for index, (_, status, code) in enumerate(ERRORS):
            response = await server.client.post(f"/{index}")
            assert response.status_code == status
            assert error_code(response.content) == code
            assert b"somebody" not in response.content
            assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)
            assert response.headers["x-request-id"]


async def test_a_handler_that_says_nothing_is_a_fault() -> None:
    async def silent(_: ApiContext, call: Call) -> None:
        call.events()

    async with open_server(routes=routes(silent)) as server:
        assert error_code((await server.client.post("/test")).content) == "engine_unavailable"


async def test_an_error_after_the_headers_is_the_last_event() -> None:
    async def begin(call: Call) -> None:
        await call.events().write(frame({"text": "a"}))

    async with open_server(routes=routes(raising(ValueError("secret"), after=begin))) as server:
        response = await server.client.post("/test")
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
        assert response.status_code == 200
        assert events[0] == {"text": "a"}
        assert events[1]["error"]["code"] == "internal_error"
        assert len(events) == 2
        assert "DONE" not in response.text
        assert "secret" not in response.text


async def test_an_error_after_the_answer_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(call: Call) -> None:
        await call.send_json({"all": "good"})

    async with open_server(routes=routes(raising(ValueError("late"), after=answer))) as server:
        for _ in range(3):
            assert (await server.client.post("/test")).json() == {"all": "good"}
        await assert_idle(server)
        assert [record.levelname for record in caplog.records if record.message.endswith(" failed")] == ["ERROR"] * 3


async def test_headers_without_their_body_show_as_a_cut_answer() -> None:
    async def half(call: Call) -> None:
        await call._start(200, (("content-length", "10"),))

    async with open_server(routes=routes(raising(ValueError("x"), after=half))) as server, raw_client(server) as client:
        await client.send(request_bytes("POST", "/test"))
        status, headers, body = parse_response(await client.receive_all())
        assert (status, headers["content-length"], body) == (200, "10", b"")


async def test_a_cancelled_task_beside_a_failed_one() -> None:
    """A handler whose own tasks fail while the client leaves: the failure is logged, nothing escapes."""

    async def handler(_: ApiContext, __: Call) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("while leaving")

    async with open_server(routes=routes(handler)) as server:
        async with raw_client(server) as client:
            await client.send(request_bytes("POST", "/test"))
            await until(lambda: server.app.num_calls == 1)
        await assert_idle(server)
        assert (await server.client.get("/nothing")).status_code == 404


# -- ends ---------------------------------------------------------------------------------------------------------------------


async def test_a_whole_answer_is_never_logged_as_a_client_that_left(caplog: pytest.LogCaptureFixture) -> None:
    """The end of every exchange is a disconnect to the application."""
    caplog.set_level(logging.DEBUG, "twinfer.access")
    async with open_server(script_of("abcdefgh"), routes=routes(stream)) as server:
        for _ in range(10):
            response = await server.client.post("/test", content=b"2")
            assert response.text.endswith("data: [DONE]\n\n")
        await assert_idle(server)
        statuses = [record.fields["status"] for record in caplog.records if record.name == "twinfer.access"]  # type: ignore[attr-defined]
        assert statuses == [200] * 10
        assert server.context.metrics.http_requests == {("/test", 200): 10}
        assert server.context.metrics.open_streams == 0


async def leaves_while_streaming(server: Server) -> None:
    async with raw_client(server) as client:
        await client.send(request_bytes("POST", "/test"))
        await client.receive_until(b"data: ")
        assert server.context.metrics.open_streams == 1


async def leaves_before_the_first_token(server: Server) -> None:
    async with raw_client(server) as client:
        await client.send(request_bytes("POST", "/test"))
        await until(lambda: server.gateway.num_requests > 0)


async def leaves_in_its_body(server: Server) -> None:
    async with raw_client(server) as client:
        await client.send(request_bytes("POST", "/test", b"150")[:-2])
        await until(lambda: server.app.num_calls == 1)


async def leaves_in_its_headers(server: Server) -> None:
    async with raw_client(server) as client:
        await client.send(request_bytes("POST", "/test")[:-10])


async def closes_its_half(server: Server) -> None:
    """A client that says it will send nothing more counts as gone, although it might still read."""
    async with raw_client(server) as client:
        await client.send(request_bytes("POST", "/test"))
        await client.receive_until(b"data: ")
        await client.stream.send_eof()
        await client.receive_all()


async def leaves_with_a_second_request_waiting(server: Server) -> None:
    async with raw_client(server) as client:
        await client.send(request_bytes("POST", "/test") * 2)
        await client.receive_until(b"data: ")


CLIENTS: tuple[Callable[[Server], Awaitable[None]], ...] = (
    leaves_while_streaming,
    leaves_before_the_first_token,
    leaves_in_its_body,
    leaves_in_its_headers,
    closes_its_half,
    leaves_with_a_second_request_waiting,
)


async def test_a_client_that_leaves_gives_everything_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "twinfer.access")
    async with open_server(script_of("abcdefgh", step_s=STEP_S), routes=routes(stream)) as server:
        for client in CLIENTS:
            caplog.clear()
            await client(server)
            with trio.fail_after(0.6):  # a stream takes 0.75 s to its end
                await assert_idle(server)
            assert server.context.metrics.open_streams == 0
            statuses = {record.fields["status"] for record in caplog.records if record.name == "twinfer.access"}  # type: ignore[attr-defined]
            assert statuses <= {499}, client
            assert "Traceback" not in caplog.text


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    """Also while a send is under way, which hypercorn itself never gives up."""
    ended = trio.Event()

    async def flood(context: ApiContext, call: Call) -> None:
        events = call.events()
        try:
            async with context.engine.generate(generation()):
                while True:
                    await events.write(b"data: " + b"x" * 100_000 + b"\n\n")
        finally:
            ended.set()

    config = ApiConfig(port=0, client_timeout_s=0.2)
    async with open_server(script_of("abcdefgh", step_s=0.02), routes=routes(flood), config=config) as server, raw_client(server) as client:
        await client.send(request_bytes("POST", "/test"))
        with trio.fail_after(5):
            await ended.wait()
            await assert_idle(server)


async def test_a_request_has_a_time_limit_before_and_after_its_headers() -> None:
    async def slow(_: ApiContext, call: Call) -> None:
        if call.body:
            await call.events().write(frame({"text": "a"}))
        await trio.sleep_forever()

    async with open_server(routes=routes(slow), config=ApiConfig(port=0, request_timeout_s=0.1)) as server:
        response = await server.client.post("/test")
        assert (response.status_code, error_code(response.content)) == (504, "request_timeout")
        streamed = (await server.client.post("/test", content=b"1")).text.split("\n\n")
        assert streamed[0] == 'data: {"text":"a"}'
        assert error_code(streamed[1].removeprefix("data: ").encode()) == "request_timeout"


async def test_a_time_limit_in_the_middle_of_a_send_does_not_garble_the_answer() -> None:
    """What the protocol counts as sent is sent, however slowly it is taken."""

    async def flood(_: ApiContext, call: Call) -> None:
        events = call.events()
        while True:
            await events.write(b"data: " + b"x" * 3_000_000 + b"\n\n")

    async with open_server(routes=routes(flood), config=ApiConfig(port=0, request_timeout_s=0.1)) as server:
        began_s = trio.current_time()
        async with server.client.stream("POST", "/test") as response:
            await until(lambda: trio.current_time() > began_s + 0.3)
            events = [part async for part in response.aiter_text()]
        text = "".join(events)
        assert error_code(text.split("\n\n")[-2].removeprefix("data: ").encode()) == "request_timeout"
        assert text.count("x") % 3_000_000 == 0


async def test_client_gone_from_a_handler_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "twinfer.access")
    async with open_server(routes=routes(raising(ClientGone()))) as server, raw_client(server) as client:
        await client.send(request_bytes("POST", "/test"))
        await client.receive_all()
        assert " 499 " in caplog.text
