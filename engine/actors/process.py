"""Child processes of the engine: started from this very program, tied to the life of their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import trio

# How long torch's threads spin where they wait for each other, before they sleep (GNU OpenMP: some tens of microseconds). By default
# it is milliseconds, and where another process keeps a core busy a thread spins while the one it waits for has none: a decode step
# took fifty times as long, with this at most three times; idle there is no difference.
_SPIN_COUNT = "2000"
_REAP_POLL_S = 0.01  # where the system has no pidfd
_PROJECT_ROOT = Path(__file__).resolve().parents[2]


def spawn_module(module: str, fds: Mapping[str, int]) -> subprocess.Popen[bytes]:
    """Start the interpreter on ``module``, which gets ``--NAME=FD`` for each descriptor, and ``--parent-pid``.

    Called in trio's own thread although it blocks for some milliseconds: the child asks the kernel to be killed when its
    parent ends, and by that the kernel means the thread that spawned it.
    """
    environment = dict(os.environ)
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_PROJECT_ROOT), *([inherited] if inherited else [])])
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    arguments = [f"--{name}={fd}" for name, fd in fds.items()] + [f"--parent-pid={os.getpid()}"]
    return subprocess.Popen(
        # -P: never import from the directory the user happens to be in.
        [sys.executable, "-P", "-m", module, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout belongs to the command's answer
        pass_fds=tuple(fds.values()),
        start_new_session=True,  # Ctrl-C goes to the terminal's foreground group: to the parent alone
    )


def open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


async def wait_exit(process: subprocess.Popen[bytes], pidfd: int | None) -> int:
    """The exit code, once there is one. One task at a time where there is a pidfd."""
    while (code := process.poll()) is None:
        if pidfd is not None:
            await trio.lowlevel.wait_readable(pidfd)
        else:
            await trio.sleep(_REAP_POLL_S)
    return code


def is_stopped(pid: int) -> bool:
    """Whether the kernel lists the process as stopped; false where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
