"""One thread for the numeric libraries: the tests' tensors are tiny, and threads that wait for each other on a busy machine spin."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Before torch is imported, here and in the worker processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TWINFER_NUM_THREADS", "1")

# A shell starts what goes to its background with Ctrl-C ignored, and every process inherits that; the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU run as they are where there is one, and are not collected elsewhere."""
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
