"""The ASGI application: a table of routes behind one endpoint that checks the host, the key and the method of every request.

What a request may do is decided on the route that matched, never on a path put together from what the client says elsewhere; a path
that matches no route needs a key like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import trio
from starlette.routing import BaseRoute, Router
from starlette.routing import Route as StarletteRoute

from engine.api.auth import NOBODY, Hosts, Keys
from engine.api.call import CLIENT_LEFT, Access, Call, Handler, Receive, Scope, Send
from engine.api.context import ApiContext
from engine.api.errors import ApiError, not_found
from engine.api.routes import ROUTES, Route

# For requests that have no business with a body, and may come without a key.
MAX_IDLE_BODY_BYTES = 64 << 10
UNKNOWN_ROUTE = "unknown"  # of the metrics

_access_log = logging.getLogger("twinfer.access")


class App:
    """``log_requests`` raises the log line of each request from debug to info."""

    def __init__(self, context: ApiContext, routes: Sequence[Route] = ROUTES, *, log_requests: bool = False) -> None:
        self.keys = Keys(context.config.api_keys)
        # From here on the keys are digests only: no log of a handler's can show one.
        self.context = replace(context, config=msgspec.structs.replace(context.config, api_keys=()))
        self.hosts = Hosts(context.config.host, context.config.allowed_hosts)
        self.log_level = logging.INFO if log_requests else logging.DEBUG
        self.num_calls = 0
        self._idle = trio.Event()
        table: list[BaseRoute] = [StarletteRoute(route.path, Endpoint(self, route.path, route.access, route.handlers)) for route in routes]
        self._unknown = Endpoint(self, UNKNOWN_ROUTE, "key", {})
        # No redirects to paths with or without a slash: they would be built from the Host header.
        self._router = Router(table, redirect_slashes=False, default=self._unknown)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The patterns of routes take a line feed at the end for the end.
            await (self._unknown if scope["path"].endswith("\n") else self._router)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def wait_idle(self) -> None:
        """Until no request is under way."""
        while self.num_calls:
            await self._idle.wait()

    def began(self) -> None:
        self.num_calls += 1

    def ended(self) -> None:
        self.num_calls -= 1
        if not self.num_calls:
            self._idle.set()
            self._idle = trio.Event()


@dataclass(frozen=True)
class Endpoint:
    """One path: who may ask, and the handler for each method. Without handlers it is the answer to every unknown path."""

    app: App
    path: str  # as in the table
    access: Access
    handlers: Mapping[str, Handler]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self.app.context, scope, receive, send)
        began_s = trio.current_time()
        self.app.began()
        try:
            await self._run(call)
        except trio.Cancelled:
            call.status = call.status if call.complete else CLIENT_LEFT
            raise
        finally:
            self.app.ended()
            self.app.context.metrics.http_request(self.path, call.status or CLIENT_LEFT)
            self._log(call, trio.current_time() - began_s)

    async def _run(self, call: Call) -> None:
        method = call.scope["method"]
        try:
            self._check_host(call)
            self._check_key(call)
            handler = self._handler(call)
        except ApiError as error:
            await call.refuse(error)
            return
        limit = self.app.context.config.max_body_bytes if method == "POST" else MAX_IDLE_BODY_BYTES
        await call.run(handler, limit)

    def _check_host(self, call: Call) -> None:
        if not self.app.hosts.allows(call.header(b"host"), call.header(b"origin")):
            raise ApiError(
                403,
                "this Host or Origin is not served; add its name to --allowed-hosts",
                type="permission_error",
                code="host_not_allowed",
            )

    def _check_key(self, call: Call) -> None:
        tenant = self.app.keys.tenant(call.header(b"authorization"))
        is_public = self.access == "public" or (self.access == "metrics" and self.app.context.config.public_metrics)
        if tenant is None and not is_public:
            raise ApiError(
                401,
                "no valid API key; send one as 'Authorization: Bearer KEY'",
                type="authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )
        call.tenant = tenant or NOBODY

    def _handler(self, call: Call) -> Handler:
        method = call.scope["method"]
        if not self.handlers:
            raise not_found("there is nothing at this path", code="not_found")
        handler = self.handlers.get("GET" if method == "HEAD" else method)
        if handler is not None:
            return handler
        allowed = sorted({*self.handlers, *(["HEAD"] if "GET" in self.handlers else []), "OPTIONS"})
        headers = (("allow", ", ".join(allowed)),)
        if method == "OPTIONS":
            return lambda _, call: call.send_empty(204, headers)
        raise ApiError(
            405,
            f"method {method[:20]} is not allowed here; allowed: {', '.join(allowed)}",
            type="invalid_request_error",
            code="method_not_allowed",
            headers=headers,
        )

    def _log(self, call: Call, seconds: float) -> None:
        if not _access_log.isEnabledFor(self.app.log_level):
            return
        scope = call.scope
        # The path as it came (visible ASCII) and without its query, which may hold what is not for a log.
        path = scope["raw_path"].decode("ascii", "replace")[:200]
        fields = {
            "method": scope["method"][:20],
            "path": path,
            "status": call.status,
            "seconds": round(seconds, 6),
            "request_id": call.id,
            "key_id": call.tenant.key_id,
            **call.notes,
        }
        text = "".join(f" {name}={value}" for name, value in list(fields.items())[4:] if value is not None)
        _access_log.log(
            self.app.log_level, "%s %s %s %.3f s%s", fields["method"], path, call.status, seconds, text, extra={"fields": fields}
        )
