"""Which of this machine's addresses and network interfaces a replica uses."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path

from engine.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s H 2x 4s 16x")  # name, family, IPv4 address: the parts of struct ifreq that matter here


def local_address(host: str, port: int, *, is_own: bool) -> str:
    """The address of this machine that belongs to ``host``: its own where ``is_own``, else the one from which it is reached.

    May ask a name server. Raises ConfigError where there is none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--master-addr {host}: {error}") from None
    if is_own:
        return str(address[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: the kernel names the address it would send from
        try:
            probe.connect(address)
        except OSError as error:
            raise ConfigError(f"--master-addr {host}: no way there from this machine: {error}") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface with ``address``; None where it cannot be found out."""
    if not sys.platform.startswith("linux"):
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return _interface_v6(wanted) if wanted.version == 6 else _interface_v4(wanted)


def _interface_v4(wanted: ipaddress.IPv4Address) -> str | None:
    import fcntl  # there is none on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, _IFREQ.pack(name.encode(), socket.AF_INET, b""))
            except OSError:  # it has no such address
                continue
            # An address of 127/8 is the loopback's, whichever it is.
            mine = ipaddress.IPv4Address(answer[20:24])
            if mine == wanted or (mine.is_loopback and wanted.is_loopback):
                return name
    return None


def _interface_v6(wanted: ipaddress.IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for fields in map(str.split, lines):
        if len(fields) == 6 and int(fields[0], 16) == int(wanted):
            return fields[5]
    return None
