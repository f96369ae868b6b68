"""Worker processes forked from one that has imported torch already: they start in a tenth of a second instead of seconds.

``python -m tests.parallel.forkserver FD PARENT_PID`` serves requests on a socket: a module and two descriptors come, the pid of a process
that runs the module goes back. The process is forked twice and so becomes a child of the tests' process, as if that had spawned
it: it can be waited for, and it knows its parent.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import msgspec

from engine.actors.worker_main import _die_with_parent

ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_BYTES = 1 << 16
_LIBRARIES = ("engine.model.build", "engine.model.v41", "engine.model.dense", "engine.model.load")


class Request(msgspec.Struct, frozen=True):
    module: str
    parent_pid: int
    environment: dict[str, str]


class Forked:
    """What is used of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The tests' side. A context manager: while it is open, this process adopts the orphans among its descendants."""

    def __enter__(self) -> ForkServer:
        self._adopt(True)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.parallel.forkserver", str(theirs.fileno()), str(os.getpid())]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
        self._socket = ours
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(10)
        self._adopt(False)

    def spawn(self, module: str, plan_fd: int, heartbeat_fd: int) -> Forked:
        """In place of ``engine.actors.worker._spawn``."""
        request = msgspec.json.encode(Request(module, os.getpid(), dict(os.environ)))
        socket.send_fds(self._socket, [request], [plan_fd, heartbeat_fd])
        return Forked(int(self._socket.recv(32)))

    @staticmethod
    def _adopt(on: bool) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def serve(sock: socket.socket) -> None:
    for name in _LIBRARIES:
        importlib.import_module(name)
    while True:
        data, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE_BYTES, 2)
        if not data:
            return
        request = msgspec.json.decode(data, type=Request)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            worker = os.fork()
            if worker == 0:
                os.close(read_end)
                os.close(write_end)
                sock.close()
                _become(request, fds)
            os.write(write_end, str(worker).encode())
            os._exit(0)
        os.waitpid(child, 0)
        sock.send(os.read(read_end, 32))
        for fd in (read_end, write_end, *fds):
            os.close(fd)


def _become(request: Request, fds: list[int]) -> None:
    os.environ.update(request.environment)
    os.setsid()
    while os.getppid() != request.parent_pid:  # until the process between has ended
        time.sleep(0.001)
    os.dup2(2, 1)
    for fd in fds:
        os.set_inheritable(fd, True)
    sys.argv = [request.module, f"--plan-fd={fds[0]}", f"--heartbeat-fd={fds[1]}", f"--parent-pid={request.parent_pid}"]
    with warnings.catch_warnings(action="ignore"):  # that the product's module has been imported before it is run
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    os._exit(1)  # a worker's module does not return


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
