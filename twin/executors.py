"""Many simulations at once: in this process, in processes of this machine, or on a Ray cluster. Every way runs the same function on the
same bytes (data both ways; nothing executable travels), and answers come in the order of the questions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from engine.core.errors import ConfigError, StoppedError, TwinferError

Executor = Literal["process", "ray"]
EXECUTORS: tuple[Executor, ...] = ("process", "ray")
MAX_JOBS = 1024
_EXIT_INTERRUPTED = 130

# Bytes of one simulation's question to the bytes of its answer; must be a function that ``twin.point`` runs as a program, too.
Answer = Callable[[bytes], bytes]


def run_all(questions: Sequence[bytes], answer: Answer, jobs: int, executor: Executor = "process") -> Iterator[bytes]:
    """Answers one by one. Raises TwinferError where a process of its own dies without an answer."""
    if executor == "ray":
        yield from _on_ray(questions, answer, jobs)
    elif jobs == 1 or len(questions) == 1:
        yield from map(answer, questions)
    else:
        yield from _in_processes(questions, min(jobs, len(questions)))


def _in_processes(questions: Sequence[bytes], jobs: int) -> Iterator[bytes]:
    """A process for each question, ``jobs`` at a time: it begins empty, gives all its memory back, and takes nothing else down with it."""
    running: set[subprocess.Popen[bytes]] = set()
    stopped = False
    starting = threading.Lock()  # whoever ends them all must know of each that was started

    def ask(question: bytes) -> bytes:
        with starting:
            if stopped:
                raise StoppedError(_EXIT_INTERRUPTED)
            process = subprocess.Popen(
                [sys.executable, "-m", "twin.point"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
            )
            running.add(process)
        out, _ = process.communicate(question)
        running.discard(process)
        if process.returncode:
            raise TwinferError(f"a simulation's process ended with exit code {process.returncode} and no answer (its errors stand above)")
        return out

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(ask, question) for question in questions]
        try:
            for future in futures:
                yield future.result()
        finally:
            with starting:
                stopped = True
                for process in tuple(running):
                    process.kill()
            for future in futures:
                future.cancel()


def _environment() -> dict[str, str]:
    """Ours, with this checkout first where modules are looked for. One simulation is one thread: libraries must not take every core."""
    here = str(Path(__file__).parents[1])
    path = os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _on_ray(questions: Sequence[bytes], answer: Answer, jobs: int) -> Iterator[bytes]:
    """One Ray task of one CPU a question; the cluster of RAY_ADDRESS, else one on this machine of ``jobs`` CPUs."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--executor ray needs ray: pip install -e '.[ray]'; without it --executor process uses this machine") from None

    has_begun = ray.is_initialized()
    if not has_begun:
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs, "include_dashboard": False}
        ray.init(log_to_driver=False, **local)
    try:
        task = ray.remote(answer)
        waiting = [task.remote(question) for question in questions]
        for reference in waiting:
            yield ray.get(reference)
    finally:
        if not has_begun:
            ray.shutdown()
