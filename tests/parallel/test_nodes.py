"""One replica over two hosts: the same tokens, and a bounded end on both whatever happens to one of them.

The hosts are network namespaces where this process may make them (root, and iproute2), else two processes on loopback.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.actors.config import EngineConfig, NodesConfig
from tests.actors import harness
from tests.actors.harness import is_alive, until_sync, worker_pids
from tests.actors.scripted_worker import Script
from tests.parallel.engines import engine_config
from tests.parallel.hosts import Hosts, two_hosts

ROOT = Path(__file__).parents[2]
SCRIPTED, REAL = harness.MODULE, "engine.actors.worker_main"
LINK = "engine.actors.link_main"
LAYOUT = "tp1dp2ep2"
PATIENCE_S = 60.0  # on a busy machine; nothing waits that long where all is well
HEARTBEAT_TIMEOUT_S = 1.5
PROMPT = (5, 9, 12, 7)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as pair:
        print(f"two hosts: {pair.kind}")
        yield pair


class Node:
    """A node's process, and what it says."""

    def __init__(self, hosts: Hosts, number: int, *arguments: str, folder: Path) -> None:
        self._errors = open(folder / f"node-{number}.err", "w+")  # noqa: SIM115
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = hosts.command(number, sys.executable, "-m", *arguments)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, cwd=folder, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0)
        self._unread = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        self._errors.flush()
        return Path(self._errors.name).read_text()

    def ask(self, *, max_tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": PROMPT, "max_tokens": max_tokens}).encode() + b"\n")

    def read(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"nothing was said in {timeout_s} s; stderr: {self.errors}"
            if select.select([self.process.stdout], [], [], left_s)[0]:
                data = self.process.stdout.read(1 << 16)
                assert data, f"ended with {self.process.wait()}; stderr: {self.errors}"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s; stderr: {self.errors}") from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            assert stream is not None
            stream.close()


class Pair:
    """Both nodes of a replica. Everything below them is gone afterwards."""

    def __init__(self, hosts: Hosts, folder: Path, stack: ExitStack) -> None:
        self.hosts, self._folder, self._stack = hosts, folder, stack
        self.nodes: dict[int, Node] = {}
        self._below: list[int] = []

    def start(self, number: int, config: EngineConfig, module: str, **facts: str) -> Node:
        address = self.hosts.addresses[0]
        nodes = NodesConfig(2, number, address, self.hosts.port, tuple(({"layout": LAYOUT} | facts).items()))
        path = self._folder / f"config-{number}.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, nodes=nodes)))
        return self.add(number, "tests.parallel.node_process", str(path), module)

    def add(self, number: int, *arguments: str) -> Node:
        folder = self._folder / f"host-{number}"
        folder.mkdir(exist_ok=True)
        node = self.nodes[number] = Node(self.hosts, number, *arguments, folder=folder)
        self._stack.callback(node.close)
        return node

    def both(self, config: EngineConfig, module: str) -> tuple[Node, Node, dict[str, Any]]:
        """Node 1 first: it waits for node 0."""
        other = self.start(1, config, module)
        first = self.start(0, config, module)
        ready = first.read()
        assert ready["names"] == ["scheduler", "worker-0", "worker-1"]
        for number, node in enumerate((first, other)):
            assert worker_pids(node.pid, module), f"node {number} has no worker"
            self._below += worker_pids(node.pid, module) + worker_pids(node.pid, LINK)
        return first, other, ready

    def assert_nothing_is_left(self) -> None:
        assert self._below
        until_sync(lambda: not any(is_alive(pid) for pid in self._below), 5.0)


@pytest.fixture
def pair(hosts: Hosts, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        stack.callback(hosts.plug)
        yield Pair(hosts, tmp_path, stack)


def listening(pid: int) -> set[str]:
    """Addresses on which a process takes TCP connections."""
    own = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address = bytes.fromhex(fields[1].split(":")[0])
                found.add(socket.inet_ntoa(address[::-1]) if table == "tcp" else f"IPv6 {address.hex()}")
    return found


def scripted(**script: Any) -> EngineConfig:
    return harness.engine_config(
        Script(step_s=0.01, **script), num_ranks=2, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, start_timeout_s=PATIENCE_S
    )


# -- tokens -------------------------------------------------------------------------------------------------------------------


def test_the_command_line_over_two_hosts_gives_the_tokens_of_one(pair: Pair) -> None:
    arguments = ["twinfer", "generate", "tiny-v41", "--prompt", "Once upon", "--max-tokens", "12", "--num-threads", "1", "--json"]
    alone = Node(pair.hosts, 0, *arguments, folder=pair._folder)
    pair._stack.callback(alone.close)
    where = ["--layout", LAYOUT, "--nnodes", "2", "--master-addr", pair.hosts.addresses[0], "--master-port", str(pair.hosts.port)]
    nodes = [pair.add(number, *arguments, *where, "--node-rank", str(number)) for number in range(2)]
    tokens = nodes[0].read()["outputs"][0]["token_ids"]
    assert tokens == alone.read()["outputs"][0]["token_ids"]
    assert len(tokens) == 12
    assert [node.wait() for node in nodes] == [0, 0], [node.errors for node in nodes]
    assert "runs worker-1" in nodes[1].errors
    assert not nodes[1].process.stdout.read()  # type: ignore[union-attr]


def test_a_model_over_two_hosts_idles_and_ends_with_the_cable(pair: Pair) -> None:
    config = engine_config("tiny-v41", layout=LAYOUT, heartbeat_timeout=HEARTBEAT_TIMEOUT_S, collective_timeout=30.0)
    first, other, ready = pair.both(config, REAL)
    assert len(ready["infos"]) == 2
    assert all(info["weight_bytes"] > 0 and info["load_s"] > 0 for info in ready["infos"])
    for number, node in enumerate((first, other)):
        address = pair.hosts.addresses[number]
        found = [listening(pid) for pid in worker_pids(node.pid, REAL) + worker_pids(node.pid, LINK)]
        assert all(addresses == {address} for addresses in found), f"node {number}, {address}: {found}"
    answers = []
    for _ in range(2):
        time.sleep(1.5 * HEARTBEAT_TIMEOUT_S)  # idle for longer than a dead node would be kept
        first.ask(max_tokens=6)
        assert first.read() == {"begun": True}
        answers.append(first.read())
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert 0 <= answers[1]["ages"]["worker-1"] < HEARTBEAT_TIMEOUT_S
    first.ask(max_tokens=4000)
    assert first.read() == {"begun": True}
    begin_s = time.monotonic()
    if pair.hosts.can_cut:
        pair.hosts.cut()
    else:
        os.kill(other.pid, signal.SIGSTOP)
    error = first.read()["error"]
    assert "worker-1" in error or "node-1" in error
    assert time.monotonic() - begin_s < HEARTBEAT_TIMEOUT_S + 10.0
    assert first.wait() == 1
    if not pair.hosts.can_cut:
        os.kill(other.pid, signal.SIGCONT)
    assert other.wait() == 1
    assert "node-0" in other.errors
    pair.assert_nothing_is_left()


def test_a_killed_worker_of_the_other_host_is_named_on_both(pair: Pair) -> None:
    config = engine_config("tiny-v41", layout=LAYOUT, heartbeat_timeout=HEARTBEAT_TIMEOUT_S)
    first, other, _ = pair.both(config, REAL)
    first.ask(max_tokens=4000)
    assert first.read() == {"begun": True}
    begin_s = time.monotonic()
    os.kill(worker_pids(other.pid, REAL)[0], signal.SIGKILL)
    assert first.read()["error"] == "worker-1: was killed by SIGKILL (node 1)"
    assert time.monotonic() - begin_s < 5.0
    assert first.wait() == 1
    assert other.wait() == 1
    assert "worker-1: was killed by SIGKILL" in other.errors
    pair.assert_nothing_is_left()


# -- the ends of nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "stopped", "interrupted"])
def test_the_other_parent_goes(pair: Pair, how: str) -> None:
    first, other, _ = pair.both(scripted(), SCRIPTED)
    first.ask(max_tokens=150)
    assert first.read() == {"begun": True}
    os.kill(other.pid, {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}[how])
    error = first.read()["error"]
    expected = {"killed": "connection is lost", "stopped": "no sign of life", "interrupted": "stopped by its operator"}[how]
    assert error.startswith("node-1: ")
    assert expected in error
    assert first.wait() == 1
    if how == "stopped":
        os.kill(other.pid, signal.SIGCONT)
    assert other.wait() == {"killed": -signal.SIGKILL, "stopped": 1, "interrupted": 130}[how]
    pair.assert_nothing_is_left()


def test_node_0_is_killed_while_idle(pair: Pair) -> None:
    first, other, _ = pair.both(scripted(), SCRIPTED)
    first.process.kill()
    assert other.wait() == 1
    assert "node-0: the connection is lost" in other.errors
    pair.assert_nothing_is_left()


def test_a_failure_of_node_0_is_told(pair: Pair) -> None:
    first, other, _ = pair.both(scripted(raise_at_step=3), SCRIPTED)
    first.ask(max_tokens=150)
    assert first.read() == {"begun": True}
    assert "scripted failure in step 3" in first.read()["error"]
    assert first.wait() == 1
    assert other.wait() == 1
    assert "scripted failure in step 3" in other.errors
    pair.assert_nothing_is_left()


# -- nodes that do not meet ---------------------------------------------------------------------------------------------------


def test_nodes_with_other_options_say_what_differs(pair: Pair) -> None:
    nodes = [pair.start(number, scripted(), SCRIPTED, dtype=dtype) for number, dtype in enumerate(("float32", "bfloat16"))]
    for node in nodes:
        assert node.wait() == 2
        assert "dtype is float32 on node 0 and bfloat16 on node 1" in node.errors
        assert "layout" not in node.errors


def test_a_missing_node_is_named(pair: Pair) -> None:
    config = msgspec.structs.replace(scripted(), supervision=msgspec.structs.replace(scripted().supervision, start_timeout_s=1.0))
    first = pair.start(0, config, SCRIPTED)
    assert first.wait() == 1
    assert "node 1: did not come" in first.errors
    other = pair.start(1, config, SCRIPTED)
    assert other.wait() == 1
    assert "node-0: did not answer" in other.errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nnodes": 3}, "has 2 ranks; needed: a multiple of --nnodes 3"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank is 2; allowed with --nnodes 2: 0 to 1"),
        ({"node_rank": 1}, "--node-rank is 1; allowed with --nnodes 1: 0 to 0"),
        ({"nnodes": 2, "master_addr": ""}, "--nnodes needs --master-addr"),
        ({"nnodes": 2, "on_worker_death": "restart"}, "use exit"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], expected: str) -> None:
    from engine.core.errors import ConfigError

    with pytest.raises(ConfigError, match=expected):
        engine_config("tiny-v41", **({"layout": LAYOUT, "master_addr": "192.0.2.1"} | options))
