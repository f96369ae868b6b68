"""``--record-trace``: the folder a recording goes to, checked before anything is loaded, and what each worker is told about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.actors.config import RecordConfig, WorkerConfig
from engine.core.errors import ConfigError
from engine.core.specs import ModelSpec
from engine.model.files import fingerprint
from engine.model.registry import resolve
from engine.options import Resolved
from engine.writing import make_folder

# Of a worker's configuration: what its plans and times do not say by themselves.
_FIELDS = (
    *("layout", "data_rank", "tensor_rank", "dtype", "num_threads", "load_format", "cache_rounding", "engram"),
    *("redundant_experts", "draft_redundant_experts", "forced_acceptance", "forced_routing"),
)


def open_record_folder(path: str) -> None:
    """Make the folder. Raises ConfigError where it holds anything, or takes nothing."""
    folder = Path(path)
    make_folder("--record-trace", folder, "the recording")
    try:
        is_empty = next(folder.iterdir(), None) is None
    except OSError as error:
        raise ConfigError(f"--record-trace {folder} cannot be read: {error.strerror}") from None
    if not is_empty:
        raise ConfigError(f"--record-trace {folder}: the folder is not empty; a recording goes to a new one, or an empty one")


def with_recording(worker: WorkerConfig, options: Resolved, spec: ModelSpec, model: str) -> WorkerConfig:
    """The worker's configuration, and with it what it is to record and the facts that are written beside the steps."""
    if not options["record_trace"]:
        return worker
    environment: dict[str, Any] = {"model": spec.name, "model_fingerprint": fingerprint(resolve(model))}
    environment |= {name: getattr(worker, name) for name in _FIELDS}
    environment |= {"block_size": worker.cache.block_size, "max_draft_tokens": worker.cache.max_draft_tokens}
    record = RecordConfig(str(Path(options["record_trace"]).absolute()), options["record_mode"], options["record_steps"], environment)
    return msgspec.structs.replace(worker, record=record)
