"""Between the nodes of a replica: torch's TCPStore to meet at, gloo to carry messages. Nothing else of ours crosses machines.

Neither asks who is there: whoever reaches the ports can join or disturb. They are bound to one address of each node, and belong on a
trusted network.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed's own names are not typed

from engine.core.errors import ConfigError, WorkerError

# A message begins with its length and as much of it as fits the first piece: most need no second one.
_LENGTH = struct.Struct("<I")
_FIRST_BYTES = 4096
_INLINE_BYTES = _FIRST_BYTES - _LENGTH.size
_MAX_HELLO_BYTES = 1 << 20
# Idle engines stay up: who is gone is noticed by the connection's end or by missing beats.
_FOR_EVER = timedelta(days=3650)
_SOURCE = re.compile(r"^\[[^\]]*\]\s*")
_HEARING = timedelta(seconds=2)


class Hello(msgspec.Struct, frozen=True):
    """What a node says of itself in the store. ``nonce`` tells apart two processes that claim to be the same node."""

    nonce: str
    facts: dict[str, str]


class Verdict(msgspec.Struct, frozen=True):
    """Node 0's answer to all: why it will not be, or the nonces of those that are in."""

    fault: str | None
    message: str
    nonces: tuple[str, ...]


class Wire:
    """One node's end. ``meet`` first; then one thread sends, and one per other node receives."""

    def __init__(self, node: int, num_nodes: int, host: str, port: int, address: str, *, max_message_bytes: int) -> None:
        """Node 0 is at ``host`` and ``port``; ``address`` is this node's own that it listens on."""
        self.node, self.num_nodes = node, num_nodes
        self._host, self._port, self._address = host, port, address
        self._max_message_bytes = max_message_bytes
        self._pieces = {peer: torch.zeros(_FIRST_BYTES, dtype=torch.uint8) for peer in range(num_nodes)}

    def meet(self, facts: Mapping[str, str], timeout_s: float) -> None:
        """Wait for all nodes and connect to each. Raises ConfigError where they differ, WorkerError where some do not come."""
        deadline_s = time.monotonic() + timeout_s
        store = self._first_store(timeout_s) if self.node == 0 else self._other_store(timeout_s)
        if self.node == 0:
            self._admit(store, dict(facts), timeout_s, deadline_s)
        else:
            self._apply(store, dict(facts), timeout_s, deadline_s)
        self._store = store  # node 0's is the server
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=max(1.0, deadline_s - time.monotonic()))
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("nodes", store), self.node, self.num_nodes, options)
        except RuntimeError as error:
            raise WorkerError(f"node-{self.node}", f"could not connect to the other nodes: {_brief(error)}") from error

    def send(self, node: int, message: bytes) -> None:
        """Raises ConnectionError where ``node`` is gone."""
        first = bytearray(_FIRST_BYTES)
        _LENGTH.pack_into(first, 0, len(message))
        first[_LENGTH.size : _LENGTH.size + min(len(message), _INLINE_BYTES)] = message[:_INLINE_BYTES]
        with _connection():
            self._gloo.send([torch.frombuffer(first, dtype=torch.uint8)], node, 0).wait(_FOR_EVER)
            if len(message) > _INLINE_BYTES:
                rest = torch.frombuffer(bytearray(message[_INLINE_BYTES:]), dtype=torch.uint8)
                self._gloo.send([rest], node, 0).wait(_FOR_EVER)

    def receive(self, node: int) -> bytes:
        """The next message of ``node``, however long it takes. Raises ConnectionError where the node is gone or sends garbage."""
        piece = self._pieces[node]
        with _connection():
            self._gloo.recv([piece], node, 0).wait(_FOR_EVER)
            first = piece.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(first)
            if length > self._max_message_bytes:
                raise ConnectionError(f"a message of {length} bytes; allowed: at most {self._max_message_bytes}")
            message = first[_LENGTH.size : _LENGTH.size + length]
            if length > _INLINE_BYTES:
                rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8)
                self._gloo.recv([rest], node, 0).wait(_FOR_EVER)
                message += rest.numpy().tobytes()
        return message

    # -- meeting ------------------------------------------------------------------------------------------------------------

    def _first_store(self, timeout_s: float) -> TCPStore:
        address = self._address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)  # kept: the store listens on it
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((address, self._port))
        except OSError as error:
            raise ConfigError(f"--master-addr {self._host} --master-port {self._port}: node 0 cannot listen there: {error}") from None
        self._listener.listen(self.num_nodes + 128)
        limit = timedelta(seconds=timeout_s)
        fd = self._listener.fileno()
        return TCPStore(address, self._port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=fd)

    def _other_store(self, timeout_s: float) -> TCPStore:
        try:
            return TCPStore(self._host, self._port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        except RuntimeError:
            raise WorkerError("node-0", f"did not answer at {self._where()} within start_timeout_s = {timeout_s:g}") from None

    def _admit(self, store: TCPStore, facts: dict[str, str], timeout_s: float, deadline_s: float) -> None:
        """Node 0: wait for all, compare, tell everybody."""
        others = range(1, self.num_nodes)
        left = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        with contextlib.suppress(RuntimeError):  # the time is over; who is missing is seen below
            store.wait([_key(node) for node in others], left)
        missing = [node for node in others if not store.check([_key(node)])]
        if missing:
            text = f"did not come to {self._where()} within start_timeout_s = {timeout_s:g}; start the same command there with --node-rank"
            failure = WorkerError(f"node {', '.join(map(str, missing))}", text)
            _answer(store, Verdict("internal", str(failure), ()), [node for node in others if node not in missing])
            raise failure
        hellos = [_hello(store, node) for node in others]
        texts = [differences(facts, hello.facts, node) for node, hello in zip(others, hellos, strict=True)]
        if any(texts):
            text = "; ".join(filter(None, texts)) + ". Start all nodes with the same version, model and options"
            _answer(store, Verdict("config", text, ()), others)
            raise ConfigError(text)
        _answer(store, Verdict(None, "", tuple(hello.nonce for hello in hellos)))

    def _apply(self, store: TCPStore, facts: dict[str, str], timeout_s: float, deadline_s: float) -> None:
        """Another node: say who we are, read what node 0 thinks of it."""
        nonce = secrets.token_hex(8)
        try:
            store.set(_key(self.node), msgspec.json.encode(Hello(nonce, facts)).decode())
            store.wait(["verdict"], timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
            verdict = msgspec.json.decode(store.get("verdict"), type=Verdict)
            store.set(_heard_key(self.node), "")
        except RuntimeError as error:
            reason = f"at {self._where()} ended, or did not find all nodes within start_timeout_s = {timeout_s:g} ({_brief(error)})"
            raise WorkerError("node-0", reason) from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"what answers at {self._where()} is no node 0 of this program: {error}") from None
        if verdict.fault == "config":
            raise ConfigError(verdict.message)
        if verdict.fault is not None:
            raise WorkerError("node-0", f"gave up: {verdict.message}")
        if len(verdict.nonces) < self.node:
            raise ConfigError(f"--node-rank is {self.node}; node 0 was started with --nnodes {len(verdict.nonces) + 1}")
        if verdict.nonces[self.node - 1] != nonce:
            raise ConfigError(f"--node-rank is {self.node}; another node has that number")

    def _where(self) -> str:
        return f"{self._host}, port {self._port},"


def differences(mine: Mapping[str, str], theirs: Mapping[str, str], node: int) -> str | None:
    """What differs between node 0 and ``node``; None where nothing does."""
    found = [
        f"{name} is {mine.get(name, 'not known')} on node 0 and {theirs.get(name, 'not known')} on node {node}"
        for name in dict.fromkeys((*mine, *theirs))
        if mine.get(name) != theirs.get(name)
    ]
    return ", ".join(found) or None


def _key(node: int) -> str:
    return f"node/{node}"


def _heard_key(node: int) -> str:
    return f"heard/{node}"


def _hello(store: TCPStore, node: int) -> Hello:
    data = store.get(_key(node))
    try:
        if len(data) > _MAX_HELLO_BYTES:
            raise msgspec.DecodeError(f"{len(data)} bytes")
        return msgspec.json.decode(data, type=Hello)
    except msgspec.DecodeError as error:
        raise ConfigError(f"what came as node {node} is no node of this program: {error}") from None


def _answer(store: TCPStore, verdict: Verdict, nodes: Iterable[int] = ()) -> None:
    """Tell all; of ``nodes`` wait for a moment until they have heard it, because the store ends with this process."""
    store.set("verdict", msgspec.json.encode(verdict).decode())
    with contextlib.suppress(RuntimeError):
        store.wait([_heard_key(node) for node in nodes], _HEARING)


@contextlib.contextmanager
def _connection() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(_brief(error)) from error


def _brief(error: BaseException) -> str:
    """What torch's error says first: the place in its source before that and the advice behind it are no help here."""
    text = _SOURCE.sub("", str(error).strip()) or type(error).__name__
    return text.splitlines()[0].partition(". ")[0]
