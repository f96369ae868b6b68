"""Starts the ranks of a replica as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.parallel.lockstep import Case, Outcome

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def run_ranks(folder: Path, cases: list[Case], num_ranks: int) -> tuple[list[int], str]:
    """Exit codes of the ranks, and what they wrote to stderr."""
    (folder / "cases.json").write_bytes(msgspec.json.encode(cases))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.parallel.lockstep", str(num_ranks), str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def launch(folder: Path, cases: list[Case], num_ranks: int) -> list[dict[str, Outcome]]:
    """Outcomes by rank and case."""
    codes, errors = run_ranks(folder, cases, num_ranks)
    assert not any(codes), errors
    return [msgspec.json.decode((folder / f"result-{rank}.json").read_bytes(), type=dict[str, Outcome]) for rank in range(num_ranks)]
