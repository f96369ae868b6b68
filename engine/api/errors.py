"""Errors as HTTP: a status, and OpenAI's body ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math

import msgspec

from engine.core.errors import CapacityError, GenerationError, RequestError, TwinferError

# Texts of libraries repeat what they do not like, however long it is.
MAX_MESSAGE_CHARS = 2000


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(TwinferError):
    """An answer that is an error. ``headers`` go out with it."""

    def __init__(self, status: int, message: str, *, type: str, param: str | None = None, code: str | None = None,
                 headers: tuple[tuple[str, str], ...] = ()) -> None:  # fmt: skip
        super().__init__(_shortened(message))
        self.status = status
        self.type = type
        self.param = None if param is None else _shortened(param)
        self.code = code
        self.headers = headers

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(str(self), self.type, self.param, self.code))


def not_found(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(404, message, type="not_found_error", param=param, code=code)


def as_api_error(error: Exception, *, ready: bool) -> ApiError:
    """The answer for anything a handler raises. ``ready``: whether the engine takes requests at all; a queue that is full is 429, an
    engine that is not there is 503.
    """
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), type="invalid_request_error", param=error.param, code=error.code)
        case CapacityError() if ready:
            wait_s = max(1, math.ceil(error.retry_after_s or 1.0))
            headers = (("retry-after", str(wait_s)),)
            return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers=headers)
        case GenerationError():
            # Of this request alone; the engine is as well as before.
            return ApiError(500, str(error), type="server_error", code="generation_failed")
        case TwinferError():
            return ApiError(503, str(error), type="service_unavailable_error", code="engine_unavailable", headers=(("retry-after", "5"),))
        case _:
            # What went wrong is for the log: its text may hold what belongs to other clients.
            return ApiError(500, "internal error; the server's log has the details", type="server_error", code="internal_error")


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."
