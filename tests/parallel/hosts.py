"""Two hosts on one machine: network namespaces joined by a cable (a veth pair); where those cannot be made, two processes on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NUM_HOSTS = 2


class Hosts:
    """``kind`` says which of the two it is."""

    def __init__(self, kind: str, addresses: Sequence[str], prefixes: Sequence[Sequence[str]]) -> None:
        self.kind = kind
        self.addresses = addresses
        self._prefixes = prefixes
        self.port = free_port()

    @property
    def can_cut(self) -> bool:
        return self.kind == "network namespaces"

    def command(self, host: int, *arguments: str) -> list[str]:
        """``arguments`` as run on ``host``; the process keeps its pid."""
        return [*self._prefixes[host], *arguments]

    def cut(self) -> None:
        """Pull the cable: from now on packets are lost without a word."""
        self._set_cable("down")

    def plug(self) -> None:
        if self.can_cut:
            self._set_cable("up")

    def _set_cable(self, state: str) -> None:
        subprocess.run(self.command(1, "ip", "link", "set", "cable1", state), check=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    names = [f"twinfer-{os.getpid()}-{host}" for host in range(NUM_HOSTS)]
    try:
        addresses = _lay_cable(names)
        if addresses is None:
            yield Hosts("loopback", ["127.0.0.1"] * NUM_HOSTS, [[]] * NUM_HOSTS)
        else:
            yield Hosts("network namespaces", addresses, [["ip", "netns", "exec", name] for name in names])
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _lay_cable(names: Sequence[str]) -> list[str] | None:
    """The hosts' addresses; None where this process may not or cannot."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return None
    addresses = [f"192.0.2.{host + 1}" for host in range(NUM_HOSTS)]  # a network for documentation: nobody's
    commands = [["ip", "netns", "add", name] for name in names]
    ends = ["cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1]]
    commands.append(["ip", "link", "add", *ends])
    for host, name in enumerate(names):
        inside = ["ip", "-n", name]
        commands += [
            [*inside, "address", "add", f"{addresses[host]}/24", "dev", f"cable{host}"],
            [*inside, "link", "set", f"cable{host}", "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    commands += [["ip", "netns", "exec", name, "true"] for name in names]
    done = (subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in commands)
    return addresses if all(done) else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
