"""A backend on a thread of its own, so that a person can type (and interrupt) in the main thread while an engine goes on living."""

from __future__ import annotations

import contextlib
import queue
import threading
from types import TracebackType
from typing import Any, Union

import msgspec
import trio

from engine.cli.chat_backend import Account, Backend, Message, OpenBackend
from engine.core.errors import TwinferError

SIGNAL_INTERVAL_S = 0.2


class Said(msgspec.Struct, frozen=True):
    content: str
    reasoning: str


class Ended(msgspec.Struct, frozen=True):
    """``account`` None with no error: the answer was stopped."""

    account: Account | None
    error: TwinferError | None = None


Happening = Union[Said, Ended]


class ChatSession:
    """``with ChatSession(open_backend) as session``: one answer at a time, asked for and read from the main thread."""

    def __init__(self, open_backend: OpenBackend) -> None:
        self._open_backend = open_backend
        self._happenings: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._opened = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._answering: trio.CancelScope | None = None
        self._backend: Backend | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chat", daemon=True)

    @property
    def model(self) -> str:
        assert self._backend is not None
        return self._backend.model

    @property
    def has_ended(self) -> bool:
        """Nothing more can be asked: the engine has died."""
        return self._failure is not None

    def __enter__(self) -> ChatSession:
        """Raises what the backend's opening raises."""
        self._thread.start()
        try:
            self._opened.wait()
        except BaseException:
            self.close()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, messages: list[Message]) -> None:
        """Begin the next answer. ``wait`` for its pieces up to Ended, also after ``stop``."""
        self._happenings = queue.SimpleQueue()
        self._soon(self._start, list(messages), self._happenings)

    def wait(self) -> Happening:
        # Python notices a signal that comes just before a wait only after it.
        while True:
            with contextlib.suppress(queue.Empty):
                return self._happenings.get(timeout=SIGNAL_INTERVAL_S)

    def stop(self) -> None:
        self._soon(self._cancel_answer)

    def close(self) -> None:
        """End the backend and wait for it: an engine's workers end with it."""
        self._soon(self._cancel_all)
        self._thread.join()

    def _soon(self, work: Any, *arguments: Any) -> None:
        """Run in trio's thread. Once that has ended, whoever waits is told why."""
        while self._token is None and self._thread.is_alive():
            self._thread.join(0.01)
        try:
            if self._token is None:
                raise trio.RunFinishedError
            self._token.run_sync_soon(work, *arguments)
        except trio.RunFinishedError:
            self._happenings.put(Ended(None, self._reason()))

    def _reason(self) -> TwinferError:
        failure = self._failure
        return (
            failure if isinstance(failure, TwinferError) else TwinferError(f"the chat has ended: {failure}" if failure else "it has ended")
        )

    # -- trio's thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._failure = _first(error)
        self._happenings.put(Ended(None, self._reason()))
        self._opened.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            async with self._open_backend() as backend:
                self._backend = backend
                self._opened.set()
                async with trio.open_nursery() as self._nursery:
                    await trio.sleep_forever()

    def _start(self, messages: list[Message], happenings: queue.SimpleQueue[Happening]) -> None:
        assert self._nursery is not None
        self._answering = trio.CancelScope()  # here, so that a stop which comes before the task has begun is not lost
        self._nursery.start_soon(self._answer, messages, happenings, self._answering)

    def _cancel_answer(self) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def _cancel_all(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _answer(self, messages: list[Message], happenings: queue.SimpleQueue[Happening], scope: trio.CancelScope) -> None:
        assert self._backend is not None
        ended = Ended(None)
        with scope:
            try:
                account = await self._backend.answer(messages, lambda content, reasoning: happenings.put(Said(content, reasoning)))
                ended = Ended(account)
            except TwinferError as error:
                ended = Ended(None, error)
        happenings.put(ended)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
