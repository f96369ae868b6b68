"""Starts the ranks of a replica as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.parallel.lockstep import Case, Outcome

ROOT = Path(__file__).parents[2]


def spawn(folder: Path, cases: list[Case], num_ranks: int) -> list[subprocess.Popen[str]]:
    (folder / "cases.json").write_bytes(msgspec.json.encode(cases))
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.parallel.lockstep"]
    return [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]


def launch(folder: Path, cases: list[Case], num_ranks: int, timeout_s: float = 120.0) -> list[dict[str, Outcome]]:
    """Outcomes by rank and case."""
    ranks = spawn(folder, cases, num_ranks)
    try:
        errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
    return [msgspec.json.decode((folder / f"result-{rank}.json").read_bytes(), type=dict[str, Outcome]) for rank in range(num_ranks)]
