"""One replica over several machines, from the options: which ranks are where, and what all nodes must agree on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.actors.config import NodesConfig, SupervisionConfig, WorkerConfig
from engine.core.errors import ConfigError
from engine.core.specs import ModelSpec
from engine.model.registry import resolve
from engine.options import Resolved
from engine.reading import read_bytes
from engine.version import VERSION

# What one node may have otherwise than another: which rank it is, and where on its machine things are.
_LOCAL_FIELDS = frozenset(
    ("name", "model", "device", "rank", "data_rank", "tensor_rank", "rendezvous", "cpu_cores", "interface", "num_threads", "record")
)
_MAX_TEXT_BYTES = 256 << 20

_log = logging.getLogger("twinfer.nodes")


def ranks_per_node(options: Resolved, num_ranks: int, tp: int) -> int:
    """Raises ConfigError where the layout's ranks cannot be spread over ``--nnodes``, or the node's options do not go together."""
    num_nodes, node = int(options["nnodes"]), int(options["node_rank"])
    if not 0 <= node < num_nodes:
        raise ConfigError(f"--node-rank is {node}; allowed with --nnodes {num_nodes}: 0 to {num_nodes - 1}")
    if num_nodes == 1:
        return num_ranks
    if num_ranks % num_nodes:
        raise ConfigError(f"layout {options['layout']} has {num_ranks} ranks; needed: a multiple of --nnodes {num_nodes}")
    if not options["master_addr"]:
        raise ConfigError("--nnodes needs --master-addr: an address of the machine with --node-rank 0, under which all others reach it")
    if options["on_worker_death"] == "restart":
        raise ConfigError("--on-worker-death restart: a replica over several nodes is not restarted by itself; use exit")
    per_node = num_ranks // num_nodes
    if per_node % tp:
        _log.warning("tp groups of %d ranks span nodes of %d: the sums of every layer cross the network", tp, per_node)
    return per_node


def nodes_config(
    options: Resolved, workers: Sequence[WorkerConfig], supervision: SupervisionConfig, spec: ModelSpec, model: str
) -> NodesConfig | None:
    """None for a replica on this machine alone."""
    if options["nnodes"] == 1:
        return None
    return NodesConfig(
        num_nodes=options["nnodes"],
        node=options["node_rank"],
        host=options["master_addr"].strip("[]"),
        port=options["master_port"],
        facts=tuple(_facts(options, workers[0], supervision, spec, model).items()),
    )


def _facts(options: Resolved, worker: WorkerConfig, supervision: SupervisionConfig, spec: ModelSpec, model: str) -> Mapping[str, str]:
    """Name and value, as a person would compare them."""
    facts = {
        "version": VERSION,
        "torch": importlib.metadata.version("torch"),
        "nnodes": str(options["nnodes"]),
        "model": f"{spec.num_layers} layers, {_digest(msgspec.json.encode(msgspec.structs.replace(spec, name='')))}",
        "model files": "not read" if worker.load_format == "random" else _digest_of_files(resolve(model)),
        "device": worker.device.partition(":")[0],
        "heartbeat_timeout": f"{supervision.heartbeat_timeout_s:g}",
    }
    values: dict[str, Any] = msgspec.to_builtins(worker)
    values |= values.pop("cache")
    facts |= {name: str(value) for name, value in values.items() if name not in _LOCAL_FIELDS}
    # Automatic sizes depend on a machine's free memory.
    facts["KV tokens (--max-total-tokens)"] = str(worker.cache.block_size * int(facts.pop("num_blocks")))
    return facts


def _digest_of_files(path: Path) -> str:
    """Of names and sizes of the weights, and of the other files' contents: weights are too large to read for this."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    parts = []
    for file in files:
        if file.suffix in (".safetensors", ".gguf"):
            parts.append(f"{file.name} {file.stat().st_size}")
        elif file.suffix in (".json", ".jinja"):
            parts.append(f"{file.name} {_digest(read_bytes(file, _MAX_TEXT_BYTES))}")
    return _digest("\n".join(parts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
