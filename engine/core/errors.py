"""Errors whose type says whose fault it is.

RequestError    the client's (an HTTP 4xx): a bad value in a request.
CapacityError   the load's (429 / 503): try again later or elsewhere.
ConfigError     the operator's, raised at start: flags, model folders, layouts.
DomainError     a model was asked outside the range it knows: the question's, like a ConfigError.
OutputError     a file that was asked for could not be written (a full disk): the machine's, found out after the work.
WorkerError     a worker process died, hung or raised; names the worker.
CollectiveError a rank waited in vain for its peers: one of them is at fault.
GenerationError one request could not go on (unusable logits, a grammar that came to a dead end); the others are not affected.
StoppedError    nobody's: a stop signal came before the work was done.
InvariantError  ours: a conservation law does not hold.
"""

from __future__ import annotations


class TwinferError(Exception):
    """Base of every error this project raises on purpose."""


class RequestError(TwinferError):
    """The request itself is wrong. ``param`` names the offending field, ``code`` is a stable identifier."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CapacityError(TwinferError):
    """There is no room now. ``retry_after_s`` is a hint for the caller, None where nothing is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(TwinferError):
    """The operator's configuration cannot work."""


class DomainError(TwinferError):
    """A prediction was asked for outside the range its model covers."""


class OutputError(TwinferError):
    """An output could not be written to its end. What stood under its name before still does."""


class WorkerError(TwinferError):
    """A worker failed. ``worker`` is its name, as in the supervisor's tree."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(f"{worker}: {message}")
        self.worker = worker


class CollectiveError(TwinferError):
    """A collective failed on this rank: a peer has died, hangs, or was slower than the limit."""


class GenerationError(TwinferError):
    """A running request ended because nothing could be sampled for it. It was the only one."""


class StoppedError(TwinferError):
    """The command was told to stop before it was finished; ``exit_code`` is the process's (130 SIGINT, 143 SIGTERM)."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("stopped before it was finished")
        self.exit_code = exit_code


class InvariantError(TwinferError):
    """A conservation law of the engine was broken; the state cannot be trusted any more."""
