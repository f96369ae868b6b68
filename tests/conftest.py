"""One thread for the numeric libraries: the tests' tensors are tiny, and threads that wait for each other on a busy machine spin."""

from __future__ import annotations

import os

# Before torch is imported, here and in the worker processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TWINFER_NUM_THREADS", "1")
